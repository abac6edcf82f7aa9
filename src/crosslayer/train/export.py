"""Write a trained model to a folder that `from_pretrained`, `crosslayer eval` and `crosslayer
generate` read.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from ..convert.pretrained import copy_tokenizer
from ..data.tokenizing import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, byte_tokenizer_json
from ..files import UNFINISHED_SUFFIX, check_no_file, expand_place, replace_folder
from ..run_folders import TRAINED_MODEL_FOLDER, is_model_folder
from .parallel import run_on_rank_zero
from .trainer import Trainer
from .weight_averages import averaged_weights


def export_trained(trainer: Trainer, folder: Path) -> None:
    """Write the model of a trainer, gathered from all ranks, with its tokenizer.

    Where the trainer keeps averaged weights, they are the model's. An older model in `folder` is
    moved to `folder.replaced` before the new one takes its place. So one of the two is complete at
    any moment; after a crash between, rename `folder.replaced` by hand.

    Args:
        trainer: of a model of transformers. A pretrained model with its own tokenizer keeps the
            ends of a text that it has. Any other takes the separator of the examples' tokenizer, if
            they have one.
        folder: a new one, or one with a model, which is replaced.

    Raises:
        ValueError: the folder has other files, and no model.
    """
    fabric = trainer.fabric
    model: Any = trainer.model
    tokenizer = trainer.examples.tokenizer
    tokenizer_source = trainer.settings.pretrained_tokenizer
    run_on_rank_zero(fabric, lambda: _check_holds_no_others(folder))

    def write(state_dict: dict[str, Any]) -> None:
        temporary = folder.with_name(folder.name + UNFINISHED_SUFFIX)
        shutil.rmtree(temporary, ignore_errors=True)
        is_new = tokenizer is not None and tokenizer_source is None
        if is_new:
            model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.end
        try:
            model.save_pretrained(temporary, state_dict=state_dict)
            if is_new:
                _write_tokenizer(tokenizer, temporary)
            elif tokenizer_source is not None:
                copy_tokenizer(expand_place(tokenizer_source), temporary)
            replace_folder(temporary, folder)
        except OSError:  # a full disk
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    gather = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with averaged_weights(model, trainer.optimizers):
        # On a CPU these are the model's own tensors, so they are written before the weights return.
        state_dict = get_model_state_dict(model, options=gather)
        run_on_rank_zero(fabric, lambda: write(state_dict))


def _check_holds_no_others(folder: Path) -> None:
    """Raise a ValueError for a folder with files and no model, like a run's."""
    check_no_file(folder)
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not is_model_folder(folder) or not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder}: has files and is no saved model, so it is not replaced; name a new folder, "
            f"like {folder / TRAINED_MODEL_FOLDER}"
        )


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write tokenizer.json, and what it does not say: how to read it, and what ends a text."""
    backend = Tokenizer.from_str(tokenizer.definition or byte_tokenizer_json())
    # Any other class would build another tokenizer from the vocabulary.
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    # A token that is named here becomes special, so only the end token is.
    end = backend.id_to_token(tokenizer.end)
    if end is not None:
        config["eos_token"] = end
    # written anew, because transformers needs keys that a definition may lack
    (folder / TOKENIZER_FILE).write_text(backend.to_str(pretty=True), "utf8")
    (folder / TOKENIZER_CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", "utf8")
