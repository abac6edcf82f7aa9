"""How `crosslayer train` and `crosslayer compare` lay out what they write.

RUN/run.json                        the settings, data and seed that decide the run's losses
RUN/metrics.jsonl                   a line each `log_every` steps and each evaluation
RUN/result.json, RUN/model/         of `train`, once the run has ended
RUN/step-00000100/                  a checkpoint
RUN/models/step-000100/             a model that was kept
COMPARISON/results.json             all results so far
COMPARISON/runs/ARM-SEED-DIGEST/    a run of `compare`, without result.json and model/
FOLDER/evaluation.json              what `eval --out FOLDER` measured; FOLDER may lie in a run's
"""

import json
import re
from pathlib import Path

from .files import short_digest

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
RUN_RESULT_FILE = "result.json"
TRAINED_MODEL_FOLDER = "model"
CONFIG_FILE = "config.json"  # of a model
CHECKPOINT_INDEX = "checkpoint.json"  # of a complete checkpoint
COMPARISON_RESULTS_FILE = "results.json"
DATA_DIGEST = "data sha256"  # a key of run.json, and of an arm in results.json
RUNS_FOLDER = "runs"
EVALUATION_FILE = "evaluation.json"
KEPT_MODELS_FOLDER = "models"


def default_folder(command: str, settings: object) -> Path:
    """The folder of a command without --out, so that the same command resumes.

    Args:
        command: like "train".
        settings: what decides the results, as `json.dumps` takes it.
    """
    return Path(f"{command}-{short_digest(json.dumps(settings, sort_keys=True), 8)}")


def is_model_folder(folder: Path) -> bool:
    """Whether a folder is a model's."""
    return (folder / CONFIG_FILE).is_file()


def is_run_folder(folder: Path) -> bool:
    """Whether a folder is that of one run."""
    has_log = (folder / METRICS_FILE).is_file() or (folder / RUN_RESULT_FILE).is_file()
    return has_log and not is_model_folder(folder)


def is_comparison_folder(folder: Path) -> bool:
    """Whether a folder is that of a comparison."""
    has_runs = (folder / COMPARISON_RESULTS_FILE).is_file() or (folder / RUNS_FOLDER).is_dir()
    return has_runs and not is_model_folder(folder)


def last_saved_model(run: Path) -> Path | None:
    """The folder of the model that a run ended with, or else of the last one that it kept."""
    trained = run / TRAINED_MODEL_FOLDER
    if trained.is_dir():
        return trained
    kept = {step_of_name(folder.name): folder for folder in (run / KEPT_MODELS_FOLDER).glob("*")}
    steps = [step for step, folder in kept.items() if step is not None and is_model_folder(folder)]
    return kept[max(steps)] if steps else None


def checkpoint_name(step: int) -> str:
    """The name of the checkpoint after a step."""
    return f"step-{step:08}"


def kept_model_name(step: int) -> str:
    """The name of the model that was kept after a step."""
    return f"step-{step:06}"


def step_of_name(name: str) -> int | None:
    """The step in the name of a checkpoint or of a kept model; None in any other name."""
    match = re.fullmatch(r"step-(\d+)", name)
    return int(match[1]) if match else None


def run_folder_name(arm: str, seed: int) -> str:
    """The name of the folder of one run in a comparison's `runs`."""
    readable = re.sub(r"[^\w.()=+-]+", "_", f"{arm}-{seed}")
    readable = readable.encode()[:80].decode(errors="ignore")  # file systems count bytes
    # names may differ in replaced characters alone
    digest = short_digest(f"{arm} {seed}", 6)
    return f"{readable}-{digest}"
