"""Write a trained model to a folder that `from_pretrained`, `crosslayer eval` and `crosslayer
generate` read.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
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
    """Write the model of a trainer, with its averaged weights where it keeps these.

    Args:
        trainer: of a model of transformers.
        folder: a new one, or one with a model, which is replaced.

    Raises:
        ValueError: the folder has other files, and no model.
    """
    with averaged_weights(trainer.model, trainer.optimizers):
        export_model(
            trainer.fabric,
            trainer.model,
            folder,
            trainer.examples.tokenizer,
            trainer.settings.pretrained_tokenizer,
        )


def export_model(
    fabric: Fabric,
    model: Any,
    folder: Path,
    tokenizer: Any = None,
    tokenizer_source: str | None = None,
) -> None:
    """Write a model of transformers, gathered from all ranks, with its tokenizer.

    An older model in `folder` is moved to `folder.old` before the new one takes its place. So one
    of the two is complete at any moment; after a crash between, rename `folder.old` by hand.

    Args:
        fabric: rank 0 writes.
        model: its parameters may be sharded.
        folder: a new one, or one with a model, which is replaced.
        tokenizer: a `Tokenizer` of crosslayer.data. Its separator becomes the model's end of text.
        tokenizer_source: of a pretrained model with its own tokenizer: a folder, or a name on the
            Hub. Its files are copied, and the model keeps the ends of a text that it has.

    Raises:
        ValueError: the folder has other files, and no model.
    """
    run_on_rank_zero(fabric, lambda: _check_holds_no_others(folder))
    gather = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state_dict = get_model_state_dict(model, options=gather)

    def write() -> None:
        temporary = folder.with_name(folder.name + UNFINISHED_SUFFIX)
        shutil.rmtree(temporary, ignore_errors=True)
        is_new = tokenizer is not None and tokenizer_source is None
        if is_new:
            model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.end
        model.save_pretrained(temporary, state_dict=state_dict)
        if is_new:
            _write_tokenizer(tokenizer, temporary)
        elif tokenizer_source is not None:
            copy_tokenizer(expand_place(tokenizer_source), temporary)
        replace_folder(temporary, folder)

    run_on_rank_zero(fabric, write)


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
