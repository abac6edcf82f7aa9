"""The wiring of a layer, from what its own code does with its stream.

`trace.py` tells which sums the modules of a layer get. A layer can be connected if these sums are
those of a stream: each sub-layer gets the layer's input plus the outputs of all sub-layers before
it, through at most one norm, and the layer returns this sum. A post-norm layer norms the stream
after each sub-layer, and returns it normed. Everything else is refused with the reason.
"""

import inspect
from collections.abc import Iterator

from torch import nn

from ..partitioned import parameter_shape
from .argument_sources import NO_ENCODER, find_argument_sources, find_preset_arguments
from .arguments import argument_parameters, takes_from_rest
from .families import (
    ArgumentProduct,
    ExtraOutput,
    FunctionCall,
    LayerWiring,
    ModuleCall,
    OutputStep,
    Sublayer,
    paths_around,
)
from .function_calls import is_norm_function
from .host_norms import find_attribute
from .projections import describe_sublayer, has_matrix, is_named_norm, is_norm
from .recorder import STREAM_VECTOR, LayerTrace, StreamSum, TracedCall, same_sum
from .trace import trace_layer

_CROSS_ATTENTION = ("encoder_attn", "crossattention", "cross_attn", "encdecattention")


def recognise_layer(layer: nn.Module, width: int, attends_encoder: bool) -> LayerWiring:
    """The sub-layers of a layer.

    Where the layer cannot be read, it is read once more with the modules that contain norms of the
    stream opened.

    Args:
        layer: a layer of a host.
        width: of its stream.
        attends_encoder: the layer gets an encoder's outputs in each call.

    Raises:
        ValueError: the layer is no row of sub-layers on a stream. The message says why.
    """
    try:
        return _read_wiring(layer, width, set(), attends_encoder)
    except ValueError as error:
        opened = _modules_around_norms(layer, width)
        try:
            return _read_wiring(layer, width, opened, attends_encoder)
        except ValueError as inner_error:
            if isinstance(error, _NoSumError):  # An opened module may tell more.
                raise inner_error from None
            raise error from None


class _NoSumError(ValueError):
    """A layer returns the output of a module, which may add it to the stream itself."""


def _modules_around_norms(layer: nn.Module, width: int) -> set[str]:
    """The paths of a layer's modules that contain norms of the stream, as BERT's attention does."""
    paths: set[str] = set()
    for path, module in layer.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or not is_norm(path.split(".")[-1], module):
            continue
        if parameter_shape(weight) == (width,):
            paths |= paths_around(path)
    return paths


def _read_wiring(
    layer: nn.Module, width: int, opened: set[str], attends_encoder: bool
) -> LayerWiring:
    """`recognise_layer`, where the modules of some paths are opened."""
    if takes_from_rest(layer):
        raise ValueError(
            "its own code takes arguments out of its **kwargs; name them in its forward"
        )
    trace = trace_layer(layer, width, opened, attends_encoder)
    _check_all_called(layer, trace)
    is_post_norm = STREAM_VECTOR not in trace.output and len(trace.output) == 1
    if is_post_norm:
        wiring = _read_post_norm_wiring(layer, trace)
    else:
        trace, stream_factor = _without_stream_factor(trace)
        wiring = _read_pre_norm_wiring(layer, trace)._replace(stream_factor=stream_factor)
    _check_handed_outputs(wiring)
    return wiring


def _without_stream_factor(trace: LayerTrace) -> tuple[LayerTrace, str]:
    """The trace without a number that all of the returned sum is multiplied by, and the name of
    that parameter or buffer; empty where there is none.
    """
    if STREAM_VECTOR in trace.output:
        return trace, ""
    products = [trace.call_of(vector) for vector in trace.output]
    names = {product.path if product.is_one_number else "" for product in products}
    if len(names) != 1 or names == {""} or set(trace.output.values()) != {1.0}:
        return trace, ""
    output: StreamSum = {}
    for product in products:
        output |= product.inputs
    return trace._replace(output=output), names.pop()


def _check_handed_outputs(wiring: LayerWiring) -> None:
    """Raise a ValueError where a sub-layer gets an output of what is no sub-layer before it, or the
    layer returns one.
    """
    before: set[str] = set()
    for sublayer in wiring.sublayers:
        for name, source in sublayer.arguments or ():
            if isinstance(source, ExtraOutput) and source.module not in before:
                raise ValueError(
                    f"it gives {sublayer.module} an output of {source.module}, which is no "
                    f"sub-layer that runs before it, as its argument {name!r}"
                )
        before.add(sublayer.module)
    for extra in wiring.extras or ():
        if isinstance(extra, ExtraOutput) and extra.module not in before:
            raise ValueError(
                f"it returns an output of {extra.module}, which is no sub-layer, besides its stream"
            )


