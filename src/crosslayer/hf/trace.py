"""What a layer's forward does with its stream: which module gets which sum of earlier outputs.

A shadow of the layer runs with random vectors as the outputs of its modules. The input of every
module, and the layer's output, is then decomposed over these vectors. This tells sums and their
factors, whatever the code looks like.
"""

import inspect
import pickle
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from .arguments import (
    COMPUTES_WITH_ARGUMENTS,
    LayerArgument,
    argument_parameters,
    is_constant,
    layer_arguments,
    name_arguments,
    other_arguments,
    residual_argument,
    second_streams,
)
from .families import (
    SAME_INPUT,
    ArgumentProduct,
    FunctionCall,
    LayerExtra,
    ReturnedArgument,
    UnreadValue,
)
from .shadow import (
    FIRST_TRIAL,
    MOST_OUTPUTS,
    OtherOutput,
    SeveralStreamsError,
    Trial,
    run_layer_shadow,
)

STREAM_VECTOR = 0
# What a layer does depends neither on lengths nor on sizes or signs. OPT flattens its sequences, so
# there is one.
_OTHER_TRIALS = (Trial((1, 5), 1e3, 0.01), Trial((1, 5), 1e3, -100.0))
_OF_ONE_TOKEN = Trial((1, 1), 1.0, -100.0)
_TOLERANCE = 1e-6
# Vector -> its factor. Vector 0 is the layer's input, vector i + 1 what call i returned or made.
StreamSum = dict[int, float]


def same_sum(a: StreamSum, b: StreamSum) -> bool:
    """Whether two sums are equal, up to the rounding of their factors."""
    return a.keys() == b.keys() and all(abs(a[key] - b[key]) < 10 * _TOLERANCE for key in a)


class TracedCall(NamedTuple):
    """A call of a module or a function, or a product with a parameter of the layer's."""

    path: str  # of the module or the parameter in the layer; empty for a function
    inputs: StreamSum  # what its first argument is
    arguments: dict[str, Any]  # the others, by name
    dropout: float = 0.0  # probability, where the function is dropout
    function: FunctionCall | ArgumentProduct | None = None  # where it is another one
    by_position: tuple[str, ...] = ()  # those of the others that are passed by position
    input_name: str = ""  # of its first argument, where it is passed by name
    is_one_number: bool = False  # with a parameter or buffer of one number

    @property
    def title(self) -> str:
        """What messages call it."""
        if self.path:
            return self.path
        return "a dropout" if self.function is None else repr(self.function)


class LayerTrace(NamedTuple):
    """The calls of a layer's forward, in order, and the sum that it returns."""

    calls: list[TracedCall]
    output: StreamSum
    extras: tuple[LayerExtra, ...] | None  # as in `LayerWiring`
    unread_values: tuple[tuple[str, UnreadValue], ...] = ()  # as in `LayerWiring`


