"""A trained model as a folder that `from_pretrained`, `crosslayer eval` and `crosslayer generate` read."""

import shutil
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


def save_model(fabric: Fabric, model: Any, folder: Path) -> None:
    """Write the whole model, gathered from its shards, aside and then in place of what was there."""
    shards = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=shards)
    if fabric.is_global_zero:
        aside = folder.with_name(folder.name + ".part")
        shutil.rmtree(aside, ignore_errors=True)
        model.save_pretrained(aside, state_dict=state)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    fabric.barrier()