def _read_pre_norm_wiring(layer: nn.Module, trace: LayerTrace) -> LayerWiring:
    """The wiring of a layer that returns its input, or a norm of its input, plus outputs."""
    first = min(trace.output, default=STREAM_VECTOR)
    embedding_norm = _norm_of_input(layer, trace, first)
    if trace.output.get(first) != 1 or (first != STREAM_VECTOR and not embedding_norm):
        raise ValueError(
            f"it returns {_describe(trace, trace.output)}, and not its input plus outputs of "
            "modules"
        )
    sites: list[list[Sublayer]] = []
    stream: StreamSum = {first: 1.0}  # what the sub-layers of the next site read
    pending: StreamSum = {}
    used: set[int] = set()
    for vector in sorted(trace.output.keys() - {first}):
        chain = _chain_to_stream(layer, trace, vector, first)
        _check_used_once(layer, trace, chain, used)
        source = trace.call_of(chain[0]).inputs
        if pending and not same_sum(source, stream):
            stream = stream | pending
            pending = {}
        if not same_sum(source, stream):
            raise ValueError(
                f"{trace.call_of(chain[0]).title} gets {_describe(trace, source)}, and not the "
                f"stream, {_describe(trace, stream)}"
            )
        if not pending:
            sites.append([])
        pending[vector] = trace.output[vector]
        sites[-1].append(_sublayer(layer, trace, chain, pending[vector]))
    if not sites:
        raise ValueError("no module's output joins its stream")
    return LayerWiring(
        tuple(tuple(site) for site in sites),
        trace.extras,
        unread_values=trace.unread_values,
        embedding_norm=embedding_norm,
    )


def _norm_of_input(layer: nn.Module, trace: LayerTrace, vector: int) -> str:
    """The path of the norm whose output a vector is, if it norms the layer's input; else empty."""
    call = trace.call_of(vector) if vector != STREAM_VECTOR else None
    if call is None or call.arguments or not same_sum(call.inputs, {STREAM_VECTOR: 1.0}):
        return ""
    norm = find_attribute(layer, call.path) if call.path else None
    return call.path if isinstance(norm, nn.Module) and is_norm(call.path, norm) else ""


def _check_all_called(layer: nn.Module, trace: LayerTrace) -> None:
    """Raise a ValueError where a module of the layer has not run."""
    for name, child in _named_parts(layer):
        is_called = any(f"{call.path}.".startswith(f"{name}.") for call in trace.calls)
        if is_called or not any(True for _ in child.parameters()):
            continue
        names = f"{name} {' '.join(inner for inner, _ in child.named_children())}".lower()
        if any(part in names for part in _CROSS_ATTENTION):
            raise ValueError(NO_ENCODER)
        raise ValueError(f"its {name} does not run in the forward passes that connect tries")


def _named_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules within a layer that it calls itself, those in its lists among them."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from ((f"{name}.{inner}", part) for inner, part in _named_parts(child))
        else:
            yield name, child


def _read_post_norm_wiring(layer: nn.Module, trace: LayerTrace) -> LayerWiring:
    """The wiring of a layer that returns a normed sum: x ← Norm(x + outputs), site by site."""
    sites: list[tuple[Sublayer, ...]] = []
    norms: list[str] = []  # after each of these sites
    used: set[int] = set()
    ((vector, factor),) = trace.output.items()
    while vector != STREAM_VECTOR:  # from the last site to the first
        norm = trace.call_of(vector)
        stream = min(norm.inputs)
        ends_with_norm = norm.path and not has_matrix(find_attribute(layer, norm.path))
        is_sum = len(norm.inputs) > 1 and norm.inputs[stream] == 1
        if not (ends_with_norm and is_sum and factor == 1):
            raise _NoSumError(
                f"it returns the output of {norm.title}, and not its input plus outputs of modules"
            )
        site = []
        for output in sorted(norm.inputs.keys() - {stream}):
            chain = _chain_to_stream(layer, trace, output, stream)
            _check_used_once(layer, trace, chain, used)
            sublayer = _sublayer(layer, trace, chain, norm.inputs[output])
            if sublayer.norm is not None:
                raise ValueError(f"{sublayer.module} has a norm before it and one after its sum")
            site.append(sublayer)
        sites.insert(0, tuple(site))
        norms.insert(0, norm.path)
        vector = stream
    for number, norm_path in enumerate(norms[:-1]):
        sites[number + 1] = tuple(s._replace(norm=norm_path) for s in sites[number + 1])
    return LayerWiring(
        tuple(sites), trace.extras, unread_values=trace.unread_values, last_norm=norms[-1]
    )


