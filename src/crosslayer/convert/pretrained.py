"""Open any language model and its tokenizer, from a folder or from the Hub.

A folder has transformers' layout, connected or not, or a published checkpoint's. Weights are read
from safetensors only, and no code of a checkpoint is run.
"""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ..files import read_json
from ..hf import from_pretrained
from ..hf.checkpoint import CONFIG_FILE, find_folder, load_complete, read_config
from ..hf.registration import names_connection
from ..hub import check_model_source
from .published import is_published, load_published

END_OF_TEXT = "<|endoftext|>"


def open_model(
    source: str | Path, dtype: torch.dtype | str = "auto", rope: str | None = None
) -> PreTrainedModel:
    """Any language model: a connected one, a plain one of transformers, or a published checkpoint.

    Args:
        source: a folder with config.json and safetensors, or a name on the Hugging Face Hub.
        dtype: of the backbone; "auto" is the dtype it was saved in.
        rope: of a published checkpoint, see `load_published`.

    Raises:
        ValueError: there is no complete model at `source`.
    """
    folder = find_folder(source)
    if is_published(folder):
        return load_published(folder, rope, None if dtype == "auto" else dtype)
    if rope is not None:
        raise ValueError("rope is an option of published checkpoints; this config.json has its own")
    if names_connection(read_json(folder / CONFIG_FILE, dict), folder):
        model = from_pretrained(folder, dtype=dtype)
    else:
        config = read_config(folder)
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise ValueError(f"{folder}: {config.model_type!r} is no type of language models")
        model = load_complete(AutoModelForCausalLM, folder, config=config, dtype=dtype)
    if not getattr(model, "can_generate", bool)():
        raise ValueError(f"{folder} is a {type(model).__name__}, which is no language model")
    return model


def open_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """A tokenizer of transformers.

    Args:
        source: a folder, a tokenizer.json, or a name on the Hub. A tokenizer.json without a
            tokenizer_config.json in its folder, as `crosslayer train` writes it, does not say which
            token ends a text: <|endoftext|> if it is in the vocabulary, or none.

    Raises:
        ValueError: there is no tokenizer at `source`.
    """
    check_model_source(source, "folder or file")
    path = Path(source)
    file = path / "tokenizer.json" if path.is_dir() else path
    has_config = path.is_dir() and (path / "tokenizer_config.json").is_file()
    try:
        if file.is_file() and not has_config:
            # Without a config AutoTokenizer would guess the class from the type of the model.
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
            if END_OF_TEXT in tokenizer.get_vocab():
                tokenizer.eos_token = END_OF_TEXT
            return tokenizer
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises no class of its own
        if path.is_dir() and not file.is_file() and not has_config:
            raise ValueError(
                f"{source} has no tokenizer; copy that of the original model into it, "
                "or name one with --tokenizer"
            ) from None
        problem = f"no tokenizer can be read from {source}"
        if not path.exists():
            problem = f"{source}: no such folder or file, and no such name on the Hub"
        reason = str(error).split("\n")[0]
        raise ValueError(f"{problem} ({reason}); --tokenizer names another") from error


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Raise a ValueError where a tokenizer has more tokens than a model's embedding."""
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and the model's embedding {rows}: "
            "they do not belong together"
        )


def choose_device(name: str | None) -> torch.device:
    """The device called `name`, or a GPU where there is one and no name is given.

    Raises:
        ValueError: torch cannot use the device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without the device asserts
        raise ValueError(
            f"cannot use the device {name!r} ({str(error).splitlines()[0]})"
        ) from error
    return device
