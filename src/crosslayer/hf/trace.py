"""What a layer's forward does with its stream, whatever values it gets.

A shadow of the layer runs several times: with other parameters and lengths, in training, and with
other values of its arguments. It must do the same, or calls with such a value are refused.
"""

import inspect
import pickle
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn

from ..module_lists import has_children
from .arguments import argument_parameters, layer_arguments, other_arguments, second_streams
from .families import ReturnedArgument, UnreadValue
from .recorder import LayerTrace, record_run, same_sum
from .shadow import ShadowValues
from .shadow_runs import SeveralStreamsError

# What a layer does depends neither on the number and length of sequences nor on sizes or signs.
_OTHER_VALUES = (ShadowValues((2, 5), 1e3, 0.01), ShadowValues((3, 5), 1e3, -100.0))
_OF_ONE_TOKEN = ShadowValues((1, 1), 1.0, -100.0)


def trace_layer(
    layer: nn.Module, width: int, opened: Collection[str], attends_encoder: bool
) -> LayerTrace:
    """The trace of a layer's shadow, and the values of its arguments that change it.

    Args:
        layer: a layer of a host.
        width: of its stream.
        opened: paths of its modules that run their own code. A module that gets the stream in more
            than one argument is opened too, as it may add one to its output.
        attends_encoder: it gets an encoder's outputs in each call.

    Raises:
        ValueError: what a module gets is no sum of the stream and of modules' outputs, or it
            depends on the values of the layer's own parameters or buffers, or on training.
    """
    paths = set(opened)
    trace_once = partial(record_run, layer, width, paths, {})
    given = layer_arguments(layer)
    streams = second_streams(layer)
    if attends_encoder:
        given |= streams
        streams = {}
    while True:
        try:
            trace = trace_once(given)
            break
        except SeveralStreamsError as error:
            if error.path in paths or not has_children(layer.get_submodule(error.path)):
                raise
            paths.add(error.path)
    read_streams = _streams_that_change_nothing(trace_once, trace, given, streams)
    unread_streams: list[tuple[str, UnreadValue]] = [
        (name, "given") for name in streams if name not in read_streams
    ]
    if read_streams:
        given |= read_streams
        trace = trace_once(given)
    value_sets = [*_OTHER_VALUES]
    # `is_causal=length > 1` is another value where a token is decoded. One token of few channels
    # is too little to tell many outputs apart, so it is tried only where there is such a value.
    arguments = [value for call in trace.calls for value in call.arguments.values()]
    if any(isinstance(value, bool | int | float | str) for value in arguments):
        value_sets.append(_OF_ONE_TOKEN)
    for values in value_sets:
        _check_other_values(layer, trace, partial(trace_once, given, values=values))
    _check_training(layer, trace, partial(trace_once, given, training=True))
    unread_values = (*unread_streams, *_unread_values(layer, trace_once, trace, given))
    return trace._replace(unread_values=unread_values)


def _streams_that_change_nothing(
    trace_once: Callable[..., LayerTrace],
    trace: LayerTrace,
    given: dict[str, Any],
    streams: dict[str, Any],
) -> dict[str, Any]:
    """The second streams with which a layer calls the same as in its trace, which has none.

    given: the arguments of that trace.
    """
    alone = {
        name: stream
        for name, stream in streams.items()
        if _is_same_trace(trace_once, trace, given | {name: stream})
    }
    return alone if _is_same_trace(trace_once, trace, given | alone) else {}


def _is_same_trace(
    trace_once: Callable[..., LayerTrace], trace: LayerTrace, arguments: dict[str, Any]
) -> bool:
    """Whether the layer calls the same with other arguments, apart from these."""
    try:
        other = trace_once(arguments)
    except ValueError:
        return False
    return _same_calls(trace, other) and trace.extras == other.extras


def _unread_values(
    layer: nn.Module,
    trace_once: Callable[..., LayerTrace],
    trace: LayerTrace,
    given: dict[str, Any],
) -> Iterator[tuple[str, UnreadValue]]:
    """The values of arguments with which the layer does something else than in its trace.

    given: the arguments of that trace.
    """
    for name, value, arguments in other_arguments(layer, given):
        replaced = {repr(given[name]): repr(None)} if value is None else {}
        other = _same_run(layer, trace, partial(trace_once, arguments), replaced)
        if other is None or not _same_extras(trace, other, name, value):
            yield name, value


