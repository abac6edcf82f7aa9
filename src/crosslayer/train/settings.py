"""What a run is made of: four groups of options, each owned by the part that reads it, flat on the command line."""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, Self

from ..validation import check_choice, check_positive, did_you_mean


@dataclass
class Model:
    """The body.

    Args:
        family: of the body, as transformers or diffusers call it: llama, gpt_neox or another that `connect` knows.
        layers: of the body.
        dim: width of the stream.
        heads: of the attention.
        vocab: size of the vocabulary, or number of classes; the data's where it is not given.
        body: any other keys of the family's configuration, like {"tie_word_embeddings": true}.
        reallocate: give the MLPs MUDD's widths, narrow below and wide above.
    """

    family: str = "llama"
    layers: int = 6
    dim: int = 128
    heads: int = 4
    vocab: int | None = None
    body: dict[str, Any] = field(default_factory=dict)
    reallocate: bool = False

    def __post_init__(self) -> None:
        check_positive(
            layers=self.layers,
            dim=self.dim,
            heads=self.heads,
            vocab=1 if self.vocab is None else self.vocab,
        )


@dataclass
class Data:
    """The data. A path may begin with a variable of the environment, like $DATA/pile.

    Args:
        data: "stdlib", the running interpreter's own library; a text, .jsonl or .parquet file or a folder of them;
            datasets:NAME; a folder that `crosslayer data prepare` wrote; or of images, a folder of classes or an .npz.
        valid: validation sets by name; without any, a part of the data is held out.
        tokenizer: bytes, bpe:SIZE to train one on the data, or a tokenizer.json.
        context: tokens a sequence.
        batch: sequences, or images, a step, over all ranks and accumulated micro-batches.
        held_out: batches of each validation set that are judged.
        augment: of training images: none, flip, or inception crop.
        workers: processes that load data ahead.
    """

    data: str = "stdlib"
    valid: dict[str, str] = field(default_factory=dict)
    tokenizer: str = "bytes"
    context: int = 256
    batch: int = 8
    held_out: int = 12
    augment: str = "none"
    workers: int = 0

    def __post_init__(self) -> None:
        check_positive(context=self.context, batch=self.batch, held_out=self.held_out)
        check_choice("augment", self.augment, dict.fromkeys(("none", "flip", "inception crop")))


# what is left of the learning rate after a share of the steps beyond the warm-up
DECAYS = {
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
    "linear": lambda share: 1 - share,
}


@dataclass
class Optimization:
    """The optimizer.

    Args:
        steps: optimizer steps.
        optimizer: adamw; or muon for the 2-d matrices of the layers, with AdamW for the rest.
        lr: peak learning rate of AdamW.
        muon_lr: peak learning rate of Muon.
        weight_decay: of matrices; connections declare which of their parameters take it.
        betas: of AdamW.
        eps: of AdamW.
        momentum: of Muon.
        clip: norm to which gradients are clipped; 0 for none.
        warmup: steps of linear warm-up, or their share of all where it is below 1.
        decay: how the learning rate falls after the warm-up, on a cosine or linear.
        floor: share of the learning rate at which it ends.
        delay: steps for which connections keep their initial values.
    """

    steps: int = 160
    optimizer: str = "adamw"
    lr: float = 1.5e-3
    muon_lr: float = 2e-2
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.95
    clip: float = 1.0
    warmup: float = 0.1
    decay: str = "cosine"
    floor: float = 0.1
    delay: int = 0

    def __post_init__(self) -> None:
        check_positive(steps=self.steps)
        natural(clip=self.clip, warmup=self.warmup, floor=self.floor, delay=self.delay)
        check_choice("optimizer", self.optimizer, dict.fromkeys(("adamw", "muon")))
        check_choice("decay", self.decay, DECAYS)
        self.betas = (self.betas[0], self.betas[1])  # JSON and YAML know no tuples


@dataclass
class Engine:
    """The run.

    Args:
        precision: 32-true; bf16-mixed, the products alone; or bf16-true, the body's weights too.
        strategy: of several processes: ddp, or fsdp to shard parameters, gradients and optimizer (FSDP2).
        accumulate: micro-batches a step.
        compile: none, layers one by one, or the model whole.
        recompute: in the backward pass, to save memory: none; reads, from the state each keeps; streams, what was read
            and the states too, of which few are kept; inversion, the states from the last one back, of a method that
            can (mgr, its streams in float32); or layers, whole. Neither streams nor inversion can be compiled.
        evals: times the validation sets are judged, evenly over the steps.
        save_every: steps between checkpoints; with 0 a run is saved when it is stopped and when it ends.
        keep: checkpoints kept, the newest.
        unstable: what a loss that is no number or spikes does: stop, or skip the batch.
        spike: a loss so many nats above its running mean is a spike; 0 for none.
        log_every: steps between lines of metrics.jsonl.
        watch_every: steps between measurements of what the connections do; 0 for none.
        loggers: tensorboard or wandb, beside metrics.jsonl.
    """

    precision: str = "32-true"
    strategy: str = "ddp"
    accumulate: int = 1
    compile: str = "none"
    recompute: str = "none"
    evals: int = 6
    save_every: int = 0
    keep: int = 2
    unstable: str = "stop"
    spike: float = 0.0
    log_every: int = 10
    watch_every: int = 0
    loggers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_positive(
            accumulate=self.accumulate, evals=self.evals, keep=self.keep, log_every=self.log_every
        )
        natural(save_every=self.save_every, spike=self.spike, watch_every=self.watch_every)
        for name, known in CHOICES.items():
            check_choice(name, getattr(self, name), dict.fromkeys(known))
        if self.recompute in ("streams", "inversion") and self.compile != "none":
            raise ValueError(
                f"recompute={self.recompute!r} and compile={self.compile!r} exclude each other; "
                "what is compiled can recompute reads or layers"
            )
        for logger in self.loggers:
            check_choice("loggers", logger, dict.fromkeys(LOGGERS))


def natural(**options: float) -> None:
    """Raise a ValueError for an option below 0, or that is no number."""
    for name, value in options.items():
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value!r}")


LOGGERS = ("tensorboard", "wandb")
CHOICES = {
    "precision": ("32-true", "bf16-mixed", "bf16-true"),
    "strategy": ("ddp", "fsdp"),
    "compile": ("none", "layers", "model"),
    "recompute": ("none", "reads", "streams", "inversion", "layers"),
    "unstable": ("stop", "skip"),
}
# what may differ between the parts of one run, which it does not change beyond rounding
FREE = {f.name for f in fields(Engine)} - {"precision"} | {"workers"}


class Settings(NamedTuple):
    """All four. `Settings.of(layers=2, lr=1e-3)` takes any of their options."""

    model: Model
    data: Data
    optimization: Optimization
    engine: Engine

    @classmethod
    def of(cls, **options: Any) -> Self:
        unknown = [name for name in options if name not in OPTIONS]
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r}{did_you_mean(unknown[0], OPTIONS)}")
        return cls(
            *(part(**{k: v for k, v in options.items() if OPTIONS[k] is part}) for part in PARTS)
        )

    def flat(self) -> dict[str, Any]:
        """Every option by its name, as `of` takes them."""
        return {name: value for part in self for name, value in asdict(part).items()}

    def identity(self) -> dict[str, Any]:
        """The options that decide what is learnt: where one differs, it is another run."""
        return {name: value for name, value in self.flat().items() if name not in FREE}


PARTS: tuple[Any, ...] = (Model, Data, Optimization, Engine)
OPTIONS = {f.name: part for part in PARTS for f in fields(part)}
