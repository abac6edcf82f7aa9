"""What a run tells while it goes: a line of metrics.jsonl every so often, and Fabric's loggers."""

import hashlib
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric

from ..files import write_text_atomic

FILE = "metrics.jsonl"


def loggers(names: Iterable[str], folder: Path, name: str) -> list[Any]:
    """Fabric's loggers of these names.

    Raises:
        ModuleNotFoundError: what a logger needs is not installed.
    """
    for logger in names:
        if importlib.util.find_spec(logger) is None:
            raise ModuleNotFoundError(f"{logger} is not installed", name=logger)
    return [LOGGERS[logger](folder, name) for logger in names]


def tensorboard(folder: Path, name: str) -> Any:
    from lightning.fabric.loggers import TensorBoardLogger

    return TensorBoardLogger(folder, name="tensorboard", version="")


def wandb(folder: Path, name: str) -> Any:
    from lightning.pytorch.loggers import WandbLogger

    folder.mkdir(parents=True, exist_ok=True)
    # the same folder is the same run, however often it goes on
    run = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    return WandbLogger(name=name, save_dir=folder, id=run, project="crosslayer")


LOGGERS = {"tensorboard": tensorboard, "wandb": wandb}


class Journal:
    """The metrics of a run.

    Args:
        folder: of metrics.jsonl; None for nowhere but the loggers.
        step: how far the run is: later lines, of a part that was lost, are taken out.
    """

    def __init__(self, fabric: Fabric, folder: Path | None, step: int):
        self.fabric = fabric
        self.path = folder / FILE if folder is not None and fabric.is_global_zero else None
        if self.path is not None and self.path.exists():
            write_text_atomic(
                self.path,
                "".join(
                    line
                    for line in self.path.read_text("utf8").splitlines(True)
                    if kept(line, step)
                ),
            )

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        if self.path is not None:
            with open(self.path, "a", encoding="utf8") as file:
                file.write(json.dumps({"step": step, **metrics}) + "\n")
        self.fabric.log_dict(
            {name: value for name, value in metrics.items() if value is not None}, step
        )


def kept(line: str, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except ValueError:  # cut short
        return False
