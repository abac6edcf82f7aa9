"""A pretrained language model as the backbone of a run, and the connection it may have already."""

import warnings
from typing import Any

import torch
from torch import nn

from ..connection import find_connections
from ..convert.pretrained import open_model
from ..evaluate.language_models import check_logits, context_limit
from ..files import expand_place
from ..hf import connect, disconnect
from ..spec import is_same_connection, make
from .settings import DataSettings


def open_backbone(
    source: str, data: DataSettings, num_classes: int, dtype: torch.dtype
) -> nn.Module:
    """A language model of transformers with its weights.

    Args:
        source: a folder, which may begin with an environment variable, or a name on the Hub.
        data: for the length of the context.
        num_classes: size of the vocabulary of the data's tokenizer.
        dtype: of the backbone's parameters.

    Raises:
        ValueError: there is no complete model, its embedding has fewer rows than the tokenizer
            tokens, the context is longer than its positions, or it sees the tokens that it is to
            predict, as an encoder.
    """
    model = open_model(expand_place(source), dtype)
    rows = model.get_input_embeddings().num_embeddings
    if num_classes > rows:
        raise ValueError(
            f"the data's tokenizer has {num_classes:,} tokens and the embedding of {source} "
            f"{rows:,} rows; --tokenizer names another"
        )
    positions = context_limit(model)
    if positions is not None and data.context > positions:
        raise ValueError(
            f"context must be at most {positions:,}, the positions of {source}, got "
            f"{data.context:,}"
        )
    check_logits(model)
    return model


def connect_backbone(backbone: Any, source: str, connection: str) -> nn.Module:
    """A pretrained backbone with a connection: the one that it has, or else a new one.

    A connection that computes the plain residual, like `prenorm`, is replaced.

    Args:
        backbone: of `open_backbone`.
        source: where it is from.
        connection: the spec, like "mudd(dilation=2)".

    Raises:
        ValueError: it has another connection, which computes something else.
    """
    if not find_connections(backbone):
        return _connect(backbone, connection)
    present = make(backbone.config.crosslayer)
    if is_same_connection(present, connection):
        return backbone
    try:
        plain = disconnect(backbone)
    except ValueError:
        raise ValueError(
            f"{source} is connected with {present}, got the connection {connection}; expected "
            f"{present}, or a model with plain residual connections"
        ) from None
    return _connect(plain, connection)


def _connect(backbone: Any, connection: str) -> nn.Module:
    with warnings.catch_warnings():
        # it asks for the training that follows, and a run states the loss before that
        warnings.filterwarnings("ignore", "connecting .* changes the outputs")
        return connect(backbone, connection)
