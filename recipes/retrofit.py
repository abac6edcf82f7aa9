"""When to connect: from the start, late in training, or never.

Paper: DenseFormer (Pagliardini et al., 2024), arXiv 2402.02622, Table 5, which starts a 4x5-DenseFormer after N of 40k
iterations of a model on OpenWebText2, the schedule unchanged:

    N            never   0      1k     2k     4k     6k     10k    20k    30k
    perplexity   18.61   17.87  17.99  18.07  18.13  18.17  18.23  18.33  18.40

Here: any connection, on a body small enough for minutes. A run trains with PreNorm up to the switch, calls
`crosslayer.connect` on the trained model, and goes on with the same schedule, batches and optimizer state; what the
switch itself did to the validation loss is in the results. Expected, as in the paper: the later, the less is gained.
docs/retrofit.md is what this gave, with hardware, times and commands.

    python recipes/retrofit.py run --out retrofit --arms '[prenorm, mudd]'  # resumes; `run --help` has the rest
    python recipes/retrofit.py report --results '[retrofit]' --page docs/retrofit.md
"""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import crosslayer
from crosslayer.train.compare import describe_environment
from crosslayer.train.evaluation import evaluate_examples, evenly_spaced
from crosslayer.train.optimizers import build_optimizers, set_learning_rates
from crosslayer.train.parallel import launch_fabric, setup_model
from crosslayer.train.report import COLOURS
from crosslayer.train.settings import Settings
from crosslayer.train.task import Examples, build_model, find_task
from crosslayer.train.trainer import backward, clipped, examples

SWITCHES = (0.0, 0.05, 0.25, 0.5, 0.75)  # shares of the steps; 0 is from scratch
INTRODUCTION = (
    "What `recipes/retrofit.py` gave; its docstring says what a run is. At the switch, DenseFormer and MUDD change",
    "nothing, hyper-connections and attention residuals what the eps of a norm does, and MGR, which cannot start as",
    "PreNorm, much. Two seeds of the smaller body end 0.18 apart, so that only differences within a seed count there;",
    "on the larger one, of one seed, those below 0.01 are chance, and no connection is told from another.",
)
HEAD = (
    "connection",
    "connected at step",
    "at the switch",
    "validation loss",
    "against prenorm",
    "runs",
)


def run(
    out: str,
    arms: list[str],
    switches: tuple[float, ...] = SWITCHES,
    seed: int = 0,
    settings: dict[str, Any] = {"steps": 320},  # noqa: B006
) -> None:
    """Train every arm with every switch that `out` has no result of yet.

    Args:
        out: folder of one result a run.
        arms: like mudd "attnres(block_size=4)"; prenorm is never switched.
        switches: when to connect, as shares of the steps.
        seed: of the body's weights and of the batches.
        settings: any options of `crosslayer train`, which every run shares.
    """
    options = Settings.of(**settings)
    text = find_task(options.model).examples(options)
    for arm in arms:
        for share in switches if arm != "prenorm" else (0.0,):
            file = Path(out) / f"{arm} {share} {seed}.json".replace("/", "-")
            if not file.exists():
                row = retrofit(options, text, arm, round(share * options.optimization.steps), seed)
                file.parent.mkdir(parents=True, exist_ok=True)
                part = file.with_suffix(f".{os.getpid()}")
                part.write_text(json.dumps(row))
                part.replace(file)
                print(
                    f"{arm}, from step {row['switch']}: {row['valid_loss']:.4f} in {row['seconds']:.0f} s",
                    flush=True,
                )


