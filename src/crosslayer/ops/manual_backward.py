"""Hand-written backwards, and the definitions that they must agree with.

An op with a hand-written backward is a `Function` with a `definition`: the same result in plain
torch. The backward is fast, but it cannot be differentiated again, as it uses what the forward
saved. So the definition takes its place here:

    torch.func, forward-mode AD     `run_function` calls the definition
    a backward under create_graph   it returns `definition_gradients`; a kernel's does too

What a forward computes, it returns through `separate_outputs`.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.functional import vjp
from torch.utils._pytree import tree_flatten, tree_unflatten

# Whether a compiled Function returns every tensor of its forward (pytorch issue 180642). torch
# compares versions here, not texts.
_RETURNS_INTERMEDIATES = torch.__version__ < "2.12"


class _DefinedFunction(Protocol):
    """A `torch.autograd.Function` with a definition."""

    @staticmethod
    def definition(*args: Any) -> Any:
        """What `apply` returns, in plain torch."""

    @staticmethod
    def forward(*args: Any) -> Any: ...

    @classmethod
    def apply(cls, *args: Any) -> Any: ...


class _NoBackward:
    """The context of a forward without a backward: it saves nothing."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def is_transformed() -> bool:
    """Whether a transform of `torch.func` or forward-mode AD is active."""
    if torch._C._are_functorch_transforms_active():
        return True
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def run_function(function: type[_DefinedFunction], *args: Any) -> Any:
    """`function.apply`, or its definition where autograd must see plain torch."""
    if is_transformed():
        return function.definition(*args)
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return function.forward(_NoBackward(), *args)  # `apply` takes longer
    # With dynamic shapes a float is an input of the graph in which dynamo first meets it. Met
    # within a Function, it would be one of the Function's graph alone (torch 2.13).
    numbers = [float(x) if isinstance(x, float) else x for x in args]
    return function.apply(*numbers)


def separate_outputs(*outputs: Tensor) -> tuple[Tensor, ...]:
    """The outputs of a Function's forward, as tensors distinct from all of its intermediates.

    An operation in place, or a conversion to the same dtype, returns the tensor that it was given.
    Compiled by torch 2.11, a Function returns such a tensor several times. Its gradient goes to the
    last of them alone, and the backward gets zeros.
    """
    if _RETURNS_INTERMEDIATES and torch.compiler.is_compiling():
        return tuple(x.detach() for x in outputs)
    return outputs


def definition_gradients(
    definition: Callable[..., Any], inputs: tuple[Any, ...], *dout: Tensor | None
) -> Any:
    """The gradients of `definition(*inputs)` as functions of `inputs` and `dout`.

    Args:
        definition: takes `inputs`, and returns one tensor or a tuple of them.
        inputs: tensors, lists of them, and other arguments. One may depend on another.
        dout: the gradient of each output; None for zero.

    Returns:
        A tuple like `inputs`, with the gradient for a tensor and None for anything else.
    """
    leaves, structure = tree_flatten(inputs)
    is_tensor = [isinstance(x, Tensor) for x in leaves]

    def define(*tensors: Tensor) -> Any:
        remaining = iter(tensors)
        filled = [next(remaining) if is_t else x for x, is_t in zip(leaves, is_tensor, strict=True)]
        outputs = definition(*tree_unflatten(filled, structure))
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        return tuple(out for out, d in zip(outputs, dout, strict=True) if d is not None)

    tensors = tuple(x for x in leaves if isinstance(x, Tensor))
    defined = tuple(d for d in dout if d is not None)
    _, gradients = vjp(define, tensors, defined, create_graph=True)
    remaining = iter(gradients)
    return tree_unflatten([next(remaining) if is_t else None for is_t in is_tensor], structure)
