"""What a run does between steps: save, log, show its progress, change its connection."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..data.sampler import evenly_spaced_steps
from ..hf import connect, disconnect
from ..run_folders import METRICS_FILE, kept_model_name
from ..spec import make
from .checkpoint import Checkpoints
from .diagnostics import connection_diagnostics
from .export import export_trained
from .method_code import code_digest
from .metrics_log import prepare_metrics_file, write_metrics
from .parallel import run_on_rank_zero
from .run_state import StepResult
from .trainer import Callback, Trainer


class SaveCheckpoints(Callback):
    """Saves the run every so many steps, when it is stopped, and when it ends.

    Args:
        folder: of this run alone.
        every: steps between checkpoints; 0 for none but the last.
        keep: number of checkpoints kept.
    """

    def __init__(self, folder: Path, every: int = 0, keep: int = 2):
        self.folder = folder
        self.every = every
        self.keep = keep

    def resume(self, trainer: Trainer) -> None:
        """Restore the newest checkpoint of the folder, if it has one. Call it before `Trainer.fit`.

        Raises:
            ValueError: the checkpoint is damaged, or the folder is another run's.
        """
        checkpoints = self._checkpoints(trainer)
        state = checkpoints.load(trainer.model, trainer.optimizers)
        checkpoints.claim_folder()
        if state is not None:
            trainer.state = state
            trainer.latest_checkpoint = checkpoints.newest()

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        is_due = self.every > 0 and result.step % self.every == 0
        is_last = result.step == trainer.settings.optimization.steps
        if is_due or is_last or trainer.stop_requested:
            self._save(trainer)

    def on_interruption(self, trainer: Trainer) -> None:
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        checkpoints = self._checkpoints(trainer)
        checkpoints.save(trainer.model, trainer.optimizers, trainer.state)
        trainer.latest_checkpoint = checkpoints.newest()

    def _checkpoints(self, trainer: Trainer) -> Checkpoints:
        return Checkpoints(trainer.fabric, self.folder, trainer.identity(), self.keep)


class KeepModels(Callback):
    """Saves the model after evenly spaced steps, the last one included, as step-000400 and so on.

    It comes before `SaveCheckpoints` in the list of callbacks: a run that is killed between the two
    repeats the step, and saves the same model again.

    Args:
        folder: of the models.
        count: number of models.
    """

    def __init__(self, folder: Path, count: int):
        self.folder = folder
        self.count = count

    def on_fit_start(self, trainer: Trainer) -> None:
        self.steps = evenly_spaced_steps(trainer.settings.optimization.steps, self.count)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step not in self.steps:
            return
        export_trained(trainer, self.folder / kept_model_name(result.step))


class _LoggingCallback(Callback):
    """Writes to metrics.jsonl and to Fabric's loggers.

    Args:
        folder: of metrics.jsonl; None for only Fabric's loggers.
        every: steps between lines.
    """

    def __init__(self, folder: Path | None, every: int = 10):
        self.folder = folder
        self.every = every

    def on_fit_start(self, trainer: Trainer) -> None:
        if self.folder is not None:
            # The lines of steps that are reported again are removed.
            path = self.folder / METRICS_FILE
            last_step = trainer.state.reported_step
            run_on_rank_zero(trainer.fabric, partial(prepare_metrics_file, path, last_step))


class LogMetrics(_LoggingCallback):
    """Writes the results of steps and of evaluations, each on a separate line."""

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step % self.every == 0:
            metrics = {
                key: v for key, v in vars(result).items() if key not in ("step", "evaluation")
            }
            write_metrics(trainer.fabric, self.folder, result.step, metrics)
        if result.evaluation is not None:
            metrics = {}
            for name, values in result.evaluation.items():
                metrics |= {f"{name} {key}": value for key, value in values.items()}
            write_metrics(trainer.fabric, self.folder, result.step, metrics)


class LogDiagnostics(_LoggingCallback):
    """Writes `connection_diagnostics` of a training batch."""

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step % self.every == 0:
            run = partial(trainer.task.loss, trainer.module, trainer.last_batch)
            write_metrics(
                trainer.fabric, self.folder, result.step, connection_diagnostics(trainer.model, run)
            )


class OnStep(Callback):
    """Calls a function with every `StepResult`: a progress bar, for example."""

    def __init__(self, function: Callable[[StepResult], Any]):
        self.function = function

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        self.function(result)


class ConnectAtStep(Callback):
    """Replaces the model's connection after a step. Optimizer states of the backbone are kept.

    The run's result names the new connection, and has the costs of the new model. Checkpoints after
    that step cannot be resumed: the model would be built with the first connection again, whose
    parameters are others. So they are those of another run.

    Args:
        step: the step after which it happens.
        spec: the new connection, like "mudd(dilation=2)".

    Attributes:
        loss_change: change of the first validation set's loss at the switch; None before it.

    Raises:
        ValueError: the connection is unknown; or, before the first step, the run has no such step
            or a compiled or sharded model.
    """

    def __init__(self, step: int, spec: str):
        self.step = step
        self.spec = str(make(spec))
        self.loss_change: float | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        steps = trainer.settings.optimization.steps
        if not 1 <= self.step <= steps:
            raise ValueError(
                f"the connection can change after a step from 1 to {steps}, got {self.step}"
            )
        engine = trainer.settings.engine
        if engine.compile != "none":
            raise ValueError("a compiled model cannot change its connection; set compile to none")
        if engine.strategy == "fsdp" and trainer.fabric.world_size > 1:
            raise ValueError("a sharded model cannot change its connection; set strategy to ddp")

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step != self.step:
            return
        first = next(iter(trainer.examples.valid))
        before = trainer.evaluate()[first]["loss"]
        model: Any = disconnect(trainer.model)
        torch.manual_seed(trainer.seed)  # of the connection's initial parameters
        trainer.set_model(connect(model, self.spec))
        trainer.arm = replace(trainer.arm, connection=self.spec)
        trainer.state.method_code = code_digest(make(self.spec).method)
        trainer.measure_costs()
        self.loss_change = trainer.evaluate()[first]["loss"] - before
