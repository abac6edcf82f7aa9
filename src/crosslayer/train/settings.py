"""The options of a run, in four groups. A function takes the group that it needs.

The fields' names are the keys of a recipe and, with dashes, the options of the command line (all
but `YAML_ONLY`).
"""

import copy
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, Literal, NamedTuple, Self, get_origin, get_type_hints

from ..data.prepared import find_tokenizer_name
from ..files import expand_place
from ..validation import (
    MAX_LAYERS,
    check_non_negative,
    check_option_type,
    check_plain,
    check_positive,
    describe_wrong_value,
    did_you_mean,
)


@dataclass
class ModelSettings:
    """The backbone.

    Args:
        family: the backbone's model type in transformers: llama, gpt_neox or another that `connect`
            knows. granite is llama with embeddings × 50, which learn 50 times as fast.
        layers: number of layers.
        dim: width of the residual stream.
        heads: number of attention heads.
        vocab: size of the vocabulary; by default that of the data's tokenizer.
        model_config: further keys of the family's configuration, like {"tie_word_embeddings":
            true}.
        embedding_std: standard deviation of the initial embeddings; by default the family's, 0.02
            in most of transformers. torchtitan's is 1. A constant factor, like granite's 50,
            multiplies them.
        pretrained: folder or Hub name of a language model to continue from, with its own sizes,
            weights and, by default, tokenizer. Options that describe another backbone are refused.
        reallocate: give the MLPs MUDD's widths: narrower in early layers, wider in late ones.
        router_z_loss: weight of the z-loss on the router's logits of a mixture of experts.
    """

    family: str = "granite"
    layers: int = 6
    dim: int = 128
    heads: int = 4
    vocab: int | None = None
    model_config: dict[str, Any] = field(default_factory=dict)
    embedding_std: float | None = None
    pretrained: str | None = None
    reallocate: bool = False
    router_z_loss: float = 0.0

    def __post_init__(self) -> None:
        check_positive(layers=self.layers, dim=self.dim, heads=self.heads)
        if self.layers > MAX_LAYERS:
            raise ValueError(f"layers must be at most {MAX_LAYERS:,}, got {self.layers}")
        check_non_negative(router_z_loss=self.router_z_loss)
        if self.vocab is not None:
            check_positive(vocab=self.vocab)
        if self.embedding_std is not None:
            check_non_negative(embedding_std=self.embedding_std)
        if self.pretrained is not None:
            for name in NEW_BACKBONE_OPTIONS:
                value = getattr(self, name)
                if value != DEFAULT_OPTIONS[name]:
                    raise ValueError(
                        f"{name} describes another backbone than the pretrained one, "
                        f"{self.pretrained}; got {value!r}, expected no {name}"
                    )


# Options of a backbone with random weights.
NEW_BACKBONE_OPTIONS = [f.name for f in fields(ModelSettings) if f.name != "pretrained"]


@dataclass
class DataSettings:
    """The data. A path may begin with an environment variable, like $DATA/pile.

    Args:
        data: "stdlib" (the source code of Python's standard library); a text, .jsonl or .parquet
            file, or a folder of them; .bin or .npy files of token ids; datasets:OWNER/NAME;
            hf://datasets/OWNER/NAME/PATTERN; or a folder that `crosslayer data prepare` wrote.
        valid: validation sets by name, like {"wiki": "wiki.jsonl"} or --valid.wiki=wiki.jsonl; by
            default a part of the data is held out.
        valid_groups: names of validation sets by the name of their group. The results have the
            means over each group.
        tokenizer: bytes; bpe:SIZE, trained on the data; or a tokenizer's name on the Hub or its
            file. By default that of a prepared folder, and otherwise bytes.
        context: tokens of a sequence.
        batch: sequences of a step, over all ranks and micro-batches.
        eval_batches: batches of each validation set that are evaluated.
        workers: processes that load data.
        task_options: options of a task other than language modelling.
    """

    data: str = "stdlib"
    valid: dict[str, str] = field(default_factory=dict)
    valid_groups: dict[str, list[str]] = field(default_factory=dict)
    tokenizer: str = "bytes"
    context: int = 256
    batch: int = 8
    eval_batches: int = 12
    workers: int = 0
    task_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_positive(context=self.context, batch=self.batch, eval_batches=self.eval_batches)
        if self.context < 2:
            raise ValueError("context must be at least 2: a token and the one to predict, got 1")
        check_non_negative(workers=self.workers)


