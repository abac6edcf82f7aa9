"""The wiring of a host that no row describes: found by running its layers' own code.

`trace.py` tells which sums the modules of a layer get. A layer can be connected if these sums are
those of a stream: each sub-layer gets the layer's input plus the outputs of all sub-layers before
it, through at most one norm, and the layer returns this sum. A post-norm layer norms the stream
after each sub-layer, and returns it normed. Everything else is refused with the reason.
"""

import ast
import functools
import inspect
import textwrap
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..class_swap import original_class
from .families import (
    FUSED_PROJECTIONS,
    NO_RESIDUAL,
    REST,
    SAME_INPUT,
    Arguments,
    Fused,
    LayerWiring,
    ModelWiring,
    Sublayer,
)
from .shadow import Argument, argument_parameters, residual_argument
from .trace import STREAM, Call, Sum, Trace, same_sum, trace_layer

# Names that transformers gives to the projections of q, k and v, and to those of an MLP.
_QKV = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
)
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
_CROSS_ATTENTION = ("encoder_attn", "crossattention", "cross_attn", "encdecattention")
_MLP_NAMES = ("mlp", "ffn", "feed_forward", "moe", "experts", "channel")


def recognise_model(backbone: Any) -> tuple[Any, ModelWiring]:
    """The module that owns a model's layers, and its wiring.

    Args:
        backbone: a model, or a part of it, in which a module has a list of layers and their final
            norm.

    Raises:
        ValueError: there is no such list, or its layers have no stream. The message says why.
    """
    path = _find_layers(backbone)
    layers = backbone.get_submodule(path)
    final = _find_final_norm(backbone, path)
    owner_path = _find_owner(backbone, path, final)
    owner = backbone.get_submodule(owner_path)
    config = getattr(owner, "config", getattr(backbone, "config", None))
    weights = (
        [p for p in backbone.get_submodule(final).parameters() if p.dim() == 1] if final else []
    )
    dim = weights[0].shape[0] if weights else getattr(config, "hidden_size", None)
    if dim is None:
        raise ValueError("nothing tells the width of its stream, like a final norm with a weight")
    prefix = f"{owner_path}." if owner_path else ""
    wiring_of_kind: dict[Any, LayerWiring] = {}
    of_layers = []
    for number, layer in enumerate(layers):
        kind = layer_kind(layer)
        if kind not in wiring_of_kind:
            try:
                wiring_of_kind[kind] = recognise_layer(layer, dim)
            except ValueError as error:
                _check_list_of_layers(owner, path.removeprefix(prefix), config)
                raise ValueError(f"layer {number}, a {type(layer).__name__}: {error}") from None
        of_layers.append(wiring_of_kind[kind])
    last_norms = {bool(wiring.last_norm) for wiring in of_layers}
    if last_norms == {True}:
        final = f"{path}.{len(layers) - 1}.{of_layers[-1].last_norm}"
    elif True in last_norms:
        raise ValueError("some of its layers are pre-norm and others post-norm")
    elif not final:
        raise ValueError(f"{type(backbone).__name__} has no norm after its pre-norm layers")
    wiring = ModelWiring(
        path.removeprefix(prefix), final.removeprefix(prefix), dim, tuple(of_layers)
    )
    return owner, wiring


