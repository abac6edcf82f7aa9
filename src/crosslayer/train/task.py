"""What a model is trained to do: its examples, its backbone, its loss and its evaluation.

A `TrainingTask` is an argument of `Trainer`, `build_model` and `Recipe`. The default is
`LANGUAGE_TASK`: predict the next token. examples/vision has others.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from ..data.prepared import find_tokenizer_name
from ..data.sampler import ResumableSampler
from ..data.sources import HELD_OUT, TAKEN_NAMES
from ..files import expand_place
from ..hf import connect
from ..hf.config import make_config, make_language_model
from ..hub import check_model_source
from ..losses import cross_entropy, next_token_loss
from ..spec import make
from ..validation import did_you_mean
from .pretrained import connect_backbone, open_backbone
from .settings import DataSettings, ModelSettings, Settings

Batch = Any  # what `default_collate` makes of a task's examples: a tensor, or a dict of tensors


@dataclass
class Examples:
    """Map-style datasets of single examples, and what is known of them.

    Args:
        train: the training set.
        valid: validation sets by name. The first one's loss is the result.
        num_classes: size of the vocabulary, or number of the images' classes.
        digest: identifies the content of all sets.
        sizes: for the report, like {"bytes to train on": 123}.
        sampler: called as `sampler(length, seed, batch, rank, ranks, start)`; gives the indices of
            this rank, endless.
        tokenizer: of texts, saved with the model.
        bytes_per_token: of each validation set, for bits per byte.
        entropy: order-0 entropy of the first validation set, in bits per byte.
        valid_groups: names of validation sets by the name of their group.

    Raises:
        ValueError: a group has a name that is taken, or it names no set or an unknown one.
    """

    train: Any
    valid: dict[str, Any]
    num_classes: int
    digest: str
    sizes: dict[str, int]
    sampler: Callable[..., Sampler[int]] = ResumableSampler
    tokenizer: Any = None
    bytes_per_token: dict[str, float] = field(default_factory=dict)
    entropy: float | None = None
    valid_groups: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for group, names in self.valid_groups.items():
            if group in (*self.valid, *TAKEN_NAMES):
                raise ValueError(f"valid_groups: the name {group!r} is taken already")
            if not names:
                raise ValueError(f"valid_groups: {group!r} names no validation set")
            for name in names:
                if name not in self.valid:
                    raise ValueError(
                        f"valid_groups: {group!r} names {name!r}, which is no validation set"
                        f"{did_you_mean(name, self.valid)}; they are {', '.join(self.valid)}"
                    )

    def epochs(self, steps: int, batch: int) -> float:
        """How often `steps` steps of `batch` examples see the training set."""
        return steps * batch / len(self.train)


class TrainingTask(NamedTuple):
    """The functions of a task.

    Args:
        load_examples: (data settings, `model_config`) -> examples. The latter may have the size of
            an image.
        build_backbone: the model without connections: (model settings, data settings, num_classes,
            dtype of its parameters) -> module.
        loss: (model, batch) -> the scalar to minimise.
        evaluate: (model, batch, indices of the examples in their dataset) -> metrics by name, each
            [B]; one is "loss".
        count_units: the number of `unit` in a batch.
        unit: what speed is counted in: tokens or images.
        loss_unit: data settings -> the unit of the loss, for the report.
        tiny_options: options of a recipe at `--scale tiny`, so that it runs on any machine.
        tiny_model_config: the same for keys of `model_config`.
        open_backbone: a pretrained model: (source, data settings, num_classes, dtype of its
            parameters) -> module. None where a run cannot start from one.
    """

    load_examples: Callable[[DataSettings, dict[str, Any]], Examples]
    build_backbone: Callable[[ModelSettings, DataSettings, int, torch.dtype], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    evaluate: Callable[[nn.Module, Batch, list[int]], dict[str, Tensor]]
    count_units: Callable[[Batch], int]
    unit: str
    loss_unit: Callable[[DataSettings], str]
    tiny_options: dict[str, Any]
    tiny_model_config: dict[str, Any]
    open_backbone: Callable[[str, DataSettings, int, torch.dtype], nn.Module] | None = None


def load_examples(settings: Settings, task: TrainingTask) -> Examples:
    """The examples of a run. Its pretrained model is looked for first, as data may take long.

    Raises:
        ValueError: the data or the model cannot be found or used.
    """
    if settings.model.pretrained is not None:
        check_model_source(expand_place(settings.model.pretrained))
    return task.load_examples(settings.data, settings.model.model_config)


def load_texts(data: DataSettings, model_config: dict[str, Any]) -> Examples:
    """Windows of a corpus, each [context + 1] tokens.

    Raises:
        ValueError: the data or the tokenizer cannot be read, or there is an option of another task.
    """
    from ..data.corpus import load_corpus

    if data.task_options:
        name = min(data.task_options)
        raise ValueError(f"language modelling has no option {name!r} in task_options")
    valid = {name: expand_place(source) for name, source in data.valid.items()}
    tokenizer = expand_place(data.tokenizer)
    corpus = load_corpus(expand_place(data.data), data.context, tokenizer, valid)
    first = next(iter(corpus.valid))
    valid_label = "held out" if first == HELD_OUT else f"of {first}"
    return Examples(
        train=corpus.train,
        valid=dict(corpus.valid),
        num_classes=corpus.tokenizer.vocab,
        digest=corpus.digest,
        sizes={
            "bytes to train on": corpus.train.tokens.text_bytes,
            valid_label: corpus.valid[first].tokens.text_bytes,
        },
        tokenizer=corpus.tokenizer,
        bytes_per_token=corpus.bytes_per_token,
        entropy=corpus.valid[first].tokens.entropy_per_token / corpus.bytes_per_token[first],
        valid_groups=data.valid_groups,
    )


def _build_language_model(
    model: ModelSettings, data: DataSettings, num_classes: int, dtype: torch.dtype
) -> nn.Module:
    """A causal language model of transformers with random weights.

    Raises:
        ValueError: the family is unknown, has no model of these sizes, or no experts for
            `router_z_loss`.
    """
    config = make_config(
        model.family, model.layers, model.dim, model.heads, num_classes, model.model_config
    )
    config.max_position_embeddings = data.context
    if model.router_z_loss:
        if not getattr(config, "output_router_logits", False):
            raise ValueError(
                "router_z_loss needs a mixture of experts with output_router_logits: true in "
                f"model_config; {model.family} has {model.model_config}"
            )
        config.router_z_loss_coef = model.router_z_loss
    return make_language_model(config, dtype=dtype)


def _evaluate_texts(model: nn.Module, tokens: Tensor, indices: list[int]) -> dict[str, Tensor]:
    """Each sequence's mean cross-entropy. tokens: [B T + 1]."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return {"loss": cross_entropy(logits, tokens[:, 1:]).mean(1)}