@dataclass
class OptimizationSettings:
    """The optimizer and its learning rate.

    Args:
        steps: optimizer steps.
        optimizer: adamw; or muon for the layers' 2-d matrices, with AdamW for all other parameters.
        lr: peak learning rate of AdamW.
        muon_lr: peak learning rate of Muon.
        connection_lr_scale: learning rate of the connections' parameters, as a multiple of `lr`. On
            the command line the default is 0.1 where neither a recipe nor `lr` is given.
        embedding_lr_scale: learning rate of the embeddings and of heads tied to them, as a multiple
            of `lr`. Their weight decay is divided by it, so that rate × weight decay stays.
        weight_decay: weight decay of matrices; each connection declares which of its parameters
            decay.
        betas: of AdamW.
        eps: of AdamW.
        momentum: of Muon.
        clip: largest norm of the gradient; 0 for no clipping.
        warmup: steps of linear warm-up, at most `steps`; below 1, their share of all steps.
        decay: shape in which the learning rate falls after the warm-up.
        decay_ratio: share of the steps in which it falls, at the end; before that it is constant.
            By default it falls from the warm-up on.
        floor: the learning rate that the decay ends at, one step after the last, as a share of the
            peak.
        delay: first steps in which the connections' parameters are not updated.
        ema: decay of an exponential moving average of the weights, like 0.9999. It is evaluated and
            saved in place of the weights.
    """

    steps: int = 160
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 6e-3
    muon_lr: float = 2e-2
    connection_lr_scale: float = 1.0
    embedding_lr_scale: float = 1.0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.95
    clip: float = 1.0
    warmup: float = 0.3
    decay: Literal["cosine", "linear"] = "cosine"
    decay_ratio: float | None = None
    floor: float = 0.1
    delay: int = 0
    ema: float | None = None

    def __post_init__(self) -> None:
        check_positive(steps=self.steps)
        check_non_negative(
            lr=self.lr,
            muon_lr=self.muon_lr,
            connection_lr_scale=self.connection_lr_scale,
            embedding_lr_scale=self.embedding_lr_scale,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            eps=self.eps,
            clip=self.clip,
            warmup=self.warmup,
            floor=self.floor,
            delay=self.delay,
        )
        if self.warmup > 1 and self.warmup != int(self.warmup):
            raise ValueError(
                f"warmup must be a share of the steps below 1, or a whole number of steps, got "
                f"{self.warmup}"
            )
        if self.warmup > self.steps:
            raise ValueError(
                f"warmup has {self.warmup:g} steps, more than the run's {self.steps}; give fewer, "
                "or a share of the steps like 0.1"
            )
        if self.decay_ratio is not None:
            check_non_negative(decay_ratio=self.decay_ratio)
        for name in ("floor", "momentum", "decay_ratio"):
            value = getattr(self, name)
            if value is not None and value > 1:
                raise ValueError(f"{name} must be at most 1, got {value}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema must be between 0 and 1, like 0.9999, got {self.ema}")


