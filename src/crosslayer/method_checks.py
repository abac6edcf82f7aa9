"""What a connection's class must keep to, checked where a mistake would show later or not at all.

The laws (crosslayer.testing.laws) cover more. These checks cost next to nothing, so they run for
every method, and their messages name it.
"""

import reprlib
import warnings
from types import NoneType
from typing import Any, ForwardRef, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .validation import HALF_DTYPES, check_option_type, dtype_name, format_shape

_CONSTANTS = (
    "Make a constant tensor in mix_inputs, or let it be a parameter with requires_grad_(False)"
)
# Class attributes of 0.1.0, which would be ignored.
_FORMER_ATTRIBUTES = {
    "gate_fields": "gate_field, one name",
    "starts_as_prenorm": "initial_function",
    "bitwise_prenorm": "initial_function",
    "prenorm_up_to_scale": "initial_function",
}
# Of attributes that every connection has, and a method may set.
_ATTRIBUTE_TYPES: dict[str, Any] = {
    "ports": tuple,
    "fractions": int,
    "weighs_channels": bool,
    "options": dict,
    "output_scale": int | float,
    "stream_dtype": torch.dtype | NoneType,
}


def method_name(connection: Any) -> str:
    """What messages call a connection's method."""
    name: str = connection.name or type(connection).__name__
    return name


def check_class_attributes(cls: Any) -> None:
    """Check a class's attributes.

    Raises:
        TypeError: one has a former name, or `weight_decay_params` or `test_variants` have something
            else than strings.
    """
    for former, name in _FORMER_ATTRIBUTES.items():
        if former in vars(cls):
            raise TypeError(f"{cls.__name__}: {former} is called {name} now")
    for attribute, kind in (("weight_decay_params", frozenset), ("test_variants", tuple)):
        value = getattr(cls, attribute)
        if not isinstance(value, kind) or not all(isinstance(item, str) for item in value):
            raise TypeError(
                f"{cls.__name__}: {attribute} must be a {kind.__name__} of strings, got {value!r}"
            )


def check_state_class(cls: Any) -> None:
    """Check and keep the state that a class names, as in `class Hyper(Connection[Streams])`.

    A subclass may name none. It has the state of its base class, unless it defines `initial_state`:
    then its state is not known.
    """
    if "initial_state" in vars(cls):
        cls.state_class = None
    for base in vars(cls).get("__orig_bases__", ()):
        for state in get_args(base):
            # an abstract class, whose methods name the state, or a name in quotes
            if not isinstance(state, TypeVar | ForwardRef):
                _check_state_fields(cls, state)
                cls.state_class = state


def check_embedding(connection: Any, x: Any) -> None:
    """Check what `init` is given.

    Raises:
        TypeError: it is no tensor of floating-point numbers.
        ValueError: its width is another one.
    """
    expected = f"init takes the embedding, [B T {connection.dim}] of floating-point numbers"
    if not isinstance(x, Tensor):
        raise TypeError(f"{expected}, got a {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{expected}, got {dtype_name(x.dtype)}; embed token ids first")
    if x.dim() == 0 or x.shape[-1] != connection.dim:
        raise ValueError(f"{expected}, got {format_shape(x.shape)}")


def check_given_state(connection: Any, state: Any) -> None:
    """Check what `read` and `write` are given.

    Raises:
        TypeError: it is no state, or that of another method.
    """
    known = connection.state_class
    if not hasattr(state, "_fields") or (known is not None and not isinstance(state, known)):
        kind = "" if known is None else f", a {known.__name__}"
        raise TypeError(
            f"{method_name(connection)} takes a state{kind}, got a {type(state).__name__}; start "
            "with sites[0].init(embedding), and pass each read and write what the one before it "
            "returned"
        )


def warn_without_write(connection: Any, state: Any) -> None:
    """Warn where the readout gets a state that no sub-layer has written to since its last read.

    A loop that ignores what `write` returns ends so.
    """
    if getattr(state, "y", None) is None:
        warnings.warn(
            f"{method_name(connection)}: the last sub-layer's output is not in the state that the "
            "readout got; write returns a new state: `state = connection.write(state, y)`",
            stacklevel=3,
        )