class _Recorder:
    """Answers every call with a random vector."""

    parameters: dict[str, Tensor | None]

    def __init__(self, width: int, trial: Trial):
        self.generator = torch.Generator().manual_seed(0)
        self.width = width
        self.shape = trial.shape
        self.size = trial.stream_size
        self.calls: list[TracedCall] = []
        # Flat. Zeros stand for an output times a single number.
        self.vectors: list[numpy.ndarray] = []
        self.single_products: dict[tuple[int, str], int] = {}  # vector and parameter -> vector
        self.stream = self._next_vector()

    def answer(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Tensor:
        arguments = name_arguments(module, args, kwargs)
        first, *others = arguments
        inputs = self.decompose(arguments.pop(first), path)
        by_name = {*kwargs, residual_argument(module)}
        by_position = tuple(takewhile(lambda name: name not in by_name, others))
        residual = arguments.pop(residual_argument(module), None)
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                if value.numel() != self.vectors[0].size:
                    raise ValueError(
                        f"it gives {path} a tensor that it makes itself, {name!r}; if it is a "
                        "mask, make it in that module"
                    )
                if not same_sum(self.decompose(value, path), inputs):
                    raise SeveralStreamsError(path, name)
                arguments[name] = LayerArgument(SAME_INPUT)
        input_name = first if first in kwargs else ""
        self.calls.append(
            TracedCall(path, inputs, arguments, by_position=by_position, input_name=input_name)
        )
        output = self._next_vector()
        return output if residual is None else output + residual

    def drop_out(self, x: Tensor, p: float) -> Tensor:
        self.calls.append(TracedCall("", self.decompose(x, "a dropout"), {}, p))
        return self._next_vector()

    def call_function(self, x: Tensor, call: FunctionCall) -> Tensor:
        if x.requires_grad or x.shape != (*self.shape, self.width):
            return call(x)  # of a parameter
        inputs = self.decompose(x, repr(call))
        self.calls.append(TracedCall("", inputs, {}, function=call))
        return self._next_vector()

    def multiply(self, x: Tensor, product: ArgumentProduct) -> Tensor:
        if x.shape != (*self.shape, self.width):
            raise ValueError(COMPUTES_WITH_ARGUMENTS)
        inputs = self.decompose(x, repr(product))
        self.calls.append(TracedCall("", inputs, {}, function=product))
        return self._next_vector()

    def decompose(self, x: Any, where: str) -> StreamSum:
        """The factors of the vectors so far in a tensor."""
        if not isinstance(x, Tensor):
            stand_in = isinstance(x, LayerArgument | OtherOutput)
            got = repr(x) if stand_in else f"a {type(x).__name__}"
            raise ValueError(f"{where} gets {got}, and not the stream")
        is_scaled = x.requires_grad
        scaled = self._scaled_outputs() if is_scaled else []
        basis = numpy.stack([*self.vectors, *(product for _, product in scaled)], axis=1)
        # numpy, because each call of torch goes through the modes that watch the forward.
        values = x.detach().double().flatten().numpy()
        if len(values) != len(basis):
            raise ValueError(f"{where} gets a tensor whose shape is not the stream's")
        no_sum = f"{where} gets no sum of the stream and of modules' outputs"
        if not numpy.isfinite(values).all():
            raise ValueError(no_sum)
        factors = numpy.linalg.lstsq(basis, values, rcond=None)[0]
        if abs(basis @ factors - values).max() > _TOLERANCE * abs(values).max():
            if is_scaled:
                raise ValueError(f"the layer scales what {where} gets by its own parameters")
            raise ValueError(no_sum)
        found = {}
        known = len(self.vectors)
        for number, factor in enumerate(factors.tolist()):
            if abs(factor) <= _TOLERANCE:
                continue
            vector = number
            if number >= known:
                vector = self._add_product(*scaled[number - known])
            elif is_scaled and (name := self._single_number(factor)):
                vector = self._single_product(number, name)
                factor = 1.0
            found[vector] = 1.0 if abs(factor - 1) < _TOLERANCE else factor
        return found

    def _add_product(self, call: TracedCall, product: numpy.ndarray) -> int:
        self.calls.append(call)
        self.vectors.append(product)
        return len(self.calls)

    def _single_number(self, factor: float) -> str:
        """The layer's own parameter or buffer of one number that equals a factor; empty if there is
        none.
        """
        for name, parameter in self.parameters.items():
            if (
                parameter is not None
                and parameter.numel() == 1
                and abs(parameter.item() - factor) < _TOLERANCE
            ):
                return name
        return ""

    def _single_product(self, number: int, name: str) -> int:
        """The vector that stands for a vector times a parameter of one number.

        As a direction it is no new one.
        """
        if (number, name) not in self.single_products:
            call = TracedCall(name, {number: 1.0}, {}, is_one_number=True)
            zeros = numpy.zeros_like(self.vectors[0])
            self.single_products[number, name] = self._add_product(call, zeros)
        return self.single_products[number, name]

    def _scaled_outputs(self) -> list[tuple[TracedCall, numpy.ndarray]]:
        """Each output times each of the layer's own parameters, such as a learned scale, but those
        that were found before.
        """
        scaled = []
        for name, parameter in self.parameters.items():
            if parameter is None or parameter.shape[-1:] != (self.width,):
                continue
            if parameter.numel() != self.width or self.width == 1:
                continue
            # One row for each token.
            scales = numpy.tile(parameter.detach().flatten().numpy(), self.shape[0] * self.shape[1])
            for vector in range(1, len(self.vectors)):
                call = TracedCall(name, {vector: 1.0}, {})
                if call not in self.calls:
                    scaled.append((call, self.vectors[vector] * scales))
        return scaled

    def _next_vector(self) -> Tensor:
        shape = (*self.shape, self.width)
        vector = self.size * torch.randn(shape, generator=self.generator, dtype=torch.float64)
        self.vectors.append(vector.flatten().numpy().copy())  # A forward may change it in place.
        return vector


def trace_layer(
    layer: nn.Module, width: int, opened: Collection[str] = (), attends_encoder: bool = False
) -> LayerTrace:
    """Run a shadow of a layer.

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
    trace_once = partial(_trace_once, layer, width, paths, {})
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
            if error.path in paths or not any(
                True for _ in layer.get_submodule(error.path).children()
            ):
                raise
            paths.add(error.path)
    read_streams = _streams_that_change_nothing(layer, trace_once, trace, given, streams)
    unread_streams: list[tuple[str, UnreadValue]] = [
        (name, "given") for name in streams if name not in read_streams
    ]
    if read_streams:
        given |= read_streams
        trace = trace_once(given)
    trials = [*_OTHER_TRIALS]
    # `is_causal=length > 1` is another value where a token is decoded. One token of few channels
    # is too little to tell many outputs apart, so it is tried only where there is such a value.
    arguments = [value for call in trace.calls for value in call.arguments.values()]
    if any(isinstance(value, bool | int | float | str) for value in arguments):
        trials.append(_OF_ONE_TOKEN)
    for trial in trials:
        _check_other_values(layer, partial(trace_once, given), trace, trial)
    _check_training(layer, partial(trace_once, given), trace)
    unread_values = (*unread_streams, *_unread_values(layer, trace_once, trace, given))
    return trace._replace(unread_values=unread_values)


def _streams_that_change_nothing(
    layer: nn.Module,
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
        if _is_same_trace(layer, trace_once, trace, given | {name: stream})
    }
    return alone if _is_same_trace(layer, trace_once, trace, given | alone) else {}


def _is_same_trace(
    layer: nn.Module,
    trace_once: Callable[..., LayerTrace],
    trace: LayerTrace,
    arguments: dict[str, Any],
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
        replaced = {f"the argument {name!r}": repr(None)} if value is None else {}
        try:
            other = trace_once(arguments)
            is_same = (
                _same_calls(trace, other)
                and _same_arguments(layer, trace, other, replaced)
                and _same_extras(trace, other, name, value)
            )
        except ValueError:
            is_same = False
        if not is_same:
            yield name, value


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
    layer: nn.Module, a: LayerTrace, b: LayerTrace, given: Mapping[str, str]
) -> bool:
    """Whether the modules get the same arguments. given: what stands for values of a, as texts."""

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
            if given.get(expected, expected) != describe(parameters, y.arguments, name):
                return False
    return True


def _check_other_values(
    layer: nn.Module, trace_once: Callable[..., LayerTrace], trace: LayerTrace, trial: Trial
) -> None:
    """Raise a ValueError where a layer's sums depend on its own parameters and buffers, or on the
    length of the sequence.
    """
    try:
        other = trace_once(trial=trial)
        is_same = _same_calls(trace, other) and _same_arguments(layer, trace, other, {})
    except ValueError:
        is_same = False
    if not is_same:
        raise ValueError(
            "what it does depends on its own parameters or buffers, or on the length of its input; "
            "a parameter itself may multiply an output, of one number or of one a channel"
        )


def _check_training(
    layer: nn.Module, trace_once: Callable[..., LayerTrace], trace: LayerTrace
) -> None:
    """Raise a ValueError where a layer's own code does something else in training."""
    with _restored_random_states(layer) as has_changed:
        try:
            in_training = trace_once(training=True)
            is_same = (
                not has_changed()
                and _same_calls(trace, in_training)
                and _same_arguments(layer, trace, in_training, {})
            )
        except ValueError:
            is_same = False
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


def constant_arguments(module: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call that the layer's own code makes, like `need_weights=False`, where the
    module has another default or none.
    """
    of_module = argument_parameters(module)
    return {
        name: value
        for name, value in arguments.items()
        if not isinstance(value, LayerArgument | Tensor)
        and (name not in of_module or value is not of_module[name].default)
    }


def _trace_once(
    layer: nn.Module,
    width: int,
    opened: Collection[str],
    lengths: dict[str, int],
    arguments: dict[str, Any],
    trial: Trial = FIRST_TRIAL,
    training: bool = False,
) -> LayerTrace:
    """`trace_layer` with one set of values for the layer's arguments, parameters and buffers.

    lengths: as in `run_layer_shadow`, of all traces of the layer.
    """
    recorder, output = run_layer_shadow(
        layer,
        lambda: _Recorder(width, trial),
        arguments,
        lengths,
        opened,
        trial,
        training,
    )
    extras: tuple[LayerExtra, ...] | None = None
    if isinstance(output, tuple | list):
        output, *others = output
        extras = _join_last_outputs(layer, others)
    total = recorder.decompose(output, "what follows the layer")
    return LayerTrace(recorder.calls, total, extras)


def _join_last_outputs(layer: nn.Module, others: Sequence[Any]) -> tuple[LayerExtra, ...]:
    """What a layer returns besides its stream, with the last outputs of a module as one entry."""
    extras: list[LayerExtra] = []
    for other in reversed(others):
        if other is None:
            extras.append(None)
            continue
        if isinstance(other, LayerArgument):
            extras.append(_returned_argument(layer, other.name))
            continue
        if not isinstance(other, OtherOutput):
            raise ValueError(
                "it returns more than its stream, outputs of its modules and arguments"
            )
        output = other.output._replace(and_later=other.output.place == MOST_OUTPUTS - 1)
        following = extras[-1] if extras else None
        if following == output._replace(place=output.place + 1, and_later=True):
            extras.pop()
            output = output._replace(and_later=True)
        extras.append(output)
    return tuple(reversed(extras))


def _returned_argument(layer: nn.Module, name: str) -> ReturnedArgument:
    default = argument_parameters(layer)[name].default
    if default is inspect.Parameter.empty:
        default = None  # each call gives it
    if not is_constant(default):
        raise ValueError(f"it returns its argument {name!r}, whose default is {default!r}")
    return ReturnedArgument(name, default)
