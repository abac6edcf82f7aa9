"""One arm of a recipe, trained in a folder: what the commands `train` and `compare` share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..run_folders import KEPT_MODELS_FOLDER
from .callbacks import KeepModels, LogDiagnostics, LogMetrics, OnStep, SaveCheckpoints
from .identity import run_identity
from .metrics_log import close_loggers, make_loggers
from .parallel import check_same_on_ranks, launch_fabric
from .recipe import Arm
from .run_state import StepResult
from .settings import Settings
from .task import LANGUAGE_TASK, Examples, TrainingTask, build_model, check_vocab
from .trainer import Callback, Trainer


def train_arm(
    settings: Settings,
    arm: Arm | str,
    seed: int,
    examples: Examples,
    task: TrainingTask = LANGUAGE_TASK,
    folder: str | Path | None = None,
    on_step: Callable[[StepResult], Any] = lambda result: None,
) -> Trainer:
    """Train an arm from one seed, or resume it.

    torch's global random state is afterwards what it was before. It is used meanwhile, so a process
    trains one arm at a time, not several in threads.

    Args:
        settings: the arm's.
        arm: its name and connection, or a connection, like "mudd(dilation=2)".
        seed: of the backbone's weights, the order of the examples, and dropout.
        examples: training and validation sets.
        task: what the model is trained to do.
        folder: of checkpoints, metrics.jsonl and kept models; None to write none of them. Other
            loggers then write in the working directory.
        on_step: called after every step.

    Raises:
        RunDiverged: the loss or its gradient is non-finite, or the loss rose too far.
        RunStopped: Ctrl-C or SIGTERM; the run is saved.
        ValueError: the folder is another run's, its checkpoint is damaged, `vocab` is too small for
            the data, or the ranks have different data or options.
    """
    if isinstance(arm, str):
        arm = Arm.from_row(arm)
    if folder is not None:
        folder = Path(folder)
    engine = settings.engine
    check_vocab(settings.model, examples)
    fabric = launch_fabric(engine, make_loggers(engine.loggers, folder or Path(), arm.name))
    identity = run_identity(settings, arm.connection, seed, examples.digest)
    check_same_on_ranks(fabric, {**settings.to_options(), **identity})
    callbacks: list[Callback] = [LogMetrics(folder, engine.log_every), OnStep(on_step)]
    if engine.diagnostics_every > 0:
        callbacks.append(LogDiagnostics(folder, engine.diagnostics_every))
    devices = [fabric.device] if fabric.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            model = build_model(settings, arm.connection, examples.num_classes, seed, task)
            trainer = Trainer(fabric, model, examples, settings, arm, seed, task)
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                saving = SaveCheckpoints(folder, engine.save_every, engine.keep_checkpoints)
                saving.resume(trainer)
                if engine.keep_models > 0:
                    callbacks.append(KeepModels(folder / KEPT_MODELS_FOLDER, engine.keep_models))
                callbacks.append(saving)
            trainer.fit(callbacks)
    except BaseException:
        close_loggers(fabric, "failed")
        raise
    close_loggers(fabric, "success")
    return trainer
