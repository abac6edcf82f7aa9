"""The arguments of a layer's and its modules' forward, by name."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..class_swap import original_class
from .families import RESIDUAL_ARGUMENTS, REST_OF_ARGUMENTS


class LayerArgument:
    """Stands for an argument of a layer, such as its attention mask: modules receive it as is."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return f"the argument {self.name!r}"


def layer_arguments(layer: nn.Module) -> dict[str, Any]:
    """What a layer's shadow is called with besides the stream.

    Arguments that choose what the forward does keep their defaults. Only `output_attentions` is
    True, so that the layer returns all that it can return.
    """
    arguments: dict[str, Any] = {}
    for name, parameter in argument_parameters(layer).items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments[REST_OF_ARGUMENTS] = LayerArgument(REST_OF_ARGUMENTS)
        elif name == "output_attentions":
            arguments[name] = True
        elif parameter.kind is not parameter.VAR_POSITIONAL and not _is_switch(parameter):
            arguments[name] = LayerArgument(name)
    return arguments


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters of a module's forward after self; the first is the stream's."""
    return tuple(_forward_parameters(module))[1:]


def argument_parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    """The parameters of a module's forward after self and the hidden state, by name."""
    return dict(list(_forward_parameters(module).items())[2:])


def _forward_parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    host: Any = original_class(module)
    return inspect.signature(host.forward).parameters


def residual_argument(module: nn.Module) -> str:
    """The argument that a module adds to its output; empty where it has none."""
    return RESIDUAL_ARGUMENTS.get(original_class(module).__name__, "")


def _is_switch(parameter: inspect.Parameter) -> bool:
    """Whether an argument chooses what the forward does, by its value or by being there."""
    name = parameter.name  # No model passes DeBERTa's query_states, which would be another stream.
    is_stream = name.startswith("encoder_") or name == "query_states"
    return isinstance(parameter.default, bool) or is_stream


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
    host: Any = original_class(module)
    signature = inspect.signature(host.forward)
    named: dict[str, Any] = {}
    # Not all arguments are named: some may be among those that the layer passes on.
    for name, value in list(signature.bind_partial(module, *args, **kwargs).arguments.items())[1:]:
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            named.update({f"{name}[{i}]": item for i, item in enumerate(value)})
        else:
            named[name] = value
    return named
