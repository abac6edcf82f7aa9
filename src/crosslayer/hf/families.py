"""The wiring of a host as data: how its layers' modules are joined to the residual stream.

`recognition.py` finds the wiring of a model by running its layers' code. A family whose layers it
cannot read has a row: the key is the config's `model_type`, or the name of the class where the
model has no such config. Add one of your own from anywhere: `FAMILIES["mine"] = Family(...)`.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..module_lists import list_layers


class FusedQKV(NamedTuple):
    """How the outputs of one projection are divided between q, k and v.

    The outputs are `groups` groups in a row, each with sizes[0] outputs of q, then sizes[1] of k,
    then sizes[2] of v.
    """

    groups: int
    sizes: tuple[int, int, int]


# Modules that add the stream to their output themselves: their class, and the argument by which
# they get the stream.
RESIDUAL_ARGUMENTS = {"BloomAttention": "residual"}
# Values in `Sublayer.arguments` that are no arguments of the layer: a zero in place of the stream
# that the sub-layer would add, and the sub-layer's input a second time.
NO_RESIDUAL = "0"
SAME_INPUT = "x"
REST_OF_ARGUMENTS = "**"  # stands for the arguments that a layer has no name for and passes on


class ExtraOutput(NamedTuple):
    """What a sub-layer returns besides its tensor: the layer returns it, or hands it on."""

    module: str  # the sub-layer's
    position: int  # in what it returns
    and_later: bool = False  # those after it too, however many there are


# Pairs: the name of a sub-layer's argument, and that of the layer's argument which it gets, or an
# output of an earlier sub-layer.
ArgumentSources = tuple[tuple[str, str | ExtraOutput], ...]


class FunctionCall(NamedTuple):
    """A function that a layer's own code calls, like an activation, or a norm without weights."""

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...] = ()  # after the tensor
    keywords: tuple[tuple[str, Any], ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x, *self.arguments, **dict(self.keywords))

    def __repr__(self) -> str:
        return self.function.__name__


class ArgumentProduct(NamedTuple):
    """A product with an argument of the layer, like Gemma 4's per-layer inputs."""

    argument: str

    def __repr__(self) -> str:
        return f"a product with {self.argument}"


class ModuleCall(NamedTuple):
    """A module that a layer calls with more than its input, and how. Fields as in `Sublayer`."""

    module: str
    arguments: ArgumentSources
    preset_arguments: tuple[tuple[str, Any], ...]
    by_position: tuple[str, ...]
    input_name: str

    def __repr__(self) -> str:
        return f"{self.module}(…)"


# What a sub-layer's output passes before it is added to the stream: a module by its name or with
# its arguments, a factor by the name of the layer's parameter, dropout by its probability, a
# function, or a product with an argument.
OutputStep = str | float | ModuleCall | FunctionCall | ArgumentProduct


class Sublayer(NamedTuple):
    """An attention, an MLP or another mixer: names of modules within its layer.

    Those of a parallel block share a site.
    """

    module: str
    norm: str | FunctionCall | None  # before it; None where the family norms outputs only
    after: tuple[OutputStep, ...] = ()  # what its output passes before it is added to the stream
    up_projections: tuple[str, ...] = ()  # within an MLP: the projections to its hidden width
    # Within the sub-layer: the projection to the stream's width, a module or its weight. Attentions
    # whose output is normed before the stream name none.
    output_projection: str = ""
    scale: float = 1.0  # of its output on the way to the stream
    input_scale: float = 1.0  # of its normed input
    # "attn"; "latent_attn": k and v are of one latent; "mixer": one input for all of it; "mlp".
    port: str = ""
    # Of an attention: its projections of q, k and v, or of q and the latent. Further projections of
    # its input, such as gates, may follow. Those of `nn.MultiheadAttention`, which takes three
    # inputs, are not named.
    qkv: tuple[str, ...] = ()
    fused: FusedQKV | None = None  # the order of their outputs, where one projection is all three
    arguments: ArgumentSources | None = None  # None: all of the layer's
    # What the layer's code sets of the module's arguments, and the layer's defaults of those above,
    # where the module's own differ.
    preset_arguments: tuple[tuple[str, Any], ...] = ()
    by_position: tuple[str, ...] = ()  # those that the layer passes by position, after its input
    input_name: str = ""  # by which the layer passes its input; empty where it does so by position

    @property
    def paths_after(self) -> list[str]:
        """The modules and parameters that its output passes."""
        steps = [step.module if isinstance(step, ModuleCall) else step for step in self.after]
        return [step for step in steps if isinstance(step, str)]