def check_state(connection: Any, state: Any) -> None:
    """Check what `initial_state` has returned.

    Raises:
        TypeError: it is no NamedTuple with a write, does not begin with a tensor, or has a
            parameter.
    """
    _check_state_fields(type(connection), type(state))
    first = next(iter(tree_leaves(state)), None)
    if not isinstance(first, Tensor):
        raise TypeError(
            f"{type(connection).__name__}: its state {type(state).__name__} must begin with a "
            f"tensor, got {type(first).__name__}"
        )
    _check_fields(connection, state)


def _check_state_fields(cls: Any, state: Any) -> None:
    fields = getattr(state, "_fields", ())
    if "y" not in fields:
        raise TypeError(
            f"{cls.__name__}: its state {getattr(state, '__name__', state)} must be a NamedTuple "
            "with a field `y: Tensor | None = None`, where `write` records the sub-layer's output"
        )
    if cls.gate_field and cls.gate_field not in fields:
        raise TypeError(
            f"{cls.__name__}: gate_field is {cls.gate_field!r}, but the fields of its "
            f"state {state.__name__} are {', '.join(fields)}"
        )


def check_mixed(connection: Any, state: Any, mixed: Any) -> None:
    """Check what `mix_inputs` has returned for a state.

    Raises:
        TypeError: it is no pair of a tuple of tensors and a state without a write; or a field of
            the state is a parameter.
        ValueError: an input has another shape than the stream, or others have cast the streams of
            the state.
    """
    name = type(connection).__name__
    _check_stream_dtype(connection, state)
    is_pair = type(mixed) is tuple and len(mixed) == 2 and type(mixed[0]) is tuple
    if not is_pair or not all(isinstance(x, Tensor) for x in mixed[0]):
        raise TypeError(
            f"{name}.mix_inputs must return a tuple of inputs and the state to write to, like "
            f"`return (h,), state`, got {_describe(mixed)}"
        )
    inputs, next_state = mixed
    for x in inputs:
        expected = stream_shape(connection, state, x.dim())
        if x.shape != expected:
            raise ValueError(
                f"{name}.mix_inputs must return inputs of the stream's shape, "
                f"{format_shape(expected)}, got {format_shape(x.shape)}"
            )
    _check_state_fields(type(connection), type(next_state))
    if next_state.y is not None:
        raise TypeError(
            f"{name}.mix_inputs must return a state without a write, so that the next one can be "
            "written to it, and its y is still there"
        )
    _check_fields(connection, next_state)


def stream_shape(connection: Any, state: Any, dims: int) -> torch.Size:
    """The shape of the stream, as the state has it. dims: the number of its dimensions.

    A state begins with a tensor of every token, which may have an axis of n streams after those of
    the tokens.
    """
    return torch.Size((*first_tensor(state).shape[: dims - 1], connection.dim))


def first_tensor(state: Any) -> Tensor:
    """The first of `tree_leaves`, which takes far longer where a state has many tensors."""
    for field in state:
        while isinstance(field, tuple) and field:
            field = field[0]
        if isinstance(field, Tensor):
            return field
    raise AssertionError("a state begins with a tensor")


def _check_stream_dtype(connection: Any, state: Any) -> None:
    """Raise a ValueError where streams of float32 have become half precision between two sites."""
    if connection.stream_dtype != torch.float32:
        return
    for x in tree_leaves(state):
        if x is not None and x.dtype in HALF_DTYPES:
            raise ValueError(
                f"{type(connection).__name__} has stream_dtype='float32', and its state has come "
                f"in {dtype_name(x.dtype)}: FSDP2's MixedPrecisionPolicy casts it "
                "unless cast_forward_inputs=False"
            )


def _check_fields(connection: Any, state: Any) -> None:
    """Raise a TypeError where a field of a state is one of the connection's parameters, a view of
    one, or neither a tensor, a tuple nor None.

    The embedding may be a parameter too. A law finds parameters within tuples.
    """
    for field, value in zip(state._fields, state, strict=True):
        if not isinstance(value, Tensor | tuple | NoneType):
            raise TypeError(
                f"{type(connection).__name__}: the field {field!r} of its state is a "
                f"{type(value).__name__}; a state contains tensors, tuples of them, and None"
            )
        viewed = value._base if isinstance(value, Tensor) and value._is_view() else value
        if type(viewed) is nn.Parameter and any(
            viewed is own for own in connection._parameters.values()
        ):
            found = "a parameter" if viewed is value else "a view of a parameter"
            raise TypeError(
                f"{type(connection).__name__}: the field {field!r} of its state is {found}, "
                "which FSDP frees once its block has run; put a clone into the state"
            )


