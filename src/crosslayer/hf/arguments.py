"""The arguments of a layer's and its modules' forward, by name."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..class_swap import original_class
from .families import RESIDUAL_ARGUMENTS, REST_OF_ARGUMENTS, UnreadValue

COMPUTES_WITH_ARGUMENTS = "its own code computes with its arguments, where most layers pass them on"
# Types of defaults that an `if` of the layer's own code may look at.
_SWITCHES = (bool, int, float, str, tuple)


class LayerArgument:
    """Stands for an argument of a layer, such as its attention mask: modules receive it as is.

    Args:
        name: of the argument.
        truth: what an `if` takes it for.
    """

    def __init__(self, name: str, truth: bool = True):
        self.name = name
        self.truth = truth

    def __bool__(self) -> bool:
        return self.truth

    def __repr__(self) -> str:
        return f"the argument {self.name!r}"

    # Without it a mode would not see a product of a tensor with this.
    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # No TypeError, after which Python tries `x * argument` for `x *= argument`.
        raise ValueError(COMPUTES_WITH_ARGUMENTS)

    # A layer that compares an argument, like `if step == 0:`, may do something else with another.
    def __eq__(self, other: object) -> bool:
        if isinstance(other, LayerArgument):
            return self is other
        raise ValueError(f"its own code compares {self!r} with {other!r}")

    __hash__ = object.__hash__


class LayerSwitch(LayerArgument):
    """Stands for an argument whose default is a bool, a number, a text or a tuple."""


def layer_arguments(layer: nn.Module) -> dict[str, Any]:
    """What a layer's shadow is called with besides the stream.

    Switches are as their defaults. Only `output_attentions` is True, so that the layer returns all
    that it can return. Second streams are left out where they have a default.
    """
    arguments: dict[str, Any] = {}
    for name, parameter in argument_parameters(layer).items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments[REST_OF_ARGUMENTS] = LayerArgument(REST_OF_ARGUMENTS)
        elif name == "output_attentions" or isinstance(parameter.default, _SWITCHES):
            is_on = name == "output_attentions" or bool(parameter.default)
            arguments[name] = LayerSwitch(name, is_on)
        elif parameter.kind is not parameter.VAR_POSITIONAL and not _is_second_stream(parameter):
            arguments[name] = LayerArgument(name)
    return arguments


def second_streams(layer: nn.Module) -> dict[str, Any]:
    """The arguments that `layer_arguments` leaves out, for a call with all of them."""
    parameters = argument_parameters(layer).values()
    return {p.name: LayerArgument(p.name) for p in parameters if _is_second_stream(p)}


def arguments_as_read(
    layer: nn.Module, unread_values: Sequence[tuple[str, UnreadValue]]
) -> dict[str, Any]:
    """The arguments with which a layer was read.

    Args:
        layer: of the host.
        unread_values: of its `LayerWiring`. A second stream that is "given" there was left out.
    """
    unread = {name for name, value in unread_values if value == "given"}
    streams = second_streams(layer).items()
    return layer_arguments(layer) | {name: s for name, s in streams if name not in unread}


def other_arguments(
    layer: nn.Module, arguments: dict[str, Any]
) -> Iterator[tuple[str, UnreadValue, dict[str, Any]]]:
    """Each argument's name, another value of it, and all arguments with that value.

    The other value of a switch is its opposite. Those of any other argument are None and one that
    is false. One with a default that is not None has no other value, so that it can be left out.
    """
    parameters = argument_parameters(layer)
    for name, argument in arguments.items():
        if isinstance(argument, LayerSwitch):
            value = not argument.truth
            yield name, value, arguments | {name: LayerSwitch(name, value)}
        elif name in parameters and parameters[name].default in (None, inspect.Parameter.empty):
            yield name, None, arguments | {name: None}
            yield name, "false", arguments | {name: LayerArgument(name, False)}


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters of a module's forward after self; the first is the stream's.

    Without those of *args and **kwargs.
    """
    return parameter_names(forward_parameters(module))


def parameter_names(parameters: Mapping[str, inspect.Parameter]) -> tuple[str, ...]:
    """The names of a method's parameters after self, without those of *args and **kwargs."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(p.name for p in list(parameters.values())[1:] if p.kind not in variable)


def takes_any_keyword(module: nn.Module) -> bool:
    """Whether a module's forward has **kwargs."""
    parameters = forward_parameters(module).values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def argument_parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    """The parameters of a module's forward after self and the hidden state, by name."""
    return dict(list(forward_parameters(module).items())[2:])


def forward_parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a module's forward by name, self among them."""
    return inspect.signature(original_class(module).forward).parameters


def residual_argument(module: nn.Module) -> str:
    """The argument that a module adds to its output; empty where it has none."""
    return RESIDUAL_ARGUMENTS.get(original_class(module).__name__, "")


def takes_from_rest(layer: nn.Module) -> bool:
    """Whether a layer's own code does anything with its **kwargs but pass all of them on."""
    parameters = forward_parameters(layer).values()
    names = [p.name for p in parameters if p.kind is p.VAR_KEYWORD]
    definition = function_definition(original_class(layer).forward) if names else None
    if definition is None:
        return False
    passed_on = {
        id(node.value)
        for node in ast.walk(definition)
        if isinstance(node, ast.keyword) and node.arg is None
    }
    return any(
        isinstance(node, ast.Name) and node.id in names and id(node) not in passed_on
        for node in ast.walk(definition)
    )


def function_definition(function: Any) -> ast.FunctionDef | None:
    """The source of a function as a tree; None where it has no source, or is no plain function."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0]
    return definition if isinstance(definition, ast.FunctionDef) else None


def _is_second_stream(parameter: inspect.Parameter) -> bool:
    """Whether an argument may be a stream beside the layer's own, and can be left out."""
    # No model passes DeBERTa's query_states.
    is_named_so = parameter.name.startswith("encoder_") or parameter.name == "query_states"
    return is_named_so and parameter.default is None


def join_arguments(
    names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name.

    Args:
        names: of the positional arguments. Further ones are left out.
        args: the positional arguments.
        kwargs: the arguments that were given by name.

    Raises:
        TypeError: one was given both ways.
    """
    for name, value in zip(names, args, strict=False):
        if name in kwargs:
            raise TypeError(f"got the argument {name!r} by its position and by its name")
        kwargs[name] = value
    return kwargs


def name_arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by their names in the module's forward, the first one first."""
    signature = inspect.signature(original_class(module).forward)
    named: dict[str, Any] = {}
    # What a layer passes on as **kwargs, its module may take by name, without any **kwargs.
    rest = {name: value for name, value in kwargs.items() if name == REST_OF_ARGUMENTS}
    kwargs = {name: value for name, value in kwargs.items() if name not in rest}
    # Not all arguments are named: some may be among those that the layer passes on.
    for name, value in list(signature.bind_partial(module, *args, **kwargs).arguments.items())[1:]:
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            named.update({f"{name}[{i}]": item for i, item in enumerate(value)})
        else:
            named[name] = value
    return named | rest


def is_constant(value: object) -> bool:
    """Whether a wiring can keep a value: numbers, texts, None, and tuples of these."""
    if isinstance(value, tuple):
        return all(map(is_constant, value))
    return value is None or isinstance(value, bool | int | float | str)


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