def retrofit(
    settings: Settings, text: Examples, arm: str, switch: int, seed: int
) -> dict[str, Any]:
    """One run: PreNorm for `switch` steps, the arm from there on."""
    _, data, optimization, engine = settings
    fabric, job = launch_fabric(engine), find_task(settings.model)
    bare = build_model(settings, "prenorm" if switch else arm, text.classes, seed)
    model, plain = setup_model(fabric, bare, engine), build_optimizers(bare, optimization)
    held_out = next(iter(text.valid.values()))
    judged, start, curve, jump = (
        evenly_spaced(len(held_out), data.batch * data.held_out),
        time.perf_counter(),
        [],
        None,
    )
    batches = examples(fabric, text, settings, seed, 0)

    def valid_loss() -> float:
        return evaluate_examples(fabric, model, job, held_out, judged, data.batch)["loss"]

    for step in range(1, optimization.steps + 1):
        if step - 1 == switch > 0:
            before = valid_loss()
            crosslayer.connect(crosslayer.disconnect(bare), arm)
            model, plain = (
                setup_model(fabric, bare, engine),
                carried(plain, build_optimizers(bare, optimization)),
            )
            jump = valid_loss() - before
        set_learning_rates(plain, step - 1, optimization)
        backward(fabric, model, job, batches, engine.accumulate)
        clipped(bare, optimization.clip)
        for optimizer in plain:
            optimizer.step()
            optimizer.zero_grad()
        if step % max(1, optimization.steps // 20) == 0:
            curve.append([step, valid_loss()])
    return {
        "arm": arm,
        "switch": switch,
        "seed": seed,
        "jump": jump,
        "valid_loss": curve[-1][1],
        "curve": curve,
        "seconds": time.perf_counter() - start,
        "settings": settings.flat() | {"data": Path(data.data).name},
        **describe_environment(),
    }


def carried(
    before: list[torch.optim.Optimizer], after: list[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """Optimizers of the connected model that remember what the plain model's knew of its parameters."""
    for old, new in zip(before, after, strict=True):
        new.state.update(old.state)
    return after


def report(results: list[str], page: str) -> None:
    """Write a page with a table and a picture for each folder of results.

    Args:
        results: folders that `run` filled.
        page: a .md file to write; its pictures are .svg files beside it.
    """
    parts = [f"# {__doc__.split(chr(10))[0]}", "", *INTRODUCTION]
    for number, folder in enumerate(results, start=1):
        rows = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]
        picture = Path(page).with_name(f"{Path(page).stem}{number}.svg")
        draw(rows, picture)
        parts += ["", *section(rows, picture.name)]
    Path(page).write_text("\n".join(parts) + "\n")


def section(rows: list[dict[str, Any]], picture: str) -> list[str]:
    s, never = rows[0]["settings"], losses(rows, "prenorm", 0)
    lines = [
        f"## {s['steps']} steps of {s['batch']} × {s['context']} bytes of {s['data']}",
        "",
        f"A {s['family']} body of {s['layers']} layers, width {s['dim']}, {s['heads']} heads; AdamW at {s['lr']:g}, "
        f"{s['precision']}; on {rows[0]['device']}, torch {rows[0]['torch']}, crosslayer {rows[0]['crosslayer']}. "
        "Losses in nats a byte on held-out text; differences seed by seed, ± their standard deviation.",
        "",
        f"![Validation loss of late switches]({picture})",
        "",
        "| " + " | ".join(HEAD) + " |",
        "| --- |" + " ---: |" * (len(HEAD) - 1),
    ]
    for arm, switch in sorted(
        {(row["arm"], row["switch"]) for row in rows}, key=lambda key: (key[0] != "prenorm", key)
    ):
        found, plain = losses(rows, arm, switch), arm == "prenorm"
        jumps = [
            row["jump"] for row in rows if (row["arm"], row["switch"]) == (arm, switch) and switch
        ]
        cells = [
            f"`{arm}`",
            "never" if plain else str(switch),
            f"{max(jumps, key=abs):+.1e}" if jumps else "–",
            spread(list(found.values()), ".4f"),
            "–"
            if plain
            else spread([found[seed] - never[seed] for seed in found if seed in never], "+.4f"),
            str(len(found)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def losses(rows: list[dict[str, Any]], arm: str, switch: int) -> dict[int, float]:
    return {
        row["seed"]: row["valid_loss"]
        for row in rows
        if (row["arm"], row["switch"]) == (arm, switch)
    }


def spread(values: list[float], form: str) -> str:
    if not values:
        return "–"
    around = f" ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{around}"


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Final loss against the switch, one line a connection; and the first seed's curves of the first of them."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "crosslayer"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    steps, never = rows[0]["settings"]["steps"], losses(rows, "prenorm", 0)
    arms = sorted({row["arm"] for row in rows} - {"prenorm"})
    left.axhline(0, color=COLOURS[0], label="prenorm (never)", linewidth=1.2)
    for colour, arm in zip(COLOURS[1:], arms, strict=False):
        apart = {
            at: [loss - never[seed] for seed, loss in losses(rows, arm, at).items()]
            for at in sorted({row["switch"] for row in rows if row["arm"] == arm})
        }
        means = [statistics.mean(values) for values in apart.values()]
        left.plot(
            [at / steps for at in apart], means, color=colour, label=arm, marker="o", markersize=4
        )
    left.set_xlabel("connected after this share of the steps")
    left.set_ylabel("final loss against prenorm, nats a byte")
    shown = "mudd" if "mudd" in arms else arms[0]
    curves = sorted(
        (row for row in rows if row["arm"] == shown and row["seed"] == 0),
        key=lambda row: row["switch"],
    )
    plain = [row for row in rows if row["arm"] == "prenorm" and row["seed"] == 0]
    for colour, row in zip(COLOURS, plain + curves, strict=False):
        xs, ys = zip(*row["curve"], strict=True)
        label = "prenorm" if row["arm"] == "prenorm" else f"{shown} from step {row['switch']}"
        right.plot(xs, ys, color=colour, label=label, linewidth=1.4)
    right.set_ylim(
        top=min(ys[len(ys) // 4] for ys in [[y for _, y in row["curve"]] for row in plain]) * 1.05
    )
    right.set_xlabel("step")
    right.set_ylabel("validation loss")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli([run, report], as_positional=False)
