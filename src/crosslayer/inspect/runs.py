"""Runs of `crosslayer train` and `crosslayer compare`, read from their folders without a model."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy

from ..files import read_json
from ..run_folders import (
    COMPARISON_RESULTS_FILE,
    DATA_DIGEST,
    EVALUATION_FILE,
    METRICS_FILE,
    RUN_FILE,
    RUN_RESULT_FILE,
    RUNS_FOLDER,
    is_comparison_folder,
    is_run_folder,
    last_saved_model,
    run_folder_name,
)
from ..train.comparison_results import DIGEST_KEY, read_comparison_results
from ..train.run_state import check_sizes
from .training import CurvePoints, TrainingCurve, is_number, read_training_curve

# Of the settings that are read here.
_SETTING_KINDS: dict[str, type] = {
    "steps": int,
    "batch": int,
    "context": int,
    "layers": int,
    "model_config": dict,
    "valid": dict,
}


@dataclass
class TrainingRun:
    """One run: what it logged, and what is known of it.

    Attributes:
        name: of its arm, or of its folder where it has no result.
        folder: of the run.
        curve: what it logged; its validation losses alone where metrics.jsonl is missing.
        connection: the spec; "" where it is not known.
        seed: None where it is not known.
        settings: options of the run, by name; empty where they are not known.
        result: the numbers of its `RunResult` by name; empty for a run that has not finished or has
            diverged.
        status: "" for a finished run, else "not finished" or "diverged".
        tasks: (step, accuracy) of each task, by its name.
        data_digest: identifies tokenizer, training and validation data; "" where it is not known.
    """

    name: str
    folder: Path
    curve: TrainingCurve
    connection: str = ""
    seed: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    status: str = ""
    tasks: dict[str, CurvePoints] = field(default_factory=dict)
    data_digest: str = ""

    def number(self, name: str) -> float:
        """A number of the result, or of its metrics; NaN where the run has none."""
        value = self.result.get(name, self.result.get("metrics", {}).get(name))
        return float(value) if is_number(value) else math.nan

    @property
    def units_per_step(self) -> tuple[float, str]:
        """What a step trains on, and its unit: tokens, images, or steps where it is not known."""
        batch = self.settings.get("batch")
        context = self.settings.get("context")
        if not isinstance(batch, int) or not isinstance(context, int):
            return 1, "steps"
        if "patch_size" in self.settings.get("model_config", {}):
            return batch, "images"
        return batch * context, "tokens"

    def seconds_at(self, steps: Sequence[int]) -> list[float]:
        """Seconds of training at each step.

        They are logged. An older run's are its share of the total, and NaN without a result.
        """
        logged = zip(self.curve.steps, self.curve.seconds, strict=True)
        known = [(step, seconds) for step, seconds in logged if seconds > 0]
        if known:
            last, total = known[-1]
        else:
            last = self.settings.get("steps", math.nan)
            total = self.number("seconds")
        x, y = zip((0, 0.0), *known, (last, total), strict=True)
        # an evaluation may come after the last line
        return [
            float(numpy.interp(step, x, y)) if step <= last else total * step / last
            for step in steps
        ]


def read_runs(folder: Path) -> list[TrainingRun]:
    """The run of a folder, or all runs of a comparison's folder.

    Raises:
        ValueError: the folder is neither, or a file in it is damaged.
    """
    if is_run_folder(folder):
        return [_read_single_run(folder)]
    if not is_comparison_folder(folder):
        raise ValueError(
            f"{folder}: neither a run's folder, with {METRICS_FILE}, nor a comparison's, with "
            f"{COMPARISON_RESULTS_FILE}"
        )
    return _read_comparison(folder)


def find_compared_models(comparison: Path) -> dict[str, Path | None]:
    """The last saved model of each run of a comparison's folder; None where a run has none.

    By the name of the arm, with the seed where the arm has several runs, and with the status of a
    run that has not finished: its model is of another step.
    """
    runs = read_runs(comparison)
    counts = Counter(run.name for run in runs)
    models = {}
    for run in runs:
        name = run.name if counts[run.name] == 1 else f"{run.name}, seed {run.seed}"
        models[f"{name} ({run.status})" if run.status else name] = last_saved_model(run.folder)
    return models


def _read_single_run(folder: Path) -> TrainingRun:
    """A run of `train`, or one of `compare` whose comparison has no results yet."""
    path = folder / RUN_RESULT_FILE
    identity: dict[str, Any] = {}
    if (folder / RUN_FILE).is_file():
        identity = read_json(folder / RUN_FILE)
    digest = str(identity.get(DATA_DIGEST, ""))
    if path.is_file():
        result = read_json(path)
        return _make_run(folder, result, result.get("settings"), digest, "", path)
    row: dict[str, Any] = {key: identity[key] for key in ("connection", "seed") if key in identity}
    return _make_run(folder, row, identity, digest, "not finished", path)


def _read_comparison(folder: Path) -> list[TrainingRun]:
    """Every run that has a folder or a result, in the order of the arms."""
    path = folder / COMPARISON_RESULTS_FILE
    if not path.is_file():  # none has finished yet
        folders = sorted((folder / RUNS_FOLDER).iterdir())
        return [_read_single_run(run) for run in folders if (run / METRICS_FILE).is_file()]
    results = read_comparison_results(path)
    finished = {(run.arm, run.seed): asdict(run) for run in results.runs}
    diverged = {(run.arm, run.seed): asdict(run) for run in results.diverged}
    runs = []
    for name, arm in results.arms.items():
        settings = results.settings | arm["options"]
        digest = str(arm.get(DATA_DIGEST, results.data.get(DIGEST_KEY, "")))
        for seed in itertools.count():
            run = folder / RUNS_FOLDER / run_folder_name(name, seed)
            row = finished.get((name, seed)) or diverged.get((name, seed))
            if row is None and not (run / METRICS_FILE).is_file():
                break
            status = "" if (name, seed) in finished else "not finished"
            if (name, seed) in diverged:
                status = "diverged"
            row = {"arm": name, "connection": arm["connection"], "seed": seed, **(row or {})}
            runs.append(_make_run(run, row, settings, digest, status, path))
    return runs


def _make_run(
    folder: Path, row: dict[str, Any], settings: Any, digest: str, status: str, source: Path
) -> TrainingRun:
    """A run of a `RunResult`'s fields, as far as there are any. `source` is where they are from."""
    _check_row(row, settings, source)
    if (folder / METRICS_FILE).is_file():
        curve = read_training_curve(folder)
    else:
        curve = TrainingCurve()
        try:
            points = [(int(step), float(loss)) for step, loss in row.get("curve", [])]
        except (TypeError, ValueError):
            raise ValueError(f"{source}: {folder.name} has a damaged curve") from None
        valid = row.get("valid")
        if valid and points:
            curve.valid[next(iter(valid))] = points
    planned = settings.get("steps")
    last_step = planned if isinstance(planned, int) else curve.last_step
    return TrainingRun(
        name=str(row.get("arm", folder.name)),
        folder=folder,
        curve=curve,
        connection=str(row.get("connection", "")),
        seed=row.get("seed"),
        settings=settings,
        result={} if status else row,
        status=status,
        tasks=_read_task_accuracies(folder, last_step),
        data_digest=digest,
    )


