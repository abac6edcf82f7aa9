"""The wiring of a host that no row describes: found by running its layers' own code.

`trace.py` tells which sums the modules of a layer get. A layer can be connected if these sums are
those of a stream: each sub-layer gets the layer's input plus the outputs of all sub-layers before
it, through at most one norm, and the layer returns this sum. Everything else is refused with the
reason.
"""

import ast
import functools
import inspect
import textwrap
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..class_swap import original_class
from .families import (
    FUSED_PROJECTIONS,
    REST,
    Arguments,
    Fused,
    LayerWiring,
    ModelWiring,
    Sublayer,
)
from .host_norms import find_module
from .shadow import Argument, argument_parameters
from .trace import STREAM, Call, Sum, Trace, same_sum, trace_layer

# Names that transformers gives to the projections of q, k and v, and to those of an MLP.
_QKV = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
)
# Of q and the latent of k and v (MLA).
_LATENT = (("q_a_proj", "kv_a_proj_with_mqa"), ("q_proj", "kv_a_proj_with_mqa"))
_UP = (
    ("gate_proj", "up_proj"),
    ("gate_up_proj",),
    ("up_proj",),
    ("c_fc",),
    ("fc1",),
    ("fc_in",),
    ("dense_h_to_4h",),
)
_OUTPUT = (
    "o_proj", "down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "dense", "out_proj",
    "experts.down_proj",
)  # fmt: skip
_SIZE_ATTRIBUTES = ("shape", "size", "dim", "ndim", "dtype", "device")
_MLP_NAMES = ("mlp", "ffn", "feed_forward", "moe", "experts", "channel")


def recognise_model(backbone: Any) -> tuple[Any, ModelWiring]:
    """The module that owns a model's layers, and its wiring.

    Args:
        backbone: a model, or a part of it, in which a module has a list of layers and their final
            norm.

    Raises:
        ValueError: there is no such list, or its layers have no stream. The message says why.
    """
    owner, name = _find_layers(backbone)
    layers = owner.get_submodule(name)
    final = _find_final_norm(owner, name)
    config = getattr(owner, "config", getattr(backbone, "config", None))
    dim = _stream_width(owner, layers, final, config)
    wiring_of_kind: dict[Any, LayerWiring] = {}
    of_layers = []
    for number, layer in enumerate(layers):
        kind = layer_kind(layer)
        if kind not in wiring_of_kind:
            try:
                wiring_of_kind[kind] = recognise_layer(layer, dim)
            except ValueError as error:
                name = type(layer).__name__
                if name.endswith("Stage"):
                    raise ValueError(
                        f"its layers are in stages ({name}), between which the stream changes its "
                        "width or length"
                    ) from None
                raise ValueError(f"layer {number} is a {name}, and {error}") from None
        of_layers.append(wiring_of_kind[kind])
    return owner, ModelWiring(name, final, dim, tuple(of_layers))


