"""Where a run's metrics go: metrics.jsonl in its folder, and Fabric's loggers."""

import errno
import importlib.util
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from lightning.fabric import Fabric

from ..files import parse_json, short_digest, write_text_atomic
from ..run_folders import METRICS_FILE


def check_loggers(names: Collection[str]) -> None:
    """Raise a ValueError for a logger whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"{name} is not installed; pip install {name}")


def make_loggers(names: Collection[str], folder: Path, run_name: str) -> list[Any]:
    """Fabric's loggers called tensorboard and wandb.

    Raises:
        ValueError: the logger's package is not installed.
    """
    check_loggers(names)
    loggers: list[Any] = []
    for name in names:
        if name == "tensorboard":
            from lightning.fabric.loggers import TensorBoardLogger

            loggers.append(TensorBoardLogger(folder, name="tensorboard", version=""))
        else:
            from lightning.pytorch.loggers import WandbLogger

            folder.mkdir(parents=True, exist_ok=True)
            # a resumed run continues its run at W&B: the id is that of the folder
            run_id = short_digest(str(folder.resolve()), 12)
            loggers.append(
                WandbLogger(name=run_name, save_dir=folder, id=run_id, project="crosslayer")
            )
    return loggers


def close_loggers(fabric: Fabric, status: Literal["success", "failed"]) -> None:
    """End the run that each of Fabric's loggers has begun, so that the next run in this process has
    its own.
    """
    for logger in fabric.loggers:
        logger.finalize(status)
        # W&B has one open run in a process, which its next logger would continue. The property
        # `experiment` would begin a run where nothing was logged.
        finish = getattr(getattr(logger, "_experiment", None), "finish", None)
        if finish is not None:
            finish(exit_code=int(status == "failed"))


def write_metrics(fabric: Fabric, folder: Path | None, step: int, metrics: dict[str, Any]) -> None:
    """Write the metrics of a step to metrics.jsonl, a line each time, and to Fabric's loggers.

    None is written as null, and left out for Fabric's loggers. Numbers that are not finite are
    written as NaN and Infinity, which Python's `json` reads.

    Args:
        fabric: rank 0 writes.
        folder: of metrics.jsonl; None for Fabric's loggers alone.
        step: number of steps taken.
        metrics: by name.
    """
    if folder is not None and fabric.is_global_zero:
        path = folder / METRICS_FILE
        line = json.dumps({"step": step, **metrics}) + "\n"
        # Unbuffered: a line is one call of the system, which no kill can divide.
        with open(path, "ab", buffering=0) as file:
            if file.write(line.encode()) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    known = {name: value for name, value in metrics.items() if value is not None}
    fabric.log_dict(known, step)


def prepare_metrics_file(path: Path, step: int) -> None:
    """Make the folder of metrics.jsonl, and remove the lines after a step from one that is there.

    Raises:
        ValueError: the path is no file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    if not path.is_file():  # a pipe would wait for someone to write to it
        raise ValueError(f"{path}: not a file")
    lines = path.read_text("utf8", errors="replace").splitlines()
    kept = [line + "\n" for line in lines if _step_of_line(line) <= step]
    write_text_atomic(path, "".join(kept))


def _step_of_line(line: str) -> float:
    """Infinite for what is no line of this log: one that was cut short, on a full disk say."""
    try:
        step = parse_json(line, METRICS_FILE, dict).get("step")
    except ValueError:
        return float("inf")
    return step if isinstance(step, int) else float("inf")
