"""One run of a layer's shadow: which module gets which sum of the outputs before it.

The shadow's modules return random vectors. The input of every module, and the layer's output, is
then decomposed over these vectors. This tells sums and their factors, whatever the code looks like.
"""

import inspect
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..class_swap import original_class
from .arguments import (
    COMPUTES_WITH_ARGUMENTS,
    LayerArgument,
    argument_parameters,
    is_constant,
    name_arguments,
    residual_argument,
)
from .families import (
    SAME_INPUT,
    ArgumentProduct,
    FunctionCall,
    LayerExtra,
    ReturnedArgument,
    UnreadValue,
)
from .function_calls import Observer
from .shadow import FIRST_VALUES, MOST_OUTPUTS, OtherOutput, ShadowValues
from .shadow_runs import SeveralStreamsError, run_layer_shadow

STREAM_VECTOR = 0
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

    def call_of(self, vector: int) -> TracedCall:
        """The call that returned or made a vector, which is not that of the layer's input."""
        return self.calls[vector - 1]


class _Recorder(Observer):
    """Answers every call with a random vector."""

    def __init__(self, width: int, values: ShadowValues):
        self.generator = torch.Generator().manual_seed(0)
        self.width = width
        self.shape = values.shape
        self.size = values.stream_size
        self.calls: list[TracedCall] = []
        # Flat. Zeros stand for an output times a single number.
        self.vectors: list[numpy.ndarray] = []
        self.single_products: dict[tuple[int, str], int] = {}  # vector and parameter -> vector
        self.stream = self._next_vector()

    def answer(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Tensor:
        arguments = name_arguments(module, args, kwargs)
        if not arguments:
            raise ValueError(f"it calls {path} without an input")
        first, *others = arguments
        x = arguments.pop(first)
        inputs = self.decompose(x, path)
        if x.shape != (*self.shape, self.width):
            _check_takes_any_shape(path, module, x)
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
        output = self._next_vector().view(x.shape)
        return output if residual is None else output + residual

    def drop_out(self, x: Tensor, p: float) -> Tensor:
        self.calls.append(TracedCall("", self.decompose(x, "a dropout"), {}, p))
        return self._next_vector().view(x.shape)

    def call_function(self, x: Tensor, call: FunctionCall) -> Tensor:
        if x.requires_grad or x.shape != (*self.shape, self.width):
            return call(x)  # of a parameter
        inputs = self.decompose(x, repr(call))
        self.calls.append(TracedCall("", inputs, {}, function=call))
        return self._next_vector().view(x.shape)

    def multiply(self, x: Tensor, product: ArgumentProduct) -> Tensor:
        if x.shape != (*self.shape, self.width):
            raise ValueError(COMPUTES_WITH_ARGUMENTS)
        inputs = self.decompose(x, repr(product))
        self.calls.append(TracedCall("", inputs, {}, function=product))
        return self._next_vector().view(x.shape)

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
                raise ValueError(
                    f"{where} gets what the layer computes with its own parameters, and not a sum "
                    "of the stream and of modules' outputs"
                )
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

        The product is parallel to the vector, so zeros take its place in the basis.
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


def _check_takes_any_shape(path: str, module: nn.Module, x: Tensor) -> None:
    """Raise a ValueError where a module may use the axes before the last: it will have the stream's
    shape.
    """
    cls = original_class(module)
    is_matrix = isinstance(module, nn.Linear | Conv1D) or "Linear" in cls.__name__  # quantised
    is_norm = isinstance(module, nn.LayerNorm | nn.RMSNorm)
    is_function = isinstance(module, nn.Dropout) or "activation" in cls.__module__
    is_adapter = hasattr(module, "base_layer")  # PEFT's, of a matrix
    if not (is_matrix or is_norm or is_function or is_adapter):
        raise ValueError(
            f"it gives {path} its input in another shape, {list(x.shape)}; reshape it in that "
            "module"
        )


def record_run(
    layer: nn.Module,
    width: int,
    opened: Collection[str],
    lengths: dict[str, int],
    arguments: dict[str, Any],
    values: ShadowValues = FIRST_VALUES,
    training: bool = False,
) -> LayerTrace:
    """Run a layer's shadow once, and decompose what its modules get and what it returns.

    Args:
        layer, arguments, lengths, opened, values, training: as in `run_layer_shadow`. `lengths` is
            shared by all runs of the layer.
        width: of its stream.

    Raises:
        ValueError: something is no sum of the stream and of modules' outputs.
    """
    recorder, output = run_layer_shadow(
        layer,
        lambda: _Recorder(width, values),
        arguments,
        lengths,
        opened,
        values,
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
        output = other.output._replace(and_later=other.output.position == MOST_OUTPUTS - 1)
        following = extras[-1] if extras else None
        if following == output._replace(position=output.position + 1, and_later=True):
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