def layer_kind(layer: nn.Module) -> tuple[Any, ...]:
    """What tells layers apart: their classes, those of their modules, and their settings."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    settings = [
        (name, value)
        for name, value in vars(layer).items()
        if isinstance(value, bool | float | str) and name != "training"
    ]
    return (modules, *settings)


def _find_layers(backbone: nn.Module) -> tuple[nn.Module, str]:
    """The module that owns the layers, and the name of their list in it."""
    config: Any = getattr(backbone, "config", None)
    searched = backbone
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
        searched = _find_language_model(backbone, config)
    found = _find_lists(searched)
    if not found:
        raise ValueError("it has no list of layers")
    count = getattr(config, "num_hidden_layers", None)
    for owner, name in found:
        if len(owner.get_submodule(name)) == count:
            return owner, name
    return found[0]


def _find_lists(backbone: nn.Module) -> list[tuple[nn.Module, str]]:
    """The lists of modules in a backbone, each by the module that owns it and its name there.

    A module that has no norm beside its list and is no model of transformers, such as the encoder
    of a vision tower, leaves the list to the model around it, which reports hidden states.
    """
    found: list[tuple[nn.Module, str]] = []
    owners = [(backbone, backbone, "")]  # a module, the model around it, the module's path in it
    while owners:
        owner, model, prefix = owners.pop(0)
        for name, child in owner.named_children():
            if isinstance(child, PreTrainedModel):
                owners.append((child, child, ""))
            elif not isinstance(child, nn.ModuleList):
                owners.append((child, model, f"{prefix}{name}."))
            elif len(child) and (_norm_names(owner) or not isinstance(model, PreTrainedModel)):
                found.append((owner, name))
            elif len(child):
                found.append((model, prefix + name))
    return found


def _find_language_model(model: nn.Module, text_config: Any) -> nn.Module:
    """The outermost part of a model that has the config of its text; the model, if it has none."""
    for module in model.modules():
        if type(getattr(module, "config", None)) is type(text_config):
            return module
    return model


def _find_final_norm(owner: nn.Module, layers: str) -> str | None:
    """The last norm beside the list of layers."""
    parent, _, _ = layers.rpartition(".")
    names = _norm_names(owner.get_submodule(parent))
    return f"{parent}.{names[-1]}".lstrip(".") if names else None


def _norm_names(owner: nn.Module) -> list[str]:
    """The children of a module that are norms."""
    return [
        name
        for name, child in owner.named_children()
        if "norm" in f"{name} {type(child).__name__}".lower() and not _has_matrix(child)
    ]


def _stream_width(owner: nn.Module, layers: Any, final: str | None, config: Any) -> int:
    """The width of the stream, from a norm of it or from the config."""
    norms = [layers[0].get_submodule(name) for name in _norm_names(layers[0])]
    if final is not None:
        norms.insert(0, owner.get_submodule(final))
    weights = [p for norm in norms for p in norm.parameters() if p.dim() == 1]
    width = weights[0].shape[0] if weights else getattr(config, "hidden_size", None)
    if not isinstance(width, int):
        raise ValueError(
            f"{type(owner).__name__} has no stream of one width: no norm in its layers or beside "
            "them, and no hidden_size"
        )
    return width


def recognise_layer(layer: nn.Module, width: int) -> LayerWiring:
    """The sub-layers of a layer.

    Args:
        layer: a layer of a host.
        width: of its stream.

    Raises:
        ValueError: the layer is no row of sub-layers on a stream. The message says why.
    """
    trace = trace_layer(layer, width)
    for name, child in layer.named_children():
        is_called = any(f"{call.path}.".startswith(f"{name}.") for call in trace.calls)
        if not is_called and any(True for _ in child.parameters()):
            raise ValueError(f"its {name} is not part of every forward, as with cross-attention")
    if trace.output.get(STREAM) != 1:
        raise ValueError(f"it returns {_describe(trace, trace.output)}, not its input plus outputs")
    sites: list[list[Sublayer]] = []
    stream: Sum = {STREAM: 1.0}  # what the sub-layers of the next site read
    pending: Sum = {}
    for vector in sorted(trace.output.keys() - {STREAM}):
        chain = _chain_to_stream(trace, vector)
        source = trace.calls[chain[0] - 1].inputs
        if pending and not same_sum(source, stream):
            stream = stream | pending
            pending = {}
        if not same_sum(source, stream):
            raise ValueError(
                f"{trace.calls[chain[0] - 1].path} gets {_describe(trace, source)}, "
                f"where the stream is {_describe(trace, stream)}"
            )
        if not pending:
            sites.append([])
        pending[vector] = trace.output[vector]
        sites[-1].append(_sublayer(layer, trace, chain, pending[vector], width))
    if not sites:
        raise ValueError("no module's output joins its stream")
    return LayerWiring(tuple(tuple(site) for site in sites), trace.extras)


def _chain_to_stream(trace: Trace, vector: int) -> list[int]:
    """The vectors from the first module that reads the stream to the one that joins it."""
    chain = [vector]
    while STREAM not in trace.calls[chain[0] - 1].inputs:
        call = trace.calls[chain[0] - 1]
        if len(call.inputs) != 1:
            raise ValueError(f"{call.path} gets {_describe(trace, call.inputs)}, no stream")
        chain.insert(0, next(iter(call.inputs)))
    return chain


def _sublayer(
    layer: nn.Module, trace: Trace, chain: list[int], scale: float, width: int
) -> Sublayer:
    calls = [trace.calls[vector - 1] for vector in chain]
    heavy = [call.path != "" and _has_matrix(find_module(layer, call.path)) for call in calls]
    if True not in heavy or heavy.index(True) > 1:
        names = ", ".join(call.path for call in calls)
        raise ValueError(f"of {names}, none is a sub-layer with at most one norm before it")
    main = heavy.index(True)
    norm = calls[0].path if main else None
    factors = [factor for call in calls[1:] for factor in call.inputs.values()]
    input_scale = factors.pop(0) if main else 1.0
    if any(factor != 1 for factor in factors) or not all(
        not call.arguments for i, call in enumerate(calls) if i != main
    ):
        raise ValueError(f"what {calls[main].path} returns passes more than modules of one input")
    after = tuple(call.path or call.dropout for call in calls[main + 1 :])
    return describe_sublayer(
        layer,
        Sublayer(
            calls[main].path,
            norm,
            after,
            scale=_exact(layer, scale),
            input_scale=_exact(layer, input_scale),
            arguments=_sources(layer, calls[main]),
        ),
        width,
    )


def describe_sublayer(layer: nn.Module, sublayer: Sublayer, width: int) -> Sublayer:
    """Add what a module's names tell: its kind and its projections."""
    module = layer.get_submodule(sublayer.module)
    is_mlp = any(part in sublayer.module for part in _MLP_NAMES) or not sublayer.arguments
    qkv, fused = find_projections(module)
    port = "mlp" if is_mlp else "mixer"
    if qkv and not is_mlp:
        port = "latent_attn" if qkv[:2] in _LATENT else "attn"
    children = dict(module.named_modules())
    up = next((names for names in _UP if all(name in children for name in names)), ())
    normed = any(
        isinstance(step, str) and _has_parameters(find_module(layer, step))
        for step in sublayer.after
    )
    output = next((name for name in _OUTPUT if _has_attribute(module, name)), "")
    return sublayer._replace(
        port=port,
        qkv=() if is_mlp else qkv,
        fused=None if is_mlp else fused,
        up_projections=up if is_mlp else (),
        output_projection="" if normed and not is_mlp else output,
    )


