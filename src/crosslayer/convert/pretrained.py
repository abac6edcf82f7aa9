"""Open any language model and its tokenizer, or a model of images, from a folder or the Hub.

A folder has transformers' layout, connected or not, or a published checkpoint's. Weights are read
from safetensors only, and no code of a checkpoint is run.
"""

import shutil
from pathlib import Path

import tokenizers
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ..data.tokenizing import (
    BYTE_END,
    BYTE_TOKENIZER,
    SEPARATOR_TOKENS,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Tokenizer,
    byte_tokenizer_json,
    make_tokenizer,
)
from ..errors import error_in_one_line
from ..files import read_json
from ..hf import from_pretrained
from ..hf.loading import find_folder, load_complete, read_config
from ..hf.registration import names_connection
from ..run_folders import CONFIG_FILE
from .published import is_published, load_published

_TOKENIZER_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
)
_CHAT_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


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
    config, _ = read_config(folder)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"{folder}: {config.model_type!r} is no type of language models")
    if not names_connection(read_json(folder / CONFIG_FILE)):
        return load_complete(AutoModelForCausalLM, folder, config=config, dtype=dtype)
    model: PreTrainedModel = from_pretrained(folder, dtype=dtype)
    if not model.can_generate():
        raise ValueError(f"{folder}: a {type(model).__name__} is no language model")
    return model


def takes_images(source: str | Path) -> bool:
    """Whether a folder, or a name on the Hub, has a model of a type that classifies images."""
    folder = find_folder(source)
    if is_published(folder):
        return False
    config, _ = read_config(folder)
    return type(config) in AutoModelForImageClassification._model_mapping


def open_image_model(source: str | Path, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """A model of images: a connected one, or a plain one of transformers.

    Args:
        source: a folder with config.json and safetensors, or a name on the Hugging Face Hub.
        dtype: of the backbone; "auto" is the dtype it was saved in.

    Raises:
        ValueError: there is no complete model at `source`.
    """
    folder = find_folder(source)
    if names_connection(read_json(folder / CONFIG_FILE)):
        return from_pretrained(folder, dtype=dtype)
    config, _ = read_config(folder)
    return load_complete(AutoModelForImageClassification, folder, config=config, dtype=dtype)


def open_id_tokenizer(source: str | Path) -> Tokenizer:
    """The tokenizer of files of token ids: `open_tokenizer`'s, as `crosslayer.data` has it.

    Raises:
        ValueError: there is no tokenizer at `source`, none of the `tokenizers` library, or no token
            that separates documents.
    """
    tokenizer = open_tokenizer(source)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"{source}: token ids need a tokenizer of the tokenizers library, got a "
            f"{type(tokenizer).__name__}"
        )
    return make_tokenizer(str(source), backend.to_str(), tokenizer.eos_token, source)


def open_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """A tokenizer of transformers, of a class of transformers.

    Args:
        source: a folder, a tokenizer.json, a name on the Hub, or "bytes", the tokenizer of models
            that `crosslayer train` trained on bytes. A tokenizer.json is read as the
            `tokenizers` library reads it. Where nothing says which token ends a text, it is the
            first of `SEPARATOR_TOKENS` among the tokens added to the vocabulary, or none.

    Raises:
        ValueError: there is no tokenizer at `source`.
    """
    path = Path(source)
    if str(source) == BYTE_TOKENIZER and not path.exists():
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer.from_str(byte_tokenizer_json()),
            eos_token=BYTE_END,
        )
    if path.is_file():
        file = path
    else:
        path = find_folder(source, _TOKENIZER_FILES, "folder or file")
        file = path / TOKENIZER_FILE
    try:
        if path.is_dir():
            _check_tokenizer_class(path)
        if not file.is_file():
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        elif path.is_dir():
            # AutoTokenizer would make a tokenizer of the model's type from the vocabulary.
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
        else:
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
        ids = tokenizer("a")["input_ids"]
        tokenizer.decode(ids)  # A spoilt setting fails at its first use.
        if not ids and path.is_dir():
            # AutoTokenizer may have made an empty one of the model's type.
            _check_tokenizer_files(source, path)
    except Exception as error:  # tokenizers raises plain Exceptions
        if path.is_dir():
            _check_tokenizer_files(source, path)
        reason = error_in_one_line(error)
        raise ValueError(
            f"no tokenizer can be read from {source} ({reason}); --tokenizer names another"
        ) from error
    if tokenizer.eos_token is None:
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        tokenizer.eos_token = next((token for token in SEPARATOR_TOKENS if token in added), None)
    return tokenizer


def copy_tokenizer(source: str | Path, folder: Path) -> None:
    """Copy the files of a tokenizer and its chat template to another folder.

    Args:
        source: a folder, or a name on the Hugging Face Hub.
        folder: that exists.

    Raises:
        ValueError: there is no folder at `source`.
    """
    names = (*_TOKENIZER_FILES, *_CHAT_TEMPLATE_FILES)
    path = find_folder(source, names)
    for name in names:
        if (path / name).is_file():
            shutil.copyfile(path / name, folder / name)


def _check_tokenizer_files(source: str | Path, folder: Path) -> None:
    """Raise a ValueError where a folder has none of the files of a tokenizer."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(
            f"{source} has no tokenizer; copy that of the original model into it, "
            "or name one with --tokenizer"
        ) from None


def _check_tokenizer_class(folder: Path) -> None:
    """Raise a ValueError where a folder names as its tokenizer another class of transformers."""
    for name in (TOKENIZER_CONFIG_FILE, CONFIG_FILE):
        config = read_json(folder / name) if (folder / name).is_file() else {}
        tokenizer_class = config.get("tokenizer_class")
        # One that transformers does not have is read as a plain tokenizer.
        known = getattr(transformers, str(tokenizer_class), PreTrainedTokenizerBase)
        if not isinstance(known, type) or not issubclass(known, PreTrainedTokenizerBase):
            raise ValueError(f"{name} names {tokenizer_class!r}, which is no tokenizer")


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Raise a ValueError where a tokenizer has more tokens than a model's embedding."""
    rows = model.get_input_embeddings().num_embeddings
    tokens = max(tokenizer.get_vocab().values(), default=-1) + 1
    if tokens > rows:
        raise ValueError(
            f"the tokenizer has {tokens} tokens and the model's embedding {rows}: "
            "they do not belong together"
        )
