"""Runs one after another, in one process or in each that torchrun starts: JOBS.json -> OUT.json.

A job is {settings, arm, folder, stop, seed}: after step `stop` the run is left without saving it.
"""

import hashlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from crosslayer.train.export import export_trained
from crosslayer.train.recipe import Arm
from crosslayer.train.run import train_arm
from crosslayer.train.run_state import RunResult
from crosslayer.train.settings import Settings
from crosslayer.train.task import LANGUAGE_TASK

SMALL = {
    "steps": 12,
    "batch": 4,
    "context": 32,
    "layers": 2,
    "dim": 32,
    "heads": 2,
    "evals": 2,
    "eval_batches": 2,
    "lr": 7.5e-4,  # AdamW can turn the rounding of a tiny gradient into a step of this size
}


def run_with_loss(arm, seed, loss):
    """A finished run, without training."""
    return RunResult(
        arm.name, arm.connection, seed, 10, 1, loss, {}, {}, 1.0, 1, loss, [[2, loss]], [], 1.0
    )


class Left(Exception):
    pass


def run(settings, arm, folder=None, stop=None, seed=0, task=LANGUAGE_TASK):
    """A run's losses, its result (None where it was left), and a digest of its last weights."""
    options, losses = Settings.from_options(**{**SMALL, **settings}), []

    def on_step(result):
        losses.append(result.loss)
        if result.step == stop:
            raise Left

    path = Path(folder) if folder else None
    arm = Arm.from_row(arm)
    examples = task.load_examples(options.data, options.model.model_config)
    try:
        trainer = train_arm(options, arm, seed, examples, task, path, on_step)
    except Left:
        return {"losses": losses, "result": None, "weights": None}
    if path:
        export_trained(trainer, path / "model")
    result = asdict(trainer.result())
    return {"losses": losses, "result": result, "weights": digest(trainer.model)}


def digest(model):
    content = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        content.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs, out = sys.argv[1:]
    results = [run(**job) for job in json.loads(Path(jobs).read_text())]
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        os._exit(0)  # gloo's threads may outlive the interpreter, and abort what is done
