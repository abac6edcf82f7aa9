"""results.json of a comparison: what is in it, and how it is read and checked."""

import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..errors import error_with_class
from ..files import LOCK_FILE, UNFINISHED_SUFFIX, check_no_file, read_json
from ..ops import dispatch
from ..run_folders import COMPARISON_RESULTS_FILE, RUNS_FOLDER
from ..validation import check_option_type
from .identity import PLACES_OF_DATA, first_difference
from .run_state import RunResult, check_fields, check_sizes
from .settings import CHANGEABLE_OPTIONS


@dataclass
class DivergedRun:
    """A run that ended with a loss or a gradient that was not finite, or a loss that rose too far.

    The loss is a text like "nan". `problem` says what was wrong. `method_code` is that of
    `RunResult`.
    """

    arm: str
    seed: int
    step: int
    loss: str
    problem: str = ""
    method_code: str = ""


DIGEST_KEY = "sha256"


@dataclass
class ComparisonResults:
    """The content of results.json.

    Args:
        environment: device and versions, of all runs.
        settings: options that decide what is learned, shared by the arms.
        data: sizes of the first arm's data, and under `DIGEST_KEY` their digest.
        scale: of the recipe.
        entropy: order-0 entropy of the first validation set, in bits per byte.
        arms: connection, options and the paper's results of each arm, and the digest of its data
            where these are other data.
        runs: finished runs.
        diverged: runs without a result.
    """

    environment: dict[str, str]
    settings: dict[str, Any]
    data: dict[str, Any]
    scale: str
    entropy: float | None
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: list[RunResult] = field(default_factory=list)
    diverged: list[DivergedRun] = field(default_factory=list)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "ComparisonResults":
        """The inverse of `dataclasses.asdict`.

        Raises:
            ValueError, KeyError, TypeError: a field is missing, unknown, or has a value of another
                type, or a size or speed is not positive.
        """
        runs = content["runs"]
        diverged = content["diverged"]
        check_fields(cls, {**content, "runs": [], "diverged": []})
        missing = set(_VERSIONS) - content["environment"].keys()
        if missing:
            raise ValueError(f"the environment lacks {', '.join(sorted(missing))}")
        for arm in content["arms"].values():
            for key, kind in (("connection", str), ("options", dict), ("paper", dict)):
                check_option_type(key, arm[key], kind)
        for run in runs:
            check_fields(RunResult, run)
            check_sizes(run)
            if not run["curve"] or any(len(point) != 2 for point in run["curve"]):
                raise ValueError("a curve must have points of a step and a loss")
        for run in diverged:
            check_fields(DivergedRun, run)
        runs = [RunResult(**run) for run in runs]
        diverged = [DivergedRun(**run) for run in diverged]
        return cls(**{**content, "runs": runs, "diverged": diverged})


_VERSIONS = ("device", "torch", "python", "crosslayer")  # of every environment
TORCH_OPERATIONS = "PyTorch operations"  # what results that do not say it were measured with


def describe_environment() -> dict[str, str]:
    """Device, versions, and whether the connections ran as fused kernels."""
    device = f"CPU, {torch.get_num_threads()} threads"
    operations = TORCH_OPERATIONS
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        operations = "fused kernels" if dispatch.kernel_devices else TORCH_OPERATIONS
    return {
        "crosslayer": __version__,
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "operations": operations,
    }


def join_environments(before: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """The environments of earlier and of further runs, like "CPU, 2 threads and NVIDIA H100"."""
    joined = dict(before)
    for name, value in now.items():
        values = [*before.get(name, value).split(" and "), *value.split(" and ")]
        joined[name] = " and ".join(dict.fromkeys(values))
    return joined


def read_comparison_results(file: Path) -> ComparisonResults:
    """The content of a results.json.

    Raises:
        ValueError: there is no such file, or it is damaged.
    """
    content = read_json(file)
    try:
        return ComparisonResults.from_json(content)
    except (ValueError, KeyError, TypeError) as error:
        reason = error_with_class(error)
        raise ValueError(f"{file}: not a comparison's results (damaged?): {reason}") from error


def load_matching_results(folder: Path, current: ComparisonResults) -> ComparisonResults | None:
    """The results of a folder, or None if it has none.

    Raises:
        ValueError: the folder is not a comparison's, or that of a comparison with other settings or
            data.
    """
    path = folder / COMPARISON_RESULTS_FILE
    check_no_file(folder)
    if not path.exists():
        # what a comparison that was killed before its first result leaves
        own_names = {RUNS_FOLDER, LOCK_FILE, f"{COMPARISON_RESULTS_FILE}{UNFINISHED_SUFFIX}"}
        if folder.exists() and any(file.name not in own_names for file in folder.iterdir()):
            raise ValueError(
                f"{folder}: not empty and without {COMPARISON_RESULTS_FILE}, so not a "
                "comparison's; choose another --out"
            )
        return None
    try:
        previous = read_comparison_results(path)
    except ValueError as error:
        raise ValueError(f"{error}; move it away or choose another --out") from None
    differences = [
        first_difference(previous.data, current.data),
        # where the data are the same, they may have been moved
        first_difference(previous.settings, current.settings, PLACES_OF_DATA),
    ]
    # an arm without a run may be another one now
    with_runs = {run.arm for run in previous.runs} | {run.arm for run in previous.diverged}
    for name, arm in current.arms.items():
        if name in previous.arms and name in with_runs:
            before = previous.arms[name]
            of_arm = [
                first_difference(before, arm, {"options", "paper"}),
                # an option that an arm lacks is the recipe's
                first_difference(
                    {**previous.settings, **before["options"]},
                    {**current.settings, **arm["options"]},
                    PLACES_OF_DATA | CHANGEABLE_OPTIONS,
                ),
            ]
            differences += [f"the arm {name} {difference}" for difference in of_arm if difference]
    for difference in differences:
        if difference:
            raise ValueError(
                f"{folder}: belongs to another comparison, {difference}; choose another --out"
            )
    return previous
