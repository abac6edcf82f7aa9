"""A trained model as a folder that `from_pretrained`, `crosslayer eval` and `crosslayer generate` read."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning.fabric import Fabric
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ..data.tokenizing import TOKENIZER_FILE, byte_tokenizer_json


def save_model(fabric: Fabric, model: Any, folder: Path, tokenizer: Any = None) -> None:
    """Write the whole model, gathered from its shards, with its tokenizer; aside, then in place of what was there."""
    shards = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=shards)
    if fabric.is_global_zero:
        aside = folder.with_name(folder.name + ".part")
        shutil.rmtree(aside, ignore_errors=True)
        if tokenizer is not None and hasattr(model.config, "eos_token_id"):
            model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.end
        with patch.object(model, "state_dict", lambda: state):  # diffusers takes no other
            model.save_pretrained(aside)
        if tokenizer is not None:
            (aside / TOKENIZER_FILE).write_text(tokenizer.definition or byte_tokenizer_json(), "utf8")
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    fabric.barrier()