def find_projections(attention: nn.Module) -> tuple[tuple[str, ...], Fused | None]:
    """The projections of an attention's input: of q, k and v, and then others, such as gates.

    Returns:
        Their names, and the order of the outputs where one of them is all three. No names where the
        attention does more with its input than to project it.
    """
    called = _calls_of_input(original_class(attention))
    if called is not None:  # Some exist in cross-attention alone.
        called = {name for name in called if name in attention._modules}
    fused_name, order = FUSED_PROJECTIONS.get(original_class(attention).__name__, ("", None))
    if order is not None and called == {fused_name}:
        return (fused_name,), order(attention.config)
    for names in _QKV + _LATENT:
        if called is not None and called.issuperset(names):
            return (*names, *sorted(called.difference(names))), None
    return (), None


@functools.cache
def _calls_of_input(cls: type) -> set[str] | None:
    """The modules that a module's forward calls with its input alone, from its source.

    None where the forward does anything else with its input but look at its size, or has no
    source.
    """
    forward: Any = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return None
    name = list(inspect.signature(forward).parameters)[1]
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    called = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name) or node.id != name:
            continue
        parent = parents[node]
        if isinstance(parent, ast.Attribute) and parent.attr in _SIZE_ATTRIBUTES:
            continue
        match parent:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr=module), args=[_], keywords=[]
            ):
                called.add(module)
            case _:
                return None
    return called


def _has_attribute(module: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(module, name):
            return False
        module = getattr(module, name)
    return True


def _has_matrix(module: nn.Module | Tensor) -> bool:
    return isinstance(module, nn.Module) and any(p.dim() > 1 for p in module.parameters())


def _has_parameters(module: nn.Module | Tensor) -> bool:
    return isinstance(module, Tensor) or any(True for _ in module.parameters())


def _exact(layer: nn.Module, factor: float) -> float:
    """The number in the layer that a measured factor is."""
    for value in vars(layer).values():
        if isinstance(value, float | int) and abs(value - factor) <= 1e-6 * abs(factor):
            return float(value)
    return factor


def _sources(layer: nn.Module, call: Call) -> Arguments:
    """From which of the layer's arguments those of a call come."""
    own = argument_parameters(layer)
    theirs = argument_parameters(layer.get_submodule(call.path))
    sources = []
    for name, value in call.arguments.items():
        is_required = name in theirs and theirs[name].default is inspect.Parameter.empty
        if value is None and is_required and name.startswith("encoder_"):
            raise ValueError(f"{call.path} attends to an encoder, through its argument {name!r}")
        if isinstance(value, Argument) and (value.name in own or value.name == REST):
            sources.append((name, value.name))
        elif name in own:
            sources.append((name, name))
        elif name not in theirs or value is not theirs[name].default:
            raise ValueError(f"{call.path} gets {name}={value!r}, which the layer chooses")
    return tuple(sources)


def _describe(trace: Trace, total: Sum) -> str:
    names = ["its input", *(call.path or "a dropout" for call in trace.calls)]
    return " + ".join(
        names[vector] if factor == 1 else f"{factor:.4g} · {names[vector]}"
        for vector, factor in total.items()
    )