# Of an argument. True or False: as `if` takes it, so None is False. "false": False, but not None.
# None: None, or left out. "given": anything but None.
UnreadValue = bool | Literal["false", "given"] | None


class ReturnedArgument(NamedTuple):
    """An argument that a layer returns unchanged besides the stream."""

    name: str
    default: Any  # where a call leaves it out


# What a layer returns in one place besides the stream.
LayerExtra = ExtraOutput | ReturnedArgument | None


class LayerWiring(NamedTuple):
    """The sub-layers of a layer in order. Those of one site read the same stream, in parallel."""

    sites: tuple[tuple[Sublayer, ...], ...]
    # What the layer returns besides the stream, each one output or all outputs of a sub-layer from
    # an index on, one of the layer's arguments, or None where the layer returns a None. `extras` is
    # None where it returns no tuple.
    extras: tuple[LayerExtra, ...] | None = None
    condition: "Condition | None" = None  # where it is conditioned on more than its input
    # Values of the layer's arguments with which its code does something else, so that a call with
    # one of them is refused.
    unread_values: tuple[tuple[str, UnreadValue], ...] = ()
    # The norm of what a post-norm layer returns. The next layer's first sub-layers read through it.
    last_norm: str = ""
    # The first layer's norm of the embedding, which its stream begins with, as RWKV has it.
    embedding_norm: str = ""
    # A parameter or buffer of one number by which the layer multiplies the stream that it returns,
    # as Gemma 4 has it.
    stream_factor: str = ""

    @property
    def modules(self) -> list[str]:
        """The paths of all modules that are named."""
        paths = [norm for norm in (self.last_norm, self.embedding_norm) if norm]
        for sublayer in self.sublayers:
            steps = (sublayer.module, sublayer.norm, *sublayer.paths_after)
            paths += [step for step in steps if isinstance(step, str)]
        return paths

    @property
    def input_norms(self) -> list[str]:
        """The paths of the norms before sub-layers that are modules, each once."""
        norms = {sublayer.norm for sublayer in self.sublayers}
        return sorted(norm for norm in norms if isinstance(norm, str))

    @property
    def opened_modules(self) -> set[str]:
        """The paths of modules whose modules a connected layer calls, so not they themselves."""
        return {outer for path in self.modules for outer in paths_around(path)}

    @property
    def sublayers(self) -> list[Sublayer]:
        return [sublayer for site in self.sites for sublayer in site]


class ModelWiring(NamedTuple):
    """Where a backbone keeps its parts, and the wiring of each of its layers."""

    layers: str  # the list of layers
    # The final norm, which becomes the readout. None where the module that owns the layers has
    # none: the last layer then returns the hidden state, and its caller may apply a norm.
    final: str | None
    dim: int  # width of the stream
    of_layers: tuple[LayerWiring, ...]

    @property
    def sublayers(self) -> list[Sublayer]:
        return [sublayer for layer in self.of_layers for sublayer in layer.sublayers]

    def wired_layers(self, backbone: nn.Module) -> list[tuple[Any, LayerWiring]]:
        """The layers with their wirings, in the order of depth."""
        return list(zip(self.find_layers(backbone), self.of_layers, strict=True))

    def find_layers(self, backbone: nn.Module) -> list[Any]:
        """The layers in the order of depth. An `nn.Sequential` may end with the final norm."""
        return list_layers(backbone.get_submodule(self.layers))[: len(self.of_layers)]

    def layer_paths(self, backbone: nn.Module) -> list[str]:
        """Their paths in the backbone. Those of an `nn.Sequential` may have names."""
        names = [name for name, _ in backbone.get_submodule(self.layers).named_children()]
        return [f"{self.layers}.{name}" for name in names[: len(self.of_layers)]]

    @property
    def norms_inputs(self) -> bool:
        """Whether a norm comes before every sub-layer."""
        return self.is_post_norm or all(s.norm is not None for s in self.sublayers)

    @property
    def is_post_norm(self) -> bool:
        """Whether the stream is normed after every sub-layer. The last layer reads out."""
        return bool(self.of_layers[-1].last_norm)


def paths_around(path: str) -> set[str]:
    """The paths of the modules around a module, without the outermost, whose path is empty."""
    names = path.split(".")
    return {".".join(names[:count]) for count in range(1, len(names))}


def own_connection(wiring: LayerWiring) -> str:
    """The connection that computes what a host's own layers do."""
    return "postnorm" if wiring.last_norm else "prenorm"


class Modulation(NamedTuple):
    """What conditioning does to a sub-layer: gate · F(x · (1 + scale) + shift). Each is [B 1 D]."""

    shift: Tensor
    scale: Tensor
    gate: Tensor


