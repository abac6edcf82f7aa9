"""Checkpoints of a run: sharded, and atomic, so that a run may be killed at any moment.

A checkpoint is written to a temporary folder, step-….part, which is renamed when it is complete:

FOLDER/step-00000100/checkpoint.json    the run's identity and state; size and CRC-32 of other files
                     __0_0.distcp …     a file a rank (torch.distributed.checkpoint)

Any number of ranks can load it.
"""

import errno
import logging
import os
import shutil
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ..errors import is_out_of_memory
from ..files import REPLACED_SUFFIX, UNFINISHED_SUFFIX, read_json, replace_folder, write_json
from ..run_folders import CHECKPOINT_INDEX, DATA_DIGEST, RUN_FILE, checkpoint_name, step_of_name
from .checkpoint_reader import CheckpointPlanner, CheckpointReader
from .identity import PLACES_OF_DATA, first_difference
from .parallel import gather_from_ranks, run_on_rank_zero
from .run_state import RunState

_OTHER_FOLDER = "choose another folder (--out)"


@dataclass
class Checkpoints:
    """The checkpoints of one run.

    Args:
        fabric: every rank saves and loads its shard.
        folder: of this run alone.
        identity: a folder or a checkpoint with another identity belongs to another run.
        keep: number of checkpoints kept.
    """

    fabric: Fabric
    folder: Path
    identity: dict[str, Any]
    keep: int

    def claim_folder(self) -> None:
        """Write the run's identity to the folder, or compare it with the one there.

        Call it after `load`: if the checkpoint is damaged, nothing is written to the folder.

        Raises:
            ValueError: the folder contains another run, whose files would be overwritten.
        """
        path = self.folder / RUN_FILE

        def check_and_write() -> None:
            if not path.exists():
                write_json(path, self.identity)
                return
            try:
                claimed = read_json(path)
            except ValueError as error:
                remedy = f"remove it if the folder is this run's, or {_OTHER_FOLDER}"
                raise ValueError(f"{error}; {remedy}") from None
            self._check_identity(self.folder, claimed)

        run_on_rank_zero(self.fabric, check_and_write)

    def complete(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        return [
            path
            for path in list_checkpoints(self.folder)
            if path.suffix != UNFINISHED_SUFFIX and (path / CHECKPOINT_INDEX).exists()
        ]

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        checkpoints = self.complete()
        return checkpoints[-1] if checkpoints else None

    def save(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], state: RunState
    ) -> None:
        """Save the run after its last step, and delete all but the newest `keep` checkpoints.

        Raises:
            OSError: it cannot be written, on every rank. The checkpoints before it are unchanged.
        """
        path = self.folder / checkpoint_name(state.step)
        temporary = path.with_suffix(UNFINISHED_SUFFIX)
        try:
            self._write(temporary, model, optimizers, state)
            run_on_rank_zero(self.fabric, lambda: self._complete(temporary, path))
        except (OSError, RuntimeError, dcp.api.CheckpointException) as failure:
            if self.fabric.is_global_zero:
                shutil.rmtree(temporary, ignore_errors=True)
            _raise_other_cause(failure)
            newest = self.newest()
            remaining = f"the last checkpoint is {newest}" if newest else "there is no other"
            raise OSError(
                f"{path} cannot be written ({_describe_cause(failure)}); {remaining}"
            ) from None

    def _write(
        self,
        temporary: Path,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        state: RunState,
    ) -> None:
        """Write all files of a checkpoint. An error of one rank is raised on every rank."""

        def make_folder() -> None:
            self._remove_leftovers()
            temporary.mkdir(parents=True)

        def write_index() -> None:
            index = {"identity": self.identity, "state": vars(state), "files": fingerprints}
            write_json(temporary / CHECKPOINT_INDEX, index)

        run_on_rank_zero(self.fabric, make_folder)
        with _quiet_dcp():
            dcp.save(
                _state_dict(model, optimizers),
                checkpoint_id=temporary,
                no_dist=self.fabric.world_size == 1,
            )
        fingerprints = self._fingerprints(temporary)
        run_on_rank_zero(self.fabric, write_index)

    def _complete(self, temporary: Path, path: Path) -> None:
        """Give a checkpoint its name, and delete the oldest ones."""
        # One that is there is incomplete, or was saved before this step's evaluation had ended.
        replace_folder(temporary, path)
        for old in self.complete()[: -self.keep]:
            remove_checkpoint(old)

    def load(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> RunState | None:
        """Restore the newest checkpoint; the `state` it was saved with, or None without one.

        Raises:
            ValueError: it is damaged, or another run's.
        """
        run_on_rank_zero(self.fabric, self._remove_leftovers)
        path = self.newest()
        if path is None:
            return None
        state = self._read_index(path)
        state_dict = _state_dict(model, optimizers)
        try:
            reader = CheckpointReader(path)
            _check_parameters(state_dict["model"], reader)
            unsaved = _pop_unsaved_states(state_dict["optimizer"], reader)
            with _quiet_dcp():
                dcp.load(
                    state_dict,
                    storage_reader=reader,
                    planner=CheckpointPlanner(),
                    no_dist=self.fabric.world_size == 1,
                )
        except (Exception, dcp.api.CheckpointException) as error:  # pickle raises any class
            _raise_other_cause(error)
            raise ValueError(
                f"{path}: cannot be read ({_describe_cause(error)}){self._remedy(path)}"
            ) from None
        state_dict["optimizer"]["state"] |= unsaved  # torch wants one for every parameter
        set_state_dict(
            model,
            optimizers,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        parameters = dict(model.named_parameters())
        for optimizer in optimizers:
            for name in unsaved:
                optimizer.state.pop(parameters[name], None)
        if len(state.skipped) == state.step:
            _clear_states(optimizers)  # no step was accepted yet
        return state

    def _read_index(self, path: Path) -> RunState:
        """The state in a checkpoint of this run, whose files are as they were written."""
        remedy = self._remedy(path)
        try:
            index = read_json(path / CHECKPOINT_INDEX)
            identity = {**index["identity"]}  # a TypeError where it is no mapping
            state = RunState.from_json(index["state"])
            files = {
                name: (int(size), int(checksum))
                for name, (size, checksum) in index["files"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}: {CHECKPOINT_INDEX} is damaged ({_describe_cause(error)}){remedy}"
            ) from None
        self._check_identity(path, identity)

        found = self._fingerprints(path)
        for name, (size, checksum) in files.items():
            if name not in found:
                raise ValueError(f"{path}: {name} is missing{remedy}")
            if found[name][0] != size:
                raise ValueError(
                    f"{path}: {name} has {found[name][0]} bytes, expected {size}{remedy}"
                )
            if found[name][1] != checksum:
                raise ValueError(f"{path}: {name} is damaged, its checksum differs{remedy}")
        return state

    def _check_identity(self, path: Path, identity: dict[str, Any]) -> None:
        is_same_data = identity.get(DATA_DIGEST) == self.identity.get(DATA_DIGEST)
        places = PLACES_OF_DATA if is_same_data else ()  # the same data may have been moved
        difference = first_difference(identity, self.identity, places)
        if difference:
            raise ValueError(f"{path}: belongs to another run, {difference}; {_OTHER_FOLDER}")

    def _fingerprints(self, folder: Path) -> dict[str, tuple[int, int]]:
        """Size and CRC-32 of the files that torch wrote. The ranks share the reading.

        An error of one rank is raised on every rank.
        """
        fingerprints: dict[str, tuple[int, int]] = {}
        failure: OSError | None = None
        try:
            files = sorted(file for file in folder.iterdir() if file.name != CHECKPOINT_INDEX)
            for file in files[self.fabric.global_rank :: self.fabric.world_size]:
                fingerprints[file.name] = (file.stat().st_size, _crc32(file))
        except OSError as error:
            failure = error
        joined: dict[str, tuple[int, int]] = {}
        for part, error_of_rank in gather_from_ranks(self.fabric, (fingerprints, failure)):
            if error_of_rank is not None:
                raise error_of_rank
            joined |= part
        return joined

    def _remove_leftovers(self) -> None:
        """Remove what a killed process left: checkpoints half written or half deleted.

        One that was to be replaced gets its name back where it was not.
        """
        for replaced in self.folder.glob(f"step-*{REPLACED_SUFFIX}"):
            path = replaced.with_suffix("")
            step = step_of_name(path.name)
            if step is None or path.name != checkpoint_name(step):
                continue  # someone else's
            if path.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(path)
        complete = self.complete()
        for path in list_checkpoints(self.folder):
            is_old = bool(complete) and path < complete[-1]
            if path.suffix == UNFINISHED_SUFFIX or (is_old and path not in complete):
                remove_checkpoint(path)

    def _remedy(self, path: Path) -> str:
        others = [str(other) for other in self.complete() if other != path]
        if others:
            return f"; remove it to resume from {others[-1]}"
        return "; remove it to start again"


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run's folder, oldest first, with those half written or half deleted."""
    steps: dict[Path, int] = {}
    for path in folder.glob("step-*"):
        step = step_of_name(path.name.removesuffix(UNFINISHED_SUFFIX))
        # a folder of another name, like a copy that someone made, is not ours
        if step is not None and path.name.startswith(checkpoint_name(step)):
            steps[path] = step
    return sorted(steps, key=lambda path: (steps[path], path.name))


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint. What is left where this is killed has the name of an unfinished one."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    unfinished = path.with_suffix(UNFINISHED_SUFFIX)
    if unfinished != path:
        path.rename(unfinished)
    shutil.rmtree(unfinished)


def _state_dict(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """By parameter name, so that any number of ranks can load it."""
    without_step = [optimizer for optimizer in optimizers if not optimizer.state]
    model_state, optimizer_state = get_state_dict(model, optimizers)
    # torch fills an empty state by a step with gradients of zero, which AdamW would count
    _clear_states(without_step)
    return {"model": model_state, "optimizer": optimizer_state}


def _check_parameters(model_state: dict[str, Any], reader: CheckpointReader) -> None:
    """Raise a ValueError where the model lacks something that was saved.

    torch would leave it out: the run would go on with another method, whose weights fit by name.
    """
    for key in reader.read_metadata().state_dict_metadata:
        part, _, name = key.partition(".")
        if part == "model" and name not in model_state:
            raise ValueError(f"it has {name}, which the model lacks; was its code changed?")


def _pop_unsaved_states(
    optimizer_state: dict[str, Any], reader: CheckpointReader
) -> dict[str, Any]:
    """Take out of a state dict the states that a checkpoint lacks; they are returned by name.

    A parameter without a gradient, like those of an indexer whose output selects and is not
    differentiated, has no state when the run is saved. torch makes one of zeros for every
    parameter when it is loaded.
    """
    saved = reader.read_metadata().state_dict_metadata
    states = optimizer_state["state"]
    unsaved = [
        name
        for name in states
        if not any(f"optimizer.state.{name}.{key}" in saved for key in states[name])
    ]
    return {name: states.pop(name) for name in unsaved}


def _clear_states(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.state.clear()


def _crc32(file: Path) -> int:
    checksum = 0
    with open(file, "rb") as stream:
        while block := stream.read(2**24):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _cause_of(error: BaseException) -> BaseException:
    """What torch's CheckpointException wraps: the error of the first rank that has one."""
    failures = getattr(error, "failures", None)
    cause: BaseException = next(iter(failures.values()))[0] if failures else error
    return cause


def _raise_other_cause(error: BaseException) -> None:
    """Raise what torch has wrapped, where no file was the cause: the memory was full, or Ctrl-C."""
    cause = _cause_of(error)
    if not isinstance(cause, Exception) or is_out_of_memory(cause):
        raise cause from None


def _describe_cause(error: BaseException) -> str:
    cause = _cause_of(error)
    text = str(cause)
    if isinstance(cause, OSError) and cause.strerror:
        text = cause.strerror
    if "unexpected pos" in text:  # torch's words for a file that ends before its content
        text = os.strerror(errno.ENOSPC)
    return " ".join(text.split()) or type(cause).__name__


@contextmanager
def _quiet_dcp() -> Iterator[None]:
    """Silence torch's warnings about its internals, and its log of errors that it raises too."""
    previous_level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous_level)
