"""Arms × seeds on the same batches in the same order from the same body weights -> results.json -> the report.

results.json is written whole after every run, and a run in hand is saved when it is stopped, so a comparison that is
started again on the same folder goes on where it was.
"""

import hashlib
import json
import platform
import re
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import __version__
from ..files import write_text_atomic
from .recipe import Arm, Recipe
from .settings import OPTIONS, Model
from .task import SHAPES, Examples, build_model, find_task
from .trainer import Diverged, Progress, train

RESULTS, RUNS = "results.json", "runs"
Watch = Callable[[Arm, int, Progress], None]


@dataclass
class Comparison:
    """What is compared, and what is known of it so far.

    Args:
        recipe: the arms and their settings.
        seeds: runs of each arm.
        folder: of results.json and the report.
        corpora: the examples of each arm, by its name.
        results: what results.json holds.
    """

    recipe: Recipe
    seeds: int
    folder: Path
    corpora: dict[str, Examples]
    results: dict[str, Any]

    @property
    def arms(self) -> list[Arm]:
        return self.recipe.arms

    @property
    def missing(self) -> list[tuple[Arm, int]]:
        """The runs still to do, every arm's first seed before any arm's second."""
        done = {
            (row["arm"], row["seed"]) for row in (*self.results["runs"], *self.results["diverged"])
        }
        return [
            (arm, seed)
            for seed in range(self.seeds)
            for arm in self.arms
            if (arm.name, seed) not in done
        ]

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The finished runs of this comparison's arms and seeds."""
        names = {arm.name for arm in self.arms}
        return [
            row for row in self.results["runs"] if row["arm"] in names and row["seed"] < self.seeds
        ]


def prepare(recipe: Recipe, seeds: int, folder: Path | None) -> Comparison:
    """Check everything a comparison needs, and read what its folder already holds.

    Raises:
        ValueError: an arm, an option, the data or the folder is not as it should be. Nothing has been written.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    for arm in recipe.arms:  # one that cannot be built says so before any other is trained
        with torch.device("meta"):
            build_model(recipe.settings(arm), arm.connection, 256, 0)
    corpora, shared = {}, {}  # type: ignore[var-annotated]
    for arm in recipe.arms:
        settings = recipe.settings(arm)
        image = [
            settings.model.body.get(key) for keys, _ in SHAPES for key in keys
        ]  # what pictures are cut to
        key = json.dumps([vars(settings.data), find_task(settings.model).unit, image])
        shared[key] = corpora[arm.name] = shared.get(key) or find_task(settings.model).examples(
            settings
        )
    first = corpora[recipe.arms[0].name]
    identity = {
        "settings": recipe.settings().identity(),
        "data": {**first.sizes, "sha256": first.digest},
    }
    if (
        folder is None
    ):  # one of its own for every setting, so that the same command goes on with the same folder
        folder = Path(
            f"compare-{hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]}"
        )
    rows = {
        arm.name: {"connection": arm.connection, "options": arm.options, "paper": arm.paper}
        for arm in recipe.arms
    }
    before = held(folder, identity, rows)
    results = {
        "environment": describe_environment(),
        **identity,
        "scale": recipe.scale,
        "entropy": first.entropy,
        "arms": {**before.get("arms", {}), **rows},
        "runs": before.get("runs", []),
        "diverged": before.get("diverged", []),
    }
    return Comparison(recipe, seeds, folder, corpora, results)


def describe_environment() -> dict[str, Any]:
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"CPU, {torch.get_num_threads()} threads"
    )
    return {
        "crosslayer": __version__,
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def held(folder: Path, identity: dict[str, Any], arms: dict[str, Any]) -> dict[str, Any]:
    """The results a folder already holds, if they are this comparison's."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: a file is in the way of the output folder")
    path = folder / RESULTS
    if not path.exists():
        if folder.exists() and any(file.name != RUNS for file in folder.iterdir()):
            raise ValueError(
                f"{folder}: not empty and without {RESULTS}, so not a comparison's; choose another --out"
            )
        return {}
    try:
        found = json.loads(path.read_text("utf8"))
        same = [(found[part], expected) for part, expected in identity.items()]
        same += [(found["arms"][name], row) for name, row in arms.items() if name in found["arms"]]
        for its, mine in same:
            for key, value in json.loads(json.dumps(mine)).items():
                if its[key] != value:
                    raise ValueError(
                        f"{folder}: belongs to another comparison, with {key} {its[key]!r} where this one has "
                        f"{value!r}; choose another --out"
                    )
        return {"runs": found["runs"], "diverged": found["diverged"], "arms": found["arms"]}
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(
            f"{path}: not a comparison's results (damaged?); move it away or choose another --out"
        ) from None