def _check_row(row: dict[str, Any], settings: Any, source: Path) -> None:
    """Raise a ValueError where what is read of a run has other types than crosslayer writes."""
    parts = (settings, row.get("valid", {}), row.get("metrics", {}))
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError(f"{source}: not the results of a run (damaged?)")
    if not isinstance(row.get("seed"), int | None):
        raise ValueError(f"{source}: the seed is {row['seed']!r} (damaged?)")
    try:
        check_sizes(row)
    except ValueError as error:
        raise ValueError(f"{source}: {error} (damaged?)") from None
    for name, kind in _SETTING_KINDS.items():
        if not isinstance(settings.get(name, kind()), kind):
            raise ValueError(f"{source}: {name} is {settings[name]!r} (damaged?)")


def _read_task_accuracies(folder: Path, last_step: int) -> dict[str, CurvePoints]:
    """Accuracies of tasks, from what `crosslayer eval --out` wrote to folders within a run's.

    Its step is the number after "step" in the name of the evaluated model, or else the last one in
    the path of the results: `RUN/eval/step-1000/evaluation.json`.

    Args:
        folder: of the run.
        last_step: of an evaluation that names no step: the run's last one.

    Returns:
        (step, accuracy) of each task, by step.

    Raises:
        ValueError: a file is damaged.
    """
    tasks: dict[str, dict[int, float]] = {}
    places = (EVALUATION_FILE, f"*/{EVALUATION_FILE}", f"*/*/{EVALUATION_FILE}")
    for path in [path for place in places for path in sorted(folder.glob(place))]:
        content = read_json(path)
        of_tasks = content.get("tasks", {})
        if not isinstance(of_tasks, dict) or not isinstance(of_tasks.get("results", {}), dict):
            raise ValueError(f"{path}: not the results of crosslayer eval (damaged?)")
        named = (Path(str(content.get("model", ""))).name, str(path.relative_to(folder)))
        found = [re.findall(r"step\D?(\d+)", name) for name in named]
        step = next((int(numbers[-1]) for numbers in found if numbers), last_step)
        for task, metrics in of_tasks.get("results", {}).items():
            accuracy = _accuracy_of(metrics)
            if accuracy is not None:
                tasks.setdefault(task, {})[step] = accuracy
    return {task: sorted(values.items()) for task, values in tasks.items()}


def _accuracy_of(metrics: Any) -> float | None:
    """A task's accuracy in the harness's results: `acc`, else `acc_norm`, else `exact_match`."""
    if isinstance(metrics, dict):
        for wanted in ("acc", "acc_norm", "exact_match"):
            for name, value in metrics.items():
                if name.partition(",")[0] == wanted and is_number(value):
                    return value
    return None
