"""The functions that a layer calls besides its modules: dropout, activations and norms."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .arguments import LayerArgument, is_constant
from .families import ArgumentProduct, FunctionCall

# Functions of one tensor that a layer may call between two of its modules, or before one.
_NORM_NAMES = ("layer_norm", "rms_norm")
_ACTIVATION_NAMES = (
    "celu", "elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid",
    "mish", "pow", "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softsign", "square",
    "tanh",
)  # fmt: skip


class Observer:
    """What answers the calls of a shadow's modules and functions."""

    # Set before a run: the layer's own parameters and buffers of floats, by name.
    parameters: dict[str, Tensor | None]
    unpacked: str  # set in a run: the path of the stand-in whose output was unpacked last

    def answer(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What a module returns. path: its name in the layer.

        A plain tensor can be unpacked as a tuple with the tensor first.
        """
        raise NotImplementedError

    def drop_out(self, x: Tensor, p: float) -> Tensor:
        """What a call of `torch.nn.functional.dropout` returns."""
        return x

    def call_function(self, x: Tensor, call: FunctionCall) -> Tensor:
        """What a call of an activation or a norm returns."""
        return call(x)

    def multiply(self, x: Tensor, product: ArgumentProduct) -> Tensor:
        """What a product with an argument of the layer is, where there are stand-ins for these."""
        raise NotImplementedError


def _find_functions() -> dict[Any, Callable[..., Tensor]]:
    """The functions and methods of these names, each with a function that does the same.

    Methods of a tensor have one of torch, because they cannot all be pickled.
    """
    found: dict[Any, Any] = {Tensor.__pow__: torch.pow}
    for name in (*_NORM_NAMES, *_ACTIVATION_NAMES):
        for owner in (nn.functional, torch):
            if hasattr(owner, name):
                found[getattr(owner, name)] = getattr(owner, name)
        if hasattr(Tensor, name):
            found[getattr(Tensor, name)] = getattr(torch, name)
    return found


_FUNCTIONS = _find_functions()
_PRODUCTS = {torch.mul, Tensor.mul}  # of `*` too; one in place would change other names' tensors


def is_norm_function(call: FunctionCall) -> bool:
    """Whether a function is a norm of the last axis."""
    return call.function.__name__ in _NORM_NAMES


class FunctionMode(TorchFunctionMode):
    """Lets the observer see dropout, activations and norms that are no modules, and products with
    arguments.

    Args:
        observer: what answers them.
        training: the mode that dropout must be in; None where modules in either mode are run.
    """

    def __init__(self, observer: Observer, training: bool | None = False):
        super().__init__()
        self.observer = observer
        self.training = training

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.dropout:
            return self._drop_out(inspect.signature(func).bind(*args, **kwargs).arguments)
        if func in _PRODUCTS and LayerArgument in map(type, args):
            x, argument = sorted(args, key=lambda value: isinstance(value, LayerArgument))
            return self.observer.multiply(x, ArgumentProduct(argument.name))
        if func in _FUNCTIONS and args and isinstance(args[0], Tensor):
            arguments = tuple(map(_list_to_tuple, args[1:]))
            keywords = {name: _list_to_tuple(value) for name, value in kwargs.items()}
            if all(map(is_constant, (*arguments, *keywords.values()))):
                call = FunctionCall(_FUNCTIONS[func], arguments, tuple(keywords.items()))
                return self.observer.call_function(args[0], call)
        return func(*args, **kwargs)

    def _drop_out(self, named: Mapping[str, Any]) -> Tensor:
        """What dropout returns. named: its arguments."""
        p = float(named.get("p", 0.5))
        x = named["input"].as_subclass(Tensor)
        if p and self.training not in (None, bool(named.get("training", True))):
            when = "in training" if self.training else "in evaluation"
            state = "no dropout" if self.training else "dropout"
            raise ValueError(f"its own code has {state} {when}")
        return self.observer.drop_out(x, p) if p else x


def _list_to_tuple(value: Any) -> Any:
    """Turn a list into a tuple, because a wiring has no lists. Other values do not change."""
    return tuple(value) if isinstance(value, list | torch.Size) else value