def place(comparison: Comparison, arm: Arm, seed: int) -> Path:
    """A run's own folder, of its checkpoints and metrics."""
    name = re.sub(r"[^\w.()=+-]+", "_", f"{arm.name}-{seed}")
    digest = hashlib.sha256(f"{arm.name} {seed}".encode()).hexdigest()[
        :6
    ]  # for names alike but for odd characters
    return comparison.folder / RUNS / f"{name[:80]}-{digest}"


def run(comparison: Comparison, watch: Watch) -> None:
    """Do the runs that are missing, writing results.json after each; of several ranks, the first writes."""
    comparison.folder.mkdir(parents=True, exist_ok=True)
    for arm, seed in comparison.missing:
        folder, settings = place(comparison, arm, seed), comparison.recipe.settings(arm)
        try:
            row, _, fabric = train(
                settings,
                arm,
                seed,
                comparison.corpora[arm.name],
                lambda p: watch(arm, seed, p),
                folder,
            )
            comparison.results["runs"].append(row)
        except Diverged as end:  # a result too, and no reason to stop the others
            fabric = end.fabric
            comparison.results["diverged"].append(
                {"arm": arm.name, "seed": seed, "step": end.step, "loss": str(end.loss)}
            )
        if fabric.is_global_zero:
            write_text_atomic(comparison.folder / RESULTS, json.dumps(comparison.results, indent=1))
            for checkpoint in folder.glob("step-*"):  # the results are what is wanted
                shutil.rmtree(checkpoint)
        fabric.barrier()


class Row(NamedTuple):
    """One arm of the table. Spreads are standard deviations over seeds, None for a single one."""

    arm: str
    seeds: int
    parameters: int
    extra: float  # share of the body's parameters
    loss: float
    loss_spread: float | None
    metrics: dict[
        str, tuple[float, float | None]
    ]  # bits a byte, accuracy, losses on other validation sets
    difference: float | None  # of the loss from prenorm's, seed by seed; None without one
    difference_spread: float | None
    speed: float  # tokens a second
    relative_speed: float | None  # to prenorm's
    relative_memory: float | None
    paper: dict[str, float]  # what the paper gives


def result_table(comparison: Comparison) -> list[Row]:
    """The arms that have finished a run, in the order they were asked for."""
    by_arm = {
        arm.name: {r["seed"]: r for r in comparison.runs if r["arm"] == arm.name}
        for arm in comparison.arms
    }
    rows = []
    for arm in comparison.arms:
        runs = by_arm[arm.name]
        if not runs:
            continue
        baseline = plain(comparison, arm)
        against = by_arm[baseline.name] if baseline else {}
        shared = sorted(runs.keys() & against.keys())
        first = next(iter(runs.values()))
        loss, loss_spread = spread([r["valid_loss"] for r in runs.values()])
        gap, gap_spread = spread([runs[s]["valid_loss"] - against[s]["valid_loss"] for s in shared])
        rows.append(
            Row(
                arm.name,
                len(runs),
                first["parameters"],
                first["extra_parameters"] / (first["parameters"] - first["extra_parameters"]),
                loss,
                loss_spread,
                {
                    name: spread([r["metrics"][name] for r in runs.values()])
                    for name in first["metrics"]
                },
                gap if shared and arm is not baseline else None,
                gap_spread,
                statistics.mean(r["tokens_per_second"] for r in runs.values()),
                ratio(runs, against, "tokens_per_second", shared),
                ratio(runs, against, "activation_bytes", shared),
                arm.paper,
            )
        )
    return rows


def plain(comparison: Comparison, arm: Arm) -> Arm | None:
    """The PreNorm arm that another is measured against: that of the same body, or the first."""
    candidates = [other for other in comparison.arms if other.connection == "prenorm"]
    body = {
        key: value
        for key, value in arm.options.items()
        if OPTIONS[key] is Model and key != "reallocate"
    }
    same = [
        other
        for other in candidates
        if {key: value for key, value in other.options.items() if OPTIONS[key] is Model} == body
    ]
    return next(iter([*same, *candidates]), None)


def spread(values: list[float]) -> tuple[float, float | None]:
    if not values:
        return float("nan"), None
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def ratio(
    runs: dict[int, dict[str, Any]], plain: dict[int, dict[str, Any]], key: str, seeds: list[int]
) -> float | None:
    return statistics.mean(runs[s][key] / plain[s][key] for s in seeds) if seeds else None