def _describe(value: Any) -> str:
    """The types of a value: of a tuple, those of its items."""
    if type(value) is tuple:
        return f"({', '.join(map(_describe, value))})"
    return "None" if value is None else type(value).__name__


def check_contents(connection: Any, base: type, site: Any, dim: int) -> None:
    """Check a connection that has been built.

    Args:
        connection: of any class.
        base: `Connection`.
        site: that it was built for.
        dim: that it was built for.

    Raises:
        TypeError: it has what loading, sharding, optimizers or the interface would misread.
        ValueError: its `initial_function` is unknown.
    """
    name = type(connection).__name__
    if "_modules" not in vars(connection) or "norms" not in connection._modules:
        raise TypeError(f"{name}.__init__ must call super().__init__(site, dim, norm)")
    parameters = {key: p for key, p in connection._parameters.items() if p is not None}
    _check_attributes(connection, base)
    for key, value in (("site", site), ("dim", dim), ("is_readout", site.is_readout)):
        if getattr(connection, key) is not value:
            raise TypeError(_taken_name(name, key))
    annotation = base.__annotations__["initial_function"]
    check_option_type(f"{name}.initial_function", connection.initial_function, annotation)
    if len(connection.norms) != len(connection.ports):
        raise TypeError(
            f"{name} has {len(connection.norms)} norms, and its ports are "
            f"{', '.join(connection.ports)}; leave norms as super().__init__ makes them"
        )
    _check_tensors(connection)
    for key, parameter in parameters.items():
        if parameter.dim() == 0:
            raise TypeError(
                f"{name}: the parameter {key!r} has no dimension, which FSDP cannot shard; use "
                "float32_parameter(1)"
            )
    of_base: Any = base
    if parameters and type(connection).reset_parameters is of_base.reset_parameters:
        raise TypeError(
            f"{name} has the parameter {min(parameters)!r} and no method reset_parameters, which "
            "sets the initial values"
        )


def _check_attributes(connection: Any, base: type) -> None:
    """Raise a TypeError for an attribute that hides a method of every connection, or that has
    another type than every connection's.

    torch refuses a parameter of such a name.
    """
    name = type(connection).__name__
    for key in vars(connection):
        if callable(getattr(base, key, None)):
            raise TypeError(
                f"{name} sets self.{key}, which is a method of every connection; choose another "
                "name"
            )
    for key, types in _ATTRIBUTE_TYPES.items():
        if not isinstance(getattr(connection, key), types):
            raise TypeError(_taken_name(name, key))
    limits = connection.gate_limits
    if limits is not None and not _is_interval(limits):
        raise TypeError(
            f"{name}: gate_limits must be None or two numbers, the smaller one first, "
            f"got {limits!r}"
        )


def _is_interval(limits: Any) -> bool:
    is_pair = isinstance(limits, tuple) and len(limits) == 2
    return is_pair and all(isinstance(end, int | float) for end in limits) and limits[0] < limits[1]


def _check_tensors(connection: Any) -> None:
    """Raise a TypeError for modules beside the norms, and tensors that are no parameters."""
    name = type(connection).__name__
    others = [child for child, _ in connection.named_children() if child != "norms"]
    others += [buffer for buffer, _ in connection.named_buffers(recurse=False)]
    if others:
        raise TypeError(
            f"{name} has {others[0]!r}: a connection contains parameters of "
            "its own, from float32_parameter, and its norms; no other modules and no buffers. "
            f"{_CONSTANTS}"
        )
    for key in sorted(vars(connection).keys() - vars(nn.Module()).keys()):
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(vars(connection)[key])):
            raise TypeError(
                f"{name} has a tensor in self.{key}, which does not move to a device or load with "
                f"the model. {_CONSTANTS}"
            )


def _taken_name(name: str, key: str) -> str:
    return f"{name} sets self.{key}, which every connection has; choose another name"


def check_options(name: str, options: dict[str, Any], reserved: set[str]) -> None:
    """Raise a TypeError where a method's own option has a name that every connection uses.

    Args:
        name: of the method.
        options: its own options.
        reserved: the names.
    """
    for key in options:
        if key in reserved:
            raise TypeError(
                f"{name}: its option {reprlib.repr(key)} has a name that every connection uses; "
                "choose another one"
            )