@dataclass
class EngineSettings:
    """How the run is executed, saved and logged.

    Args:
        precision: 32-true; bf16-mixed (autocast); or bf16-true (the backbone's weights are bfloat16
            too).
        strategy: with several processes, ddp, or fsdp to shard parameters, gradients and optimizer
            states (FSDP2).
        accumulate: micro-batches of a step.
        compile: compile each of the layers, or the whole model.
        recompute: what the backward pass recomputes to save memory: reads (each from its stored
            state); streams (reads and states, from a few stored states); inversion (states from the
            last one; `mgr` in float32 alone); or layers (whole layers). streams and inversion
            exclude compile.
        evals: number of evaluations, evenly spaced over the steps.
        save_every: steps between checkpoints; with 0 a run is saved only when it ends or is
            stopped.
        keep_checkpoints: number of checkpoints kept.
        keep_models: number of models kept of a run, evenly spaced over the steps, the last one
            included; for `crosslayer inspect`.
        unstable: what happens at a step whose loss or gradient is not finite, or whose loss rises
            by more than `max_loss_rise`: stop ends the run, skip leaves out the batch. The run ends
            too if most of its last 200 steps were left out.
        max_loss_rise: how far a step's loss may be above its running mean, in nats; 0 for no
            limit. The first 20 steps have none.
        log_every: steps between lines of metrics.jsonl.
        diagnostics_every: steps between diagnostics of the connections; 0 for none.
        loggers: loggers in addition to metrics.jsonl.
    """

    precision: Literal["32-true", "bf16-mixed", "bf16-true"] = "32-true"
    strategy: Literal["ddp", "fsdp"] = "ddp"
    accumulate: int = 1
    compile: Literal["none", "layers", "model"] = "none"
    recompute: Literal["none", "reads", "streams", "inversion", "layers"] = "none"
    evals: int = 6
    save_every: int = 0
    keep_checkpoints: int = 2
    keep_models: int = 0
    unstable: Literal["stop", "skip"] = "stop"
    max_loss_rise: float = 0.0
    log_every: int = 10
    diagnostics_every: int = 0
    loggers: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_positive(
            accumulate=self.accumulate,
            evals=self.evals,
            keep_checkpoints=self.keep_checkpoints,
            log_every=self.log_every,
        )
        check_non_negative(
            save_every=self.save_every,
            keep_models=self.keep_models,
            max_loss_rise=self.max_loss_rise,
            diagnostics_every=self.diagnostics_every,
        )
        if self.recompute in ("streams", "inversion") and self.compile != "none":
            raise ValueError(
                f"recompute={self.recompute!r} and compile={self.compile!r} exclude each other; "
                'with compile, use recompute="reads" or "layers"'
            )


SETTINGS_GROUPS: tuple[Any, ...] = (
    ModelSettings,
    DataSettings,
    OptimizationSettings,
    EngineSettings,
)
GROUP_OF_OPTION = {f.name: group for group in SETTINGS_GROUPS for f in fields(group)}
RATE_OPTIONS = ("lr", "muon_lr")  # what a search of the learning rate changes

# options of a recipe that the command line does not have
YAML_ONLY = frozenset(
    {"task_options", "betas", "eps", "momentum", "floor", "delay", "keep_checkpoints"}
    | {"max_loss_rise", "log_every", "ema", "router_z_loss", "valid_groups"}
)
# Options that may change when a run is resumed. They change its losses by rounding at most, with
# two exceptions. `max_loss_rise` and `unstable` decide whether a step ends the run or is skipped; a
# run's result names the steps that were skipped. With another `accumulate` the micro-batches are
# others, and so are dropout's random numbers and the balancing loss of experts.
CHANGEABLE_OPTIONS = {f.name for f in fields(EngineSettings)} - {"precision"} | {
    "workers",
    "valid_groups",
}
# Those of them that change the speed and the memory of a step.
EXECUTION_OPTIONS = ("strategy", "accumulate", "compile", "recompute")


