"""Checkpoints of a run: sharded, written aside and renamed when they are whole, so that any moment is safe to die.

FOLDER/step-00000100/checkpoint.json    the run's identity, its facts, and size and sha256 of every other file
                     __0_0.distcp …     a file a rank (torch.distributed.checkpoint), which any number of ranks reads
"""

import hashlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ..files import atomic_replace, write_text_atomic

INDEX = "checkpoint.json"


class Checkpoints:
    """The checkpoints in a folder.

    Args:
        folder: of this run alone.
        identity: what another run's checkpoint would differ in.
        keep: how many are kept.
    """

    def __init__(self, fabric: Fabric, folder: Path, identity: dict[str, Any], keep: int):
        self.fabric, self.folder, self.keep = fabric, folder, keep
        self.identity = json.loads(json.dumps(identity))  # as it is read again

    def found(self) -> list[Path]:
        """Those that are whole, the oldest first."""
        return sorted(
            path.parent
            for path in self.folder.glob(f"step-*/{INDEX}")
            if path.parent.suffix != ".part"
        )

    def newest(self) -> Path | None:
        return self.found()[-1] if self.found() else None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        facts: dict[str, Any],
    ) -> None:
        """Keep the run as it is after `step` steps.

        Raises:
            OSError: it cannot be written. The last one is as it was.
        """
        path = self.folder / f"step-{step:08}"
        aside = path.with_suffix(".part")
        self.together(lambda: self.make_way(aside))
        try:
            with quiet():
                dcp.save(
                    state_of(model, optimizers),
                    checkpoint_id=aside,
                    no_dist=self.fabric.world_size == 1,
                )
            error = ""
        except (OSError, RuntimeError, dcp.api.CheckpointException) as failure:
            error = reason(failure)

        def finish() -> None:
            if error:
                raise OSError(error)
            index = {"identity": self.identity, "facts": facts, "files": inventory(aside)}
            write_text_atomic(aside / INDEX, json.dumps(index, indent=1))
            shutil.rmtree(path, ignore_errors=True)
            atomic_replace(aside, path)
            for old in self.found()[: -self.keep]:
                shutil.rmtree(old)

        try:
            self.together(finish)
        except OSError as failure:
            if self.fabric.is_global_zero:
                shutil.rmtree(aside, ignore_errors=True)
            last = (
                f"; the last good checkpoint is {self.newest()}"
                if self.found()
                else "; there is no other"
            )
            raise OSError(f"{path} cannot be written ({reason(failure)}){last}") from None

    def load(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> dict[str, Any] | None:
        """Go back to the newest; its facts, or None where there is none.

        Raises:
            ValueError: it is damaged, or another run's. Nothing is changed.
        """
        path = self.newest()
        if path is None:
            return None
        index = self.checked(path)
        state = state_of(model, optimizers)
        with quiet():
            dcp.load(state, checkpoint_id=path, no_dist=self.fabric.world_size == 1)
        set_state_dict(
            model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        return index["facts"]

    def checked(self, path: Path) -> dict[str, Any]:
        """What a checkpoint says of itself, once it has been seen to be true."""
        others = [str(other) for other in self.found() if other != path]
        go_back = (
            f"; remove it to go on from {others[-1]}" if others else "; remove it to begin anew"
        )
        try:
            index = json.loads((path / INDEX).read_text("utf8"))
            identity, files, _ = index["identity"], index["files"], index["facts"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: {INDEX} is damaged ({reason(error)}){go_back}") from None
        for key in sorted(self.identity.keys() | identity.keys()):
            mine, its = self.identity.get(key), identity.get(key)
            if mine != its:
                raise ValueError(
                    f"{path}: of another run, with {key} {its!r} where this one has {mine!r}"
                )

        def verify() -> None:
            for name, (size, digest) in files.items():
                if not (path / name).is_file():
                    raise ValueError(f"{path}: {name} is missing{go_back}")
                if (path / name).stat().st_size != size:
                    has = (path / name).stat().st_size
                    raise ValueError(f"{path}: {name} has {has} bytes, expected {size}{go_back}")
                if sha256(path / name) != digest:
                    raise ValueError(f"{path}: {name} is damaged, its checksum is another{go_back}")

        self.together(verify)
        return index

    def make_way(self, aside: Path) -> None:
        for left in self.folder.glob("step-*.part"):
            shutil.rmtree(left)
        aside.mkdir(parents=True)

    def together(self, act: Any) -> None:
        """Rank 0 acts; all go on, or all raise what it raised."""
        failure: Exception | None = None
        if self.fabric.is_global_zero:
            try:
                act()
            except (OSError, ValueError) as error:
                failure = error
        failure = self.fabric.broadcast(failure)
        if failure is not None:
            raise failure


def state_of(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """By parameter name, so that it does not matter which rank holds what."""
    of_model, of_optimizers = get_state_dict(model, optimizers)
    return {"model": of_model, "optimizer": of_optimizers}


def inventory(folder: Path) -> dict[str, tuple[int, str]]:
    return {path.name: (path.stat().st_size, sha256(path)) for path in sorted(folder.iterdir())}


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reason(error: BaseException) -> str:
    """The cause in one line: torch's checkpoints wrap what each rank met."""
    failures = getattr(error, "failures", None)
    inner = next(iter(failures.values()))[0] if failures else error
    text = inner.strerror if isinstance(inner, OSError) and inner.strerror else str(inner)
    return " ".join(text.split()) or type(inner).__name__


class quiet(warnings.catch_warnings):
    """torch's checkpoints warn of their own internals."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