def _check_list_of_layers(owner: nn.Module, path: str, config: Any) -> None:
    """Raise a ValueError where the members of a list are no layers."""
    if getattr(config, "num_hidden_groups", None):
        raise ValueError("its layers share their weights, and connections need layers of their own")
    count = len(owner.get_submodule(path))  # type: ignore[arg-type]
    lists = [
        name
        for name, child in owner.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    if len(lists) > 1 and path in lists:
        raise ValueError(
            f"its sub-layers are in lists of their own, {', '.join(lists)}, not in layers"
        )


def layer_kind(layer: nn.Module) -> tuple[Any, ...]:
    """What tells layers apart: their classes, those of their modules, and their settings."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    settings = [
        (name, value)
        for name, value in vars(layer).items()
        if isinstance(value, bool | float | str) and name != "training"
    ]
    return (modules, *settings)


def _find_layers(backbone: nn.Module) -> str:
    """The path of the list of layers."""
    config: Any = getattr(backbone, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    count = getattr(config, "num_hidden_layers", None)
    found = []
    owners: list[tuple[str, nn.Module]] = [("", backbone)]
    while owners:
        prefix, owner = owners.pop(0)
        for name, child in owner.named_children():
            if not isinstance(child, nn.ModuleList):
                owners.append((f"{prefix}{name}.", child))
            elif len(child):
                found.append((prefix + name, child))
    for path, layers in found:
        if len(layers) == count:
            return path
    if not found:
        raise ValueError("it has no list of layers")
    return found[0][0]


def _find_final_norm(backbone: nn.Module, layers: str) -> str:
    """The path of the last norm beside the layers, or beside a module around them; or empty."""
    for path in paths_around(layers):
        prefix = f"{path}." if path else ""
        for name, child in reversed(list(backbone.get_submodule(path).named_children())):
            if _is_norm(name, child):
                return prefix + name
    return ""


def _find_owner(backbone: nn.Module, layers: str, final: str) -> str:
    """The path of the innermost module of transformers' with the layers and the final norm, which
    records hidden states; of the innermost module of all where there is none.
    """
    around_final = paths_around(final or layers)
    paths = [path for path in paths_around(layers) if path in around_final]
    for path in paths:
        if isinstance(backbone.get_submodule(path), PreTrainedModel):
            return path
    return paths[0]


def paths_around(path: str) -> list[str]:
    """The paths of the modules around a module, from the inside out."""
    names = path.split(".")[:-1]
    return [".".join(names[:count]) for count in range(len(names), -1, -1)]


def _is_norm(name: str, module: nn.Module) -> bool:
    is_named_norm = "norm" in f"{name} {type(module).__name__}".lower()
    return is_named_norm and not _has_matrix(module)


def recognise_layer(layer: nn.Module, width: int) -> LayerWiring:
    """The sub-layers of a layer.

    Args:
        layer: a layer of a host.
        width: of its stream.

    Raises:
        ValueError: the layer is no row of sub-layers on a stream. The message says why.
    """
    try:
        return _read_wiring(layer, width, set())
    except ValueError as error:
        opened = _modules_around_norms(layer, width)
        try:
            return _read_wiring(layer, width, opened)
        except ValueError as inner_error:
            raise inner_error if isinstance(error, _NoSumError) else error from None


class _NoSumError(ValueError):
    """A layer returns the output of a module, which may add it to the stream itself."""


def _modules_around_norms(layer: nn.Module, width: int) -> set[str]:
    """The paths of a layer's modules that contain norms of the stream, as BERT's attention does."""
    paths: set[str] = set()
    for path, module in layer.named_modules():
        weight = getattr(module, "weight", None)
        if _is_norm(path.split(".")[-1], module) and weight is not None and len(weight) == width:
            paths.update(paths_around(path))
    return paths - {""}


def _read_wiring(layer: nn.Module, width: int, opened: set[str]) -> LayerWiring:
    """`recognise_layer`, where the modules of some paths are opened."""
    trace = trace_layer(layer, width, opened)
    for name, child in layer.named_children():
        is_called = any(f"{call.path}.".startswith(f"{name}.") for call in trace.calls)
        if not is_called and any(True for _ in child.parameters()):
            if any(part in name.lower() for part in _CROSS_ATTENTION):
                raise ValueError(
                    "layers with cross-attention, as in a decoder that reads an encoder, cannot be connected"
                )
            raise ValueError(f"its {name} runs in some forward passes only")
    if STREAM not in trace.output and len(trace.output) == 1:
        return _read_post_norm_wiring(layer, trace, width)
    if trace.output.get(STREAM) != 1:
        raise ValueError(
            f"it returns {_describe(trace, trace.output)}, and not its input plus outputs of modules"
        )
    sites: list[list[Sublayer]] = []
    stream: Sum = {STREAM: 1.0}  # what the sub-layers of the next site read
    pending: Sum = {}
    for vector in sorted(trace.output.keys() - {STREAM}):
        chain = _chain_to_stream(trace, vector, STREAM)
        source = trace.calls[chain[0] - 1].inputs
        if pending and not same_sum(source, stream):
            stream = stream | pending
            pending = {}
        if not same_sum(source, stream):
            raise ValueError(
                f"{trace.calls[chain[0] - 1].path} gets {_describe(trace, source)}, and not the "
                f"stream, {_describe(trace, stream)}"
            )
        if not pending:
            sites.append([])
        pending[vector] = trace.output[vector]
        sites[-1].append(_sublayer(layer, trace, chain, pending[vector], width))
    if not sites:
        raise ValueError("no module's output joins its stream")
    return LayerWiring(tuple(tuple(site) for site in sites), trace.extras)


def _read_post_norm_wiring(layer: nn.Module, trace: Trace, width: int) -> LayerWiring:
    """The wiring of a layer that returns a normed sum: x ← Norm(x + outputs), site by site."""
    sites: list[tuple[Sublayer, ...]] = []
    norms: list[str] = []  # after each of these sites
    ((vector, factor),) = trace.output.items()
    while vector != STREAM:  # from the last site to the first
        norm = trace.calls[vector - 1]
        stream = min(norm.inputs)
        is_norm = norm.path and not _has_matrix(layer.get_submodule(norm.path))
        is_sum = len(norm.inputs) > 1 and norm.inputs[stream] == 1
        if not (is_norm and is_sum and factor == 1):
            raise _NoSumError(
                f"it returns the output of {norm.path or 'a dropout'}, and not its input plus outputs "
                "of modules"
            )
        site = []
        for output in sorted(norm.inputs.keys() - {stream}):
            chain = _chain_to_stream(trace, output, stream)
            sublayer = _sublayer(layer, trace, chain, norm.inputs[output], width)
            if sublayer.norm is not None:
                raise ValueError(f"{sublayer.module} has a norm before it and one after its sum")
            site.append(sublayer)
        sites.insert(0, tuple(site))
        norms.insert(0, norm.path)
        vector = stream
    for number, norm_path in enumerate(norms[:-1]):
        sites[number + 1] = tuple(s._replace(norm=norm_path) for s in sites[number + 1])
    return LayerWiring(tuple(sites), trace.extras, last_norm=norms[-1])


def _chain_to_stream(trace: Trace, vector: int, stream: int) -> list[int]:
    """The vectors from the first module that reads the stream to the one that joins it."""
    chain = [vector]
    while stream not in trace.calls[chain[0] - 1].inputs:
        call = trace.calls[chain[0] - 1]
        if len(call.inputs) != 1:
            raise ValueError(
                f"{call.path} gets {_describe(trace, call.inputs)}, and not the stream"
            )
        chain.insert(0, next(iter(call.inputs)))
    return chain


def _sublayer(
    layer: nn.Module, trace: Trace, chain: list[int], scale: float, width: int
) -> Sublayer:
    calls = [trace.calls[vector - 1] for vector in chain]
    heavy = [call.path != "" and _has_matrix(layer.get_submodule(call.path)) for call in calls]
    if True not in heavy or heavy.index(True) > 1:
        names = ", ".join(call.path for call in calls)
        raise ValueError(f"{names} is no sub-layer with at most one norm before it")
    main = heavy.index(True)
    norm = calls[0].path if main else None
    factors = [factor for call in calls[1:] for factor in call.inputs.values()]
    input_scale = factors.pop(0) if main else 1.0
    if any(factor != 1 for factor in factors) or not all(
        not call.arguments for i, call in enumerate(calls) if i != main
    ):
        raise ValueError(
            f"what {calls[main].path} returns is scaled, or passes modules with more than one input"
        )
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
    port = "mlp" if is_mlp else "attn" if qkv else "mixer"
    children = dict(module.named_modules())
    up = next((names for names in _UP if all(name in children for name in names)), ())
    normed = any(
        isinstance(step, str) and list(layer.get_submodule(step).parameters())
        for step in sublayer.after
    )
    output = next((name for name in _OUTPUT if _has_attribute(module, name)), "")
    if any(
        isinstance(step, str) and _has_matrix(layer.get_submodule(step)) for step in sublayer.after
    ):
        output = ""  # It is one of these steps.
    return sublayer._replace(
        port=port,
        qkv=qkv if port == "attn" else (),
        fused=fused if port == "attn" else None,
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
    for names in _QKV:
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


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters())


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
    if residual := residual_argument(layer.get_submodule(call.path)):
        sources.append((residual, NO_RESIDUAL))
    for name, value in call.arguments.items():
        if isinstance(value, Argument) and (value.name in own or value.name in (REST, SAME_INPUT)):
            sources.append((name, value.name))
        elif name in own:
            sources.append((name, name))
        elif name not in theirs or value is not theirs[name].default:
            raise ValueError(f"it gives {call.path} an argument of its own, {name}={value!r}")
    return tuple(sources)


def _describe(trace: Trace, total: Sum) -> str:
    names = ["its input", *(call.path or "a dropout" for call in trace.calls)]
    return " + ".join(
        names[vector] if factor == 1 else f"{factor:.4g} · {names[vector]}"
        for vector, factor in total.items()
    )