class Settings(NamedTuple):
    """The four groups. `Settings.from_options(layers=2, lr=1e-3)` takes any of their options."""

    model: ModelSettings
    data: DataSettings
    optimization: OptimizationSettings
    engine: EngineSettings

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """Settings with these options, and defaults for all others.

        A pretrained model and a prepared corpus come with their tokenizer, unless another one is
        given. Where both are, the model's is taken.

        Raises:
            ValueError: an option is unknown, or has a value that it cannot have.
        """
        options = parse_options(options)
        if options.get("pretrained") is not None:
            if "lr" not in options:
                raise ValueError(
                    "lr is missing: a pretrained model has no default learning rate; try 1e-4 "
                    f"({OptimizationSettings.lr:g} is the default of new models)"
                )
            options.setdefault("tokenizer", options["pretrained"])
        elif "data" in options and "tokenizer" not in options:
            name = find_tokenizer_name(expand_place(options["data"]))
            if name is not None:
                options["tokenizer"] = name
        groups = []
        for group in SETTINGS_GROUPS:
            own = {name: v for name, v in options.items() if GROUP_OF_OPTION[name] is group}
            groups.append(group(**own))
        return cls(*groups)

    @property
    def pretrained_tokenizer(self) -> str | None:
        """Where the tokenizer of the pretrained model is, if the run uses that one."""
        pretrained = self.model.pretrained
        return pretrained if pretrained == self.data.tokenizer else None

    def micro_batch(self, ranks: int) -> int:
        """The sequences that a rank has in memory at once.

        Raises:
            ValueError: the ranks and micro-batches cannot share the batch equally.
        """
        batch, accumulate = self.data.batch, self.engine.accumulate
        if batch % (ranks * accumulate):
            raise ValueError(
                f"batch must be a multiple of ranks × accumulate, got {batch} for {ranks} × "
                f"{accumulate}"
            )
        return batch // (ranks * accumulate)

    def to_options(self) -> dict[str, Any]:
        """Every option by its name, as `from_options` takes them.

        Those of a new backbone are left out where it is a pretrained one.
        """
        options: dict[str, Any] = {}
        for group in self:
            options |= asdict(group)
        if self.model.pretrained is not None:
            options = {
                name: value for name, value in options.items() if name not in NEW_BACKBONE_OPTIONS
            }
        return options

    def fixed_options(self) -> dict[str, Any]:
        """The options that decide what is learned.

        A run with any other value of them is another run.
        """
        return {
            name: value
            for name, value in self.to_options().items()
            if name not in CHANGEABLE_OPTIONS
        }


DEFAULT_OPTIONS = {
    name: value for group in SETTINGS_GROUPS for name, value in vars(group()).items()
}


def parse_options(options: dict[str, Any]) -> dict[str, Any]:
    """`options` with values of their types: YAML reads 1e-3 as text, and JSON has no tuples.

    Raises:
        ValueError: an option is unknown, or its value is not of its type. One line.
    """
    for name, value in options.items():
        if name not in GROUP_OF_OPTION:
            raise ValueError(f"unknown option {name!r}{did_you_mean(name, GROUP_OF_OPTION)}")
        check_plain(name, value)
    types = _option_types()
    parsed: dict[str, Any] = {}
    for name, value in copy.deepcopy(options).items():  # the parser changes mappings in place
        if _may_be_converted(value, types[name]):
            try:
                parsed |= _option_parser().parse_object({name: value}, defaults=False).as_dict()
            except Exception:  # argparse's, in the words of its types
                raise ValueError(describe_wrong_value(name, value, types[name])) from None
        else:
            parsed[name] = value
        check_option_type(name, parsed[name], types[name])  # the parser lets None and NaN pass
    return parsed


def _may_be_converted(value: Any, annotation: Any) -> bool:
    """Whether the parser, which takes a millisecond, could return another value than this."""
    is_word = get_origin(annotation) is Literal
    return not (value is None or is_word or type(value) is annotation)


@cache
def _option_types() -> dict[str, Any]:
    types: dict[str, Any] = {}
    for group in SETTINGS_GROUPS:
        types |= get_type_hints(group)
    return types


@cache
def _option_parser() -> Any:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    for group in SETTINGS_GROUPS:
        parser.add_class_arguments(group, None)
    return parser