def _chain_to_stream(layer: nn.Module, trace: LayerTrace, vector: int, stream: int) -> list[int]:
    """The vectors from the first module that reads the stream to the one that joins it."""
    chain = [vector]
    while stream not in trace.call_of(chain[0]).inputs:
        call = trace.call_of(chain[0])
        if len(call.inputs) != 1:
            is_dropout = call.dropout or isinstance(find_attribute(layer, call.path), nn.Dropout)
            remedy = (
                "; apply it to each of them"
                if is_dropout and call.inputs
                else ", and not the stream"
            )
            raise ValueError(f"{call.title} gets {_describe(trace, call.inputs)}{remedy}")
        chain.insert(0, next(iter(call.inputs)))
    return chain


def _check_used_once(layer: nn.Module, trace: LayerTrace, chain: list[int], used: set[int]) -> None:
    """Raise a ValueError where a sub-layer's output joins the stream a second time.

    Norms may be shared. used: the vectors of the chains before, to which those of this are added.
    """
    for vector in used.intersection(chain):
        path = trace.call_of(vector).path
        if path and has_matrix(find_attribute(layer, path)):
            raise ValueError(f"what {path} returns joins the stream in two ways")
    used.update(chain)


def _find_module_call(layer: nn.Module, calls: list[TracedCall]) -> int:
    """The number of the call that is the sub-layer's module: 1 after a norm, else 0."""
    is_heavy = [call.path != "" and has_matrix(find_attribute(layer, call.path)) for call in calls]
    if not any(is_heavy[:2]):
        names = ", ".join(call.title for call in calls)
        raise ValueError(f"{names} is no sub-layer with at most one norm before it")
    if not is_heavy[0]:
        return 1
    # A norm may have matrices, such as A.X K2's, which has a gate.
    path = calls[0].path
    is_norm_with_matrices = is_named_norm(path, layer.get_submodule(path))
    return 1 if is_norm_with_matrices and any(is_heavy[1:2]) else 0


def _sublayer(layer: nn.Module, trace: LayerTrace, chain: list[int], scale: float) -> Sublayer:
    """The sub-layer of a chain of calls. scale: the factor of what joins the stream."""
    calls = [trace.call_of(vector) for vector in chain]
    main = _find_module_call(layer, calls)
    norm = _norm_before(layer, calls[0], calls[1]) if main else None
    factors = [factor for call in calls[1:] for factor in call.inputs.values()]
    input_scale = factors.pop(0) if main else 1.0
    if main and calls[0].arguments:
        raise ValueError(f"{calls[0].path}, which norms the stream, gets more than one input")
    if any(factor != 1 for factor in factors):
        raise ValueError(f"what {calls[main].path} returns is scaled before it reaches the stream")
    after = tuple(_output_step(layer, call) for call in calls[main + 1 :])
    sources = find_argument_sources(layer, calls[main])
    return describe_sublayer(
        layer,
        Sublayer(
            calls[main].path,
            norm,
            after,
            scale=_exact_factor(layer, scale),
            input_scale=_exact_factor(layer, input_scale),
            arguments=sources,
            preset_arguments=find_preset_arguments(layer, calls[main], sources),
            by_position=calls[main].by_position,
            input_name=calls[main].input_name,
        ),
    )


def _output_step(layer: nn.Module, call: TracedCall) -> OutputStep:
    """A call between a sub-layer's module and the stream, as a step of its output."""
    if isinstance(call.function, ArgumentProduct):
        default = argument_parameters(layer)[call.function.argument].default
        if default is not None and default is not inspect.Parameter.empty:
            raise ValueError(
                f"the default of its argument {call.function.argument!r}, which multiplies an "
                "output, is not None"
            )
    if not call.arguments:
        return call.path or call.function or call.dropout
    sources = find_argument_sources(layer, call)
    for name, source in sources:
        if isinstance(source, ExtraOutput):
            raise ValueError(f"{call.path} gets an output of {source.module} as {name!r}")
    preset = find_preset_arguments(layer, call, sources)
    return ModuleCall(call.path, sources, preset, call.by_position, call.input_name)


def _norm_before(layer: nn.Module, call: TracedCall, next_call: TracedCall) -> str | FunctionCall:
    """The norm that a call is: the path of a module, or a function."""
    if isinstance(call.function, FunctionCall) and is_norm_function(call.function):
        return call.function
    if call.path and isinstance(find_attribute(layer, call.path), nn.Module):
        return call.path
    raise ValueError(f"{call.title} is no norm, and {next_call.title} reads it")


def _exact_factor(layer: nn.Module, factor: float) -> float:
    """The layer's own number that equals a measured factor; the factor where there is none."""
    for value in vars(layer).values():
        if isinstance(value, float | int) and abs(value - factor) <= 1e-6 * abs(factor):
            return float(value)
    return factor


def _describe(trace: LayerTrace, total: StreamSum) -> str:
    if not total:
        return "zeros"
    names = ["its input", *(call.title for call in trace.calls)]
    return " + ".join(
        names[vector] if factor == 1 else f"{factor:.4g} · {names[vector]}"
        for vector, factor in total.items()
    )
