"""Kills commands at random moments and compares what the resumed ones end with.

    python -m tests.train.kills FOLDER --kills 100 --minutes 40

A command is killed (SIGKILL), started again and killed again until it has finished. Then its
numbers must be, bitwise, those of one that nobody disturbed, and nothing may be left over. The same
command goes on where it stopped: FOLDER/counts.json has the kills so far.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import datasets.arrow_writer  # noqa: F401
import matplotlib.figure  # noqa: F401
import torch
from transformers.models.granite import modeling_granite  # noqa: F401

# imported once, and not in every process that is killed
import crosslayer.data.prepared
import crosslayer.train.export
import crosslayer.train.report  # noqa: F401
from crosslayer.cli.main import main

STEPS = 12
RECIPE = """
data: {text}
layers: 2
dim: 32
heads: 2
context: 32
batch: 4
steps: {steps}
eval_batches: 2
evals: 2
save_every: 2
log_every: 1
diagnostics_every: 3
arms: [hyper, prenorm]
"""
# each with its share of the kills
COMMANDS = {
    "train": (12, ["train", "RECIPE", "--arm=hyper", "--out=OUT"]),
    "compare": (9, ["compare", "RECIPE", "--out=OUT"]),
    "prepare": (4, ["data", "prepare", "TEXT", "--tokenizer=bpe:300", "--out=OUT"]),
    "ranks": (1, ["train", "RECIPE", "--arm=hyper", "--out=OUT"]),
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


class Command:
    """One of `COMMANDS`, in a folder of its own.

    Args:
        name: of the command. "ranks" is torchrun's with two ranks.
        folder: of all commands.
    """

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, folder

    def start(self, out: Path) -> int:
        """Start the command; its process id.

        All commands but torchrun's are forked, so that nothing is imported again.
        """
        words = {"RECIPE": str(self.folder / "recipe.yaml"), "TEXT": str(self.folder / "text.txt")}
        arguments = [
            words.get(word, word.replace("OUT", str(out))) for word in COMMANDS[self.name][1]
        ]
        with open(self.folder / f"{self.name}.log", "ab") as log:
            if self.name == "ranks":
                command = [*TORCHRUN, "-m", "crosslayer", *arguments]
                return subprocess.Popen(command, stdout=log, stderr=log).pid
            child = os.fork()
            if not child:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                code = 1
                try:
                    code = main(arguments)
                finally:
                    os._exit(code)
            return child

    def is_finished(self, out: Path) -> bool:
        """Whether it would be refused, because what it makes is there: `data prepare` alone."""
        return self.name == "prepare" and out.exists()

    def numbers(self, out: Path) -> dict:
        """What a finished command must end with, and that nothing is left over."""
        names = {str(path.relative_to(out.parent)) for path in out.parent.rglob("*")}
        left = [name for name in names if name.endswith((".part", ".replaced")) or ".part/" in name]
        assert not left, left
        if self.name == "prepare":
            assert f"{out.name}/.lock" not in names
            return {"corpus": digest(out / "corpus.json"), "tokens": digest(*out.rglob("*.arrow"))}
        if self.name == "compare":
            assert not list(out.rglob("step-*")), "checkpoints of finished runs"
            assert (out / "report.html").exists() and (out / "report.md").exists()
            runs = json.loads((out / "results.json").read_text())["runs"]
            folders = {run["arm"]: next((out / "runs").glob(f"{run['arm']}-*")) for run in runs}
            logged = {arm: losses_logged(folder) for arm, folder in folders.items()}
            return {"runs": [numbers_of_run(run) for run in runs], "logged": logged}
        run = json.loads((out / "result.json").read_text())
        weights = digest(out / "model" / "model.safetensors")
        return {"run": numbers_of_run(run), "logged": losses_logged(out), "weights": weights}


def digest(*files: Path) -> str:
    content = hashlib.sha256()
    for file in sorted(files):
        content.update(file.read_bytes())
    return content.hexdigest()


def numbers_of_run(run: dict) -> dict:
    keys = ("arm", "curve", "valid", "metrics", "train_loss", "parameters", "skipped")
    return {key: run[key] for key in keys}


def losses_logged(folder: Path) -> dict[str, list]:
    """Every line of metrics.jsonl by its kind; each is whole, and no step comes twice."""
    kinds: dict[str, list] = {"loss": [], "held-out loss": [], "gain/0": []}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        (kind,) = kinds.keys() & metrics.keys()
        kinds[kind].append([metrics["step"], metrics[kind]])
    assert [step for step, _ in kinds["loss"]] == list(range(1, STEPS + 1)), folder
    assert [step for step, _ in kinds["gain/0"]] == list(range(3, STEPS + 1, 3)), folder
    return kinds


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}/exe").exists()  # a zombie has none


def kill(pid: int, draw: random.Random) -> bool:
    """Kill a command, or one of torchrun's ranks; whether it was still running.

    The ranks of a killed agent, and the agent of a killed rank, must end by themselves.
    """
    family = [pid, *children(pid)]
    with suppress(ProcessLookupError):  # a rank that has just ended
        os.kill(draw.choice(family), signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    until = time.time() + 120
    while any(is_running(rank) for rank in family[1:]):
        assert time.time() < until, f"ranks of {pid} go on"
        time.sleep(0.05)
    # torchrun's agent ends with an error where a rank was killed
    assert os.WIFSIGNALED(status) or len(family) > 1 or status == 0, "an error, see the log"
    return status != 0


def disturb(command: Command, kills: int, draw: random.Random, until: float) -> int:
    """Kill a command this often, or until it is late; how often."""
    folder = command.folder / command.name
    reference, out = folder / "undisturbed" / "out", folder / "disturbed" / "out"
    if not (folder / "usual.json").exists():
        shutil.rmtree(reference.parent, ignore_errors=True)
        reference.parent.mkdir(parents=True)
        start = time.time()
        assert os.waitpid(command.start(reference), 0)[1] == 0, f"see {command.name}.log"
        (folder / "usual.json").write_text(json.dumps(time.time() - start))
    usual = json.loads((folder / "usual.json").read_text())
    expected = command.numbers(reference)

    done = 0
    while done < kills and time.time() < until:
        out.parent.mkdir(parents=True, exist_ok=True)
        if command.is_finished(out):  # it was killed in its last moments
            end(command, out, expected)
            continue
        pid = command.start(out)
        delay = time.time() + draw.uniform(0, usual)
        while time.time() < delay and is_running(pid):
            time.sleep(0.005)
        if kill(pid, draw):
            done += 1
            continue
        end(command, out, expected)  # it was faster: begin anew
    if out.parent.exists():  # the last one ends undisturbed
        if not command.is_finished(out):
            assert os.waitpid(command.start(out), 0)[1] == 0, f"see {command.name}.log"
        end(command, out, expected)
    return done


def end(command: Command, out: Path, expected: dict) -> None:
    found = command.numbers(out)
    assert found == expected, (command.name, found, expected)
    shutil.rmtree(out.parent)


def run() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--commands", nargs="+", default=list(COMMANDS))
    options = parser.parse_args()
    until = time.time() + 60 * options.minutes
    torch.set_num_threads(1)
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{i}: the quick brown fox jumps over {i * i} lazy dogs.\n" for i in range(400)]
    (folder / "text.txt").write_text("".join(lines))
    (folder / "recipe.yaml").write_text(RECIPE.format(text=folder / "text.txt", steps=STEPS))
    file = folder / "counts.json"
    counts = json.loads(file.read_text()) if file.exists() else dict.fromkeys(options.commands, 0)

    shares = {name: COMMANDS[name][0] for name in options.commands}
    goals = {name: max(1, options.kills * shares[name] // sum(shares.values())) for name in shares}
    goals[options.commands[0]] += options.kills - sum(goals.values())
    draw = random.Random(sum(counts.values()))
    while any(counts[name] < goals[name] for name in goals) and time.time() < until:
        for name, goal in goals.items():
            missing = min(goal - counts[name], shares[name])
            counts[name] += disturb(Command(name, folder), missing, draw, until)
            file.write_text(json.dumps(counts))
            print(counts, flush=True)
    print(sum(counts.values()), "kills")


if __name__ == "__main__":
    run()
