"""Runs one after another, in one process or in each that torchrun starts: SPEC.json -> OUT.json.

A run is {settings, arm, folder, stop}: `stop` is the step at which it is left without a word.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch

from crosslayer.train import task
from crosslayer.train.export import save_model
from crosslayer.train.recipe import Arm
from crosslayer.train.settings import Settings
from crosslayer.train.trainer import train

SMALL = {
    "steps": 12,
    "batch": 4,
    "context": 32,
    "layers": 2,
    "dim": 32,
    "heads": 2,
    "evals": 2,
    "held_out": 2,
}


class Left(Exception):
    pass


def run(settings, arm, folder=None, stop=None, seed=0):
    """Its losses, its row (None where it was left), and a digest of its last weights."""
    options, losses = Settings.of(**{**SMALL, **settings}), []

    def watch(now):
        losses.append(now.loss)
        if now.step == stop:
            raise Left

    path = Path(folder) if folder else None
    examples = task.find_task(options.model).examples(options)
    try:
        row, model, fabric = train(options, Arm.of(arm), seed, examples, watch, path)
    except Left:
        return {"losses": losses, "row": None, "weights": None}
    if path:
        save_model(fabric, model, path / "model")
    return {"losses": losses, "row": row, "weights": digest(model)}


def digest(model):
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    spec, out = sys.argv[1:]
    found = [run(**job) for job in json.loads(Path(spec).read_text())]
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        os._exit(0)  # gloo's threads may outlive the interpreter, and abort what is done