# Given the layer, the backbone's dtype and the layer's arguments: the arguments that remain for the
# attention, and the modulations of the attention and of the MLP.
Condition = Callable[
    [nn.Module, torch.dtype, dict[str, Any]], tuple[dict[str, Any], list[Modulation]]
]


class Family(NamedTuple):
    """Where a family's backbone keeps its parts."""

    attn: Sublayer
    mlp: Sublayer
    qkv: tuple[str, str, str]  # projections within the attention
    layers: str = "layers"  # within the backbone: the list of layers ...
    final: str | None = "norm"  # ... and the final norm, if there is one beside it
    width: str = "config.hidden_size"  # of the stream, from the backbone
    condition: Condition | None = None  # where layers are conditioned on more than their input

    def wire(self, backbone: Any) -> ModelWiring:
        """The wiring of a backbone of this family, whose layers are all of one kind."""
        attn = self.attn._replace(port="attn", qkv=self.qkv)
        mlp = self.mlp._replace(port="mlp", arguments=())
        layer = LayerWiring(((attn,), (mlp,)), condition=self.condition)
        of_layers = (layer,) * len(list_layers(backbone.get_submodule(self.layers)))
        return ModelWiring(self.layers, self.final, attrgetter(self.width)(backbone), of_layers)


def qkv_per_head(config: Any) -> FusedQKV:
    """Outputs in the order (head, q | k | v, channel)."""
    size = config.hidden_size // config.num_attention_heads
    return FusedQKV(config.num_attention_heads, (size, size, size))


def _qkv_concatenated(config: Any) -> FusedQKV:
    """Outputs in the order (q | k | v, head, channel)."""
    head_dim = getattr(config, "head_dim", None)
    if not head_dim:
        head_dim = config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    kv_size = kv_heads * head_dim
    return FusedQKV(1, (config.num_attention_heads * head_dim, kv_size, kv_size))


def _litgpt_qkv(attention: Any) -> FusedQKV:
    config = attention.config
    kv_size = config.n_query_groups * config.head_size
    return FusedQKV(1, (config.n_head * config.head_size, kv_size, kv_size))


def _torchtitan_qkv(projections: Any) -> FusedQKV:
    """Outputs in the order (head of k and v, its heads of q | k | v, channel)."""
    size = projections.head_dim
    heads = projections.wqkv.out_features // (projections.r_dim * size)
    return FusedQKV(heads, (projections.heads_per_kv * size, size, size))


# Projections to q, k and v together, by the class of the module that has them, and their name in
# it: the order of the outputs, given that module.
FUSED_PROJECTIONS: dict[str, Callable[[Any], FusedQKV]] = {
    "GPT2Attention.c_attn": lambda attention: FusedQKV(1, (attention.embed_dim,) * 3),
    "Phi3Attention.qkv_proj": lambda attention: _qkv_concatenated(attention.config),
    "GPTNeoXAttention.query_key_value": lambda attention: qkv_per_head(attention.config),
    "Attention.qkv": lambda attention: FusedQKV(1, (attention.attn_dim,) * 3),  # timm
    "CausalSelfAttention.c_attn": lambda attention: FusedQKV(1, (attention.n_embd,) * 3),  # nanoGPT
    "CausalSelfAttention.qkv": _litgpt_qkv,
    "FusedQKVLinear.wqkv": _torchtitan_qkv,
}
OWN_PROJECTIONS = frozenset(FUSED_PROJECTIONS)  # crosslayer's own rows; users may add others


def _adaln_zero(
    layer: Any, dtype: torch.dtype, arguments: dict[str, Any]
) -> tuple[dict[str, Any], list[Modulation]]:
    """adaLN-Zero (DiT, arXiv 2212.09748): three vectors a sub-layer from timestep and class."""
    emb = layer.norm1.emb(arguments["timestep"], arguments["class_labels"], hidden_dtype=dtype)
    vectors = layer.norm1.linear(layer.norm1.silu(emb))[:, None].chunk(6, -1)
    attention_arguments = dict(arguments["cross_attention_kwargs"] or {})
    attention_arguments.setdefault("attention_mask", arguments["attention_mask"])
    return attention_arguments, [Modulation(*vectors[:3]), Modulation(*vectors[3:])]


FAMILIES: dict[str, Family] = {
    "DiTTransformer2DModel": Family(
        Sublayer("attn1", "norm1.norm", output_projection="to_out.0"),
        Sublayer("ff", "norm3", output_projection="net.2"),
        ("to_q", "to_k", "to_v"),
        layers="transformer_blocks",
        final="norm_out",
        width="inner_dim",
        condition=_adaln_zero,
    ),
}
