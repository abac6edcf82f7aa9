"""Results of the short study with known losses, as if every arm had been trained."""

import json
import random
from pathlib import Path

from benchmarks.evidence.studies import Plan, read_recipe
from crosslayer.train.rate_search import scaled_name
from tests.inspect.planted_runs import run_result

# of arms; 0 for all others. That of hyper is less than the noise.
EFFECTS = {"mudd": -0.2, "postnorm": 0.3, "one-way MUDD": -0.1, "hyper": 0.002}


def write_results(
    folder: Path, arms: list[str], seeds: int = 3, shift: float = 0.0, **changes
) -> Path:
    """A comparison's folder with results.json; each arm is best at twice the shared rate.

    `shift` is added to all losses, `changes` are other settings.
    """
    chance = random.Random(" ".join(arms))
    recipe = read_recipe()
    described, runs = {}, []
    for arm in recipe.arms:
        if arm.name not in arms:
            continue
        for factor in (0.5, 1, 2, 4):
            name = scaled_name(arm.name, factor)
            options = dict(arm.options)
            if factor != 1:
                options["lr"] = 0.004 * factor
            described[name] = {"connection": arm.connection, "options": options, "paper": {}}
            for seed in range(seeds if factor == 2 else 1):
                worse = 0.0 if factor == 2 else 0.1
                end = 5 + shift + EFFECTS.get(arm.name, 0) + worse + chance.gauss(seed / 50, 0.004)
                curve = [[step, end + 0.5 * (256 - step) / 256] for step in range(32, 257, 32)]
                runs.append(_run(name, arm.connection, seed, end, curve))
    settings = Plan("").settings() | {"data": "/home/someone/text.txt"} | changes
    results = {
        "environment": {
            "device": "CPU, 1 threads",
            "torch": "2.13.0",
            "python": "3.11",
            "crosslayer": "0.2",
        },
        "settings": settings,
        "data": {"bytes to train on": 1, "sha256": "0"},
        "scale": "full",
        "entropy": 2.5,
        "arms": described,
        "runs": runs,
        "diverged": [],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def _run(arm: str, connection: str, seed: int, loss: float, curve: list) -> dict:
    return run_result(
        arm,
        connection,
        seed,
        loss,
        parameters=2_656_384,
        valid={"wikitext-2": {"loss": loss}},
        metrics={},
        tokens_per_second=3000.0,
        curve=curve,
        seconds=170.0,
        inference_speed=100.0,
    )


def write_speeds(file: Path, speeds: dict[str, list[float]]) -> None:
    """Speeds of arms as shares of pre-norm's, like `python -m benchmarks arms` writes them.

    Compiled arms are twice as near to pre-norm.
    """
    lines = ["study,variant,arm,step of PreNorm,forward of PreNorm,decode of PreNorm,note"]
    for arm, shares in speeds.items():
        for share in shares:
            compiled = (1 + share) / 2
            lines.append(f"short,eager,{arm},{share},{share},{share},")
            lines.append(f"short,compiled,{arm},{compiled},{compiled},{compiled},")
    file.write_text("\n".join(lines) + "\n")
