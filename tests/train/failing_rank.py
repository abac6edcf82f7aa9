"""Runs with an error on one of two ranks: TEXT FOLDER -> FOLDER/RANK.json.

RANK.json has the error that each rank got.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch

from crosslayer.train import checkpoint
from crosslayer.train.export import export_trained
from crosslayer.train.recipe import Arm
from crosslayer.train.run import train_arm
from crosslayer.train.settings import Settings
from crosslayer.train.task import LANGUAGE_TASK
from tests.train.runs import SMALL


def planted(*arguments, **options):
    raise OSError("planted")


def error_of(function, *arguments):
    """The error of a call, in words."""
    try:
        function(*arguments)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def main(text: str, folder: Path) -> None:
    settings = Settings.from_options(**SMALL | {"data": text, "steps": 2})
    arm = Arm.from_row("prenorm")
    examples = LANGUAGE_TASK.load_examples(settings.data, settings.model.model_config)
    rank = int(os.environ["RANK"])
    errors = {}
    for name, failing_rank in (("replace_folder", 0), ("_crc32", 1)):
        right = getattr(checkpoint, name)
        if rank == failing_rank:
            setattr(checkpoint, name, planted)
        run = (settings, arm, 0, examples, LANGUAGE_TASK, folder / name)
        errors[name] = error_of(train_arm, *run)
        setattr(checkpoint, name, right)
    (folder / "log" / "metrics.jsonl").mkdir(parents=True, exist_ok=True)
    errors["log"] = error_of(train_arm, settings, arm, 0, examples, LANGUAGE_TASK, folder / "log")
    other = dataclasses.replace(examples, digest="ab"[rank])
    errors["data"] = error_of(train_arm, settings, arm, 0, other, LANGUAGE_TASK)
    saving = Settings.from_options(**settings.to_options() | {"save_every": 1 + rank})
    errors["options"] = error_of(train_arm, saving, arm, 0, examples, LANGUAGE_TASK)
    trainer = train_arm(settings, arm, 0, examples, LANGUAGE_TASK)
    if rank == 0:
        trainer.model.save_pretrained = planted
    errors["model"] = error_of(export_trained, trainer, folder / "model")
    (folder / f"{rank}.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the interpreter, and abort what is done