def _same_run(
    layer: nn.Module,
    trace: LayerTrace,
    run: Callable[[], LayerTrace],
    replaced: Mapping[str, str],
) -> LayerTrace | None:
    """What a run records if its modules get the same sums and arguments as in a trace; else None.

    replaced: as of `_same_arguments`.
    """
    try:
        other = run()
        is_same = _same_calls(trace, other) and _same_arguments(layer, trace, other, replaced)
    except ValueError:
        return None
    return other if is_same else None


def _same_extras(a: LayerTrace, b: LayerTrace, name: str, value: UnreadValue) -> bool:
    """Whether the same is returned besides the stream where an argument has a value in b."""
    if name == "output_attentions":  # a layer is read with all that it can return
        return True
    extras = a.extras
    if extras is not None and value is None:
        extras = tuple(
            None if isinstance(extra, ReturnedArgument) and extra.name == name else extra
            for extra in extras
        )
    return extras == b.extras


def _same_arguments(
    layer: nn.Module, a: LayerTrace, b: LayerTrace, replaced: Mapping[str, str]
) -> bool:
    """Whether the modules get the same arguments. replaced: what stands in b for values of a, as
    texts.
    """

    def describe(
        parameters: dict[str, inspect.Parameter], values: dict[str, Any], name: str
    ) -> str:
        left_out = parameters[name].default if name in parameters else None
        return repr(values.get(name, left_out))

    for x, y in zip(a.calls, b.calls, strict=True):
        names = x.arguments | y.arguments
        parameters = argument_parameters(layer.get_submodule(x.path)) if names else {}
        for name in names:
            expected = describe(parameters, x.arguments, name)
            if replaced.get(expected, expected) != describe(parameters, y.arguments, name):
                return False
    return True


def _check_other_values(layer: nn.Module, trace: LayerTrace, run: Callable[[], LayerTrace]) -> None:
    """Raise a ValueError where a layer's sums depend on its own parameters and buffers, or on the
    length of the sequence. run: with other ones.
    """
    if _same_run(layer, trace, run, {}) is None:
        raise ValueError(
            "what it does depends on its own parameters or buffers, or on the shape of its input; "
            "a parameter itself may multiply an output, of one number or of one a channel"
        )


def _check_training(layer: nn.Module, trace: LayerTrace, run: Callable[[], LayerTrace]) -> None:
    """Raise a ValueError where a layer's own code does something else in training. run: in it."""
    with _restored_random_states(layer) as has_changed:
        is_same = _same_run(layer, trace, run, {}) is not None and not has_changed()
    if not is_same:
        raise ValueError(
            "in training its own code does something else than in evaluation; connections keep "
            "what its modules and torch.nn.functional.dropout do"
        )


@contextmanager
def _restored_random_states(layer: nn.Module) -> Iterator[Callable[[], bool]]:
    """Restore the states of all random numbers. Yields what tells whether one has changed."""
    attributes = [value for module in layer.modules() for value in vars(module).values()]
    generators = [value for value in attributes if isinstance(value, torch.Generator)]
    generators.append(torch.default_generator)
    states = [generator.get_state() for generator in generators]
    of_python = random.getstate()
    of_numpy = numpy.random.get_state(legacy=False)

    def has_changed() -> bool:
        pairs = zip(generators, states, strict=True)
        is_same = all(torch.equal(generator.get_state(), state) for generator, state in pairs)
        if not is_same or random.getstate() != of_python:
            return True
        # Bytes, as dicts with an array cannot be compared.
        return pickle.dumps(numpy.random.get_state(legacy=False)) != pickle.dumps(of_numpy)

    try:
        yield has_changed
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)


def _same_calls(a: LayerTrace, b: LayerTrace) -> bool:
    """Whether the same modules get the same sums, and the same sum is returned."""
    return (
        len(a.calls) == len(b.calls)
        and same_sum(a.output, b.output)
        and all(
            (x.path, x.dropout, x.function) == (y.path, y.dropout, y.function)
            and same_sum(x.inputs, y.inputs)
            for x, y in zip(a.calls, b.calls, strict=True)
        )
    )