def _count_tokens(tokens: Tensor) -> int:
    """Tokens that are predicted. tokens: [B T + 1]."""
    return tokens[:, 1:].numel()


LANGUAGE_TASK = TrainingTask(
    load_examples=load_texts,
    build_backbone=_build_language_model,
    loss=next_token_loss,
    evaluate=_evaluate_texts,
    count_units=_count_tokens,
    unit="tokens",
    loss_unit=lambda data: f"nats per {'byte' if data.tokenizer == 'bytes' else 'token'}",
    tiny_options={"data": "stdlib", "valid": {}, "valid_groups": {}, "tokenizer": "bytes"},
    # bytes have no special tokens
    tiny_model_config=dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    open_backbone=open_backbone,
)


def check_outside_data(folder: Path, data: DataSettings, task: TrainingTask) -> None:
    """Raise a ValueError where an output folder lies in a folder of texts, which would be read."""
    if task is not LANGUAGE_TASK:
        return
    for place in (data.data, *data.valid.values()):
        source = Path(expand_place(place))
        is_of_texts = source.is_dir() and find_tokenizer_name(str(source)) is None
        if is_of_texts and folder.resolve().is_relative_to(source.resolve()):
            raise ValueError(
                f"the output folder {folder} lies in the data {place}, where its files would be "
                "read as texts; choose another --out"
            )


def check_vocab(model: ModelSettings, examples: Examples) -> None:
    """Raise a ValueError where `vocab` is too small for the data."""
    if model.vocab is not None and model.vocab < examples.num_classes:
        raise ValueError(
            f"vocab must be at least {examples.num_classes}, the number of tokens or classes "
            f"of the data, got {model.vocab}"
        )


def build_model(
    settings: Settings, spec: str, num_classes: int, seed: int, task: TrainingTask = LANGUAGE_TASK
) -> nn.Module:
    """The task's backbone, connected. The weights of a new backbone depend on the seed alone.

    Args:
        settings: of the backbone, the data (length of the context) and the precision.
        spec: the connection, like "mudd(dilation=2)".
        num_classes: size of the vocabulary, or number of the images' classes;
            `settings.model.vocab` overrides it.
        seed: of the weights.
        task: what it is trained to do.

    Raises:
        ValueError: the settings describe no model that can be built or opened and connected.
    """
    # the connections' own parameters are float32 whatever the backbone's are
    dtype = torch.bfloat16 if settings.engine.precision == "bf16-true" else torch.float32
    torch.manual_seed(seed)
    connection = str(make(spec))
    pretrained = settings.model.pretrained
    if pretrained is not None:
        if task.open_backbone is None:
            raise ValueError(f"this task trains no pretrained models, got {pretrained}")
        backbone = task.open_backbone(pretrained, settings.data, num_classes, dtype)
        return connect_backbone(backbone, pretrained, connection)
    backbone = task.build_backbone(
        settings.model, settings.data, settings.model.vocab or num_classes, dtype
    )
    if settings.model.embedding_std is not None:
        scale_embeddings(backbone, settings.model.embedding_std)
    return connect(backbone, connection, reallocate=settings.model.reallocate)


@torch.no_grad()
def scale_embeddings(backbone: nn.Module, std: float) -> None:
    """Give the token embeddings the standard deviation `std`; a head that is tied to them too.

    They are scaled and not drawn again, so that other weights do not depend on it.

    Raises:
        ValueError: the backbone has no token embeddings.
    """
    embeddings = getattr(backbone, "get_input_embeddings", lambda: None)()
    if not isinstance(embeddings, nn.Embedding):
        raise ValueError(
            f"embedding_std needs a backbone with token embeddings, got {type(backbone).__name__}"
        )
    weight = embeddings.weight
    weight.mul_(std / weight.float().std())
