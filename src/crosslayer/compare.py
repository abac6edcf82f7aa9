"""Arms × seeds on the same batches in the same order from the same body weights -> results.json -> the report.

results.json is written whole after every run, so a comparison that is stopped has lost at most the run in hand, and one
started again on the same folder goes on where it was.
"""

import hashlib
import json
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import __version__
from .registry import make
from .train.data import Corpus, corpus
from .train.run import Diverged, Progress, Settings, build, train

RESULTS = "results.json"
Watch = Callable[[str, int, Progress], None]


class Comparison(NamedTuple):
    settings: Settings
    arms: list[str]
    seeds: int
    folder: Path
    text: Corpus
    results: dict[str, Any]  # what results.json holds

    @property
    def missing(self) -> list[tuple[str, int]]:
        """The runs still to do, every arm's first seed before any arm's second."""
        done = {(row["arm"], row["seed"]) for row in (*self.results["runs"], *self.results["diverged"])}
        return [(arm, seed) for seed in range(self.seeds) for arm in self.arms if (arm, seed) not in done]

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The finished runs of this comparison's arms and seeds."""
        return [row for row in self.results["runs"] if row["arm"] in self.arms and row["seed"] < self.seeds]


def prepare(settings: Settings, arms: list[str], seeds: int, folder: Path | None) -> Comparison:
    """Check everything a comparison needs, and read what its folder already holds.

    Raises:
        ValueError: an arm, an option, the data or the folder is not as it should be. Nothing has been written.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    arms = list(dict.fromkeys(str(make(arm)) for arm in arms))
    with torch.device("meta"):  # an arm that cannot be built says so before any other is trained
        for arm in arms:
            build(settings, arm, 0)
    text = corpus(settings.data, settings.context)
    valid = next(iter(text.valid.values()))
    sizes = {"train_bytes": text.train.tokens.text_bytes, "valid_bytes": valid.tokens.text_bytes}
    identity = {
        "settings": asdict(settings),
        "data": {**sizes, "sha256": text.digest},
    }
    if folder is None:  # one of its own for every setting, so that the same command goes on with the same folder
        folder = Path(f"compare-{hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]}")
    results = {
        "environment": environment(),
        **identity,
        "entropy": next(iter(text.entropy.values())),
        **held(folder, identity),
    }
    return Comparison(settings, arms, seeds, folder, text, results)


def environment() -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return {
        "crosslayer": __version__,
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def held(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """The runs a folder already holds, if it is this comparison's: finished and diverged."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: a file is in the way of the output folder")
    path = folder / RESULTS
    if not path.exists():
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder}: not empty and without {RESULTS}, so not a comparison's; choose another --out")
        return {"runs": [], "diverged": []}
    try:
        found = json.loads(path.read_text("utf8"))
        for part, expected in identity.items():
            for key, value in expected.items():
                if found[part][key] != value:
                    raise ValueError(
                        f"{folder}: belongs to another comparison, with {key} {found[part][key]!r} where this one has "
                        f"{value!r}; choose another --out"
                    )
        return {"runs": found["runs"], "diverged": found["diverged"]}
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(
            f"{path}: not a comparison's results (damaged?); move it away or choose another --out"
        ) from None


def write(path: Path, content: str) -> None:
    """Write a file whole or not at all."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(content, "utf8")
    os.replace(aside, path)


def run(comparison: Comparison, watch: Watch) -> None:
    """Do the runs that are missing, writing results.json after each."""
    comparison.folder.mkdir(parents=True, exist_ok=True)
    for arm, seed in comparison.missing:
        try:
            row = train(comparison.settings, arm, seed, comparison.text, lambda p: watch(arm, seed, p))
            comparison.results["runs"].append(row)
        except Diverged as end:  # a result too, and no reason to stop the others
            comparison.results["diverged"].append({"arm": arm, "seed": seed, "step": end.step, "loss": str(end.loss)})
        write(comparison.folder / RESULTS, json.dumps(comparison.results, indent=1))


class Row(NamedTuple):
    """One arm of the table. Spreads are standard deviations over seeds, None for a single one."""

    arm: str
    seeds: int
    parameters: int
    extra: float  # share of the body's parameters
    loss: float
    loss_spread: float | None
    bits: float
    bits_spread: float | None
    difference: float | None  # of the loss from prenorm's, seed by seed; None without one
    difference_spread: float | None
    speed: float  # tokens a second
    relative_speed: float | None  # to prenorm's
    relative_memory: float | None


def table(comparison: Comparison) -> list[Row]:
    """The arms that have finished a run, in the order they were asked for."""
    by_arm = {arm: {r["seed"]: r for r in comparison.runs if r["arm"] == arm} for arm in comparison.arms}
    plain = by_arm.get("prenorm") or {}
    rows = []
    for arm, runs in by_arm.items():
        if not runs:
            continue
        shared = sorted(runs.keys() & plain.keys())
        first = next(iter(runs.values()))
        loss, loss_spread = spread([r["valid_loss"] for r in runs.values()])
        bits, bits_spread = spread([r["bits_per_byte"] for r in runs.values()])
        gap, gap_spread = spread([runs[s]["valid_loss"] - plain[s]["valid_loss"] for s in shared])
        rows.append(
            Row(
                arm,
                len(runs),
                first["parameters"],
                first["extra_parameters"] / (first["parameters"] - first["extra_parameters"]),
                loss,
                loss_spread,
                bits,
                bits_spread,
                gap if shared and arm != "prenorm" else None,
                gap_spread,
                statistics.mean(r["tokens_per_second"] for r in runs.values()),
                ratio(runs, plain, "tokens_per_second", shared),
                ratio(runs, plain, "activation_bytes", shared),
            )
        )
    return rows


def spread(values: list[float]) -> tuple[float, float | None]:
    if not values:
        return float("nan"), None
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def ratio(
    runs: dict[int, dict[str, Any]], plain: dict[int, dict[str, Any]], key: str, seeds: list[int]
) -> float | None:
    return statistics.mean(runs[s][key] / plain[s][key] for s in seeds) if seeds else None
