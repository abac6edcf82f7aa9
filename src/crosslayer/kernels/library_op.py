"""Functions that launch kernels as operations of torch: one node to a compiler, differentiable.

`torch.library.custom_op` makes the same operations. But its wrappers cost more Python than the
launch of a kernel does, most of all where there are gradients or lists of tensors.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

_NAMESPACE = "crosslayer"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")

# Of the arguments of an op: the length of each that is a list, None for any other.
_Structure = list[int | None]

_Fake = TypeVar("_Fake", bound=Callable[..., Any])


class LibraryOp:
    """`torch.ops.crosslayer.NAME`, which runs the function `_NAME` that this class decorates.

    The function's annotations are the op's schema. It gets contiguous tensors, changes no argument,
    and returns new tensors. Calling `_NAME` calls the op.

        @LibraryOp
        def _scale(x: Tensor, factor: float) -> Tensor: ...

        @_scale.register_fake
        def _(x: Tensor) -> Tensor:
            return x.new_empty(x.shape)

    Args:
        run: the function.
        keeps_strides: the name of one argument that is not made contiguous.
    """

    def __init__(self, run: Callable[..., Any], keeps_strides: str = ""):
        self.name = run.__name__.removeprefix("_")
        self._signature = inspect.signature(run)
        names = list(self._signature.parameters)
        unchanged = names.index(keeps_strides) if keeps_strides else None
        schema = torch.library.infer_schema(run, mutates_args=())
        _LIBRARY.define(self.name + schema, tags=torch.Tag.pt2_compliant_tag)

        def run_on_contiguous(*inputs: Any) -> Any:
            contiguous = [_make_contiguous(value) for value in inputs]
            if unchanged is not None:
                contiguous[unchanged] = inputs[unchanged]
            return run(*contiguous)

        self._implement(run_on_contiguous, "CompositeExplicitAutograd")
        self.overload = getattr(getattr(torch.ops, _NAMESPACE), self.name).default
        # What torch calls first. Eager callers reach it without torch's detour.
        self._run_eagerly: Callable[..., Any] = self.overload

    def __call__(self, *inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.overload(*inputs)
        return self._run_eagerly(*inputs)

    def register_fake(self, fake: _Fake) -> _Fake:
        """Register a function that returns empty tensors like those that the op returns.

        The function takes the arguments that it needs alone, under the names they have in the op.
        """
        names = inspect.signature(fake).parameters.keys()
        assert names <= self._signature.parameters.keys(), f"{self.name} has no such arguments"

        def run_fake(*args: Any, **kwargs: Any) -> Any:
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()  # torch leaves out arguments that are the default
            return fake(**{name: bound.arguments[name] for name in names})

        torch.library.register_fake(f"{_NAMESPACE}::{self.name}", run_fake, lib=_LIBRARY)
        return fake

    def register_autograd(
        self, backward: Callable[..., Any], setup_context: Callable[..., None]
    ) -> None:
        """Make the op differentiable.

        Args:
            backward: takes a context and the gradient of each output, a list where the output is
                one. It returns the gradient of each input: a list where the input is one, else
                None where there is no gradient.
            setup_context: takes the context, a tuple of the inputs, and the output. It saves what
                `backward` needs.
        """
        overload = self.overload
        function = _make_function(overload, backward, setup_context)

        def run_with_gradient(*inputs: Any) -> Any:
            if torch.is_grad_enabled():
                flat, structure = _flatten(inputs)
                if _any_requires_grad(flat):
                    output_structure: _Structure = []
                    flat_outputs = function.apply(output_structure, structure, *flat)
                    if isinstance(flat_outputs, Tensor):
                        return flat_outputs
                    return tuple(_unflatten(flat_outputs, output_structure))
            with torch._C._AutoDispatchBelowAutograd():
                return overload(*inputs)

        self._implement(run_with_gradient, "Autograd")
        self._run_eagerly = run_with_gradient

    def _implement(self, function: Callable[..., Any], dispatch_key: str) -> None:
        # Dynamo must not trace the function where it is called from a frame that Dynamo watches.
        _LIBRARY.impl(self.name, torch._disable_dynamo(function), dispatch_key)


def _make_function(
    overload: Any, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> type[Function]:
    """The op as a `Function`. Its inputs and outputs are flat: autograd looks into no list."""

    class LibraryFunction(Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output_structure, structure, *flat = args
            inputs = tuple(_unflatten(flat, structure))
            with torch._C._AutoDispatchBelowAutograd():
                output = overload(*inputs)
            setup_context(ctx, inputs, output)
            ctx.structure = structure
            ctx.output_structure = output_structure
            if isinstance(output, Tensor):
                output_structure.append(None)
                return output
            flat_outputs, found = _flatten(output)
            output_structure.extend(found)
            return tuple(flat_outputs)

        @staticmethod
        def backward(ctx: Any, *flat_gradients: Any) -> Any:
            gradients = backward(ctx, *_unflatten(flat_gradients, ctx.output_structure))
            flat: list[Tensor | None] = [None, None]
            for gradient, length in zip(gradients, ctx.structure, strict=True):
                if length is None:
                    flat.append(gradient)
                else:
                    flat.extend(gradient)
            return tuple(flat)

    return LibraryFunction


def _make_contiguous(value: Any) -> Any:
    """An op's argument with contiguous tensors in place of others."""
    if isinstance(value, Tensor):
        return value.contiguous()
    if isinstance(value, list | tuple):
        return [_make_contiguous(item) for item in value]
    return value


def _any_requires_grad(flat: Sequence[Any]) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in flat)


def _flatten(values: Sequence[Any]) -> tuple[list[Any], _Structure]:
    """The values with those of lists in place of the lists, and what `_unflatten` needs."""
    flat: list[Any] = []
    structure: _Structure = []
    for value in values:
        if isinstance(value, list | tuple):
            flat.extend(value)
            structure.append(len(value))
        else:
            flat.append(value)
            structure.append(None)
    return flat, structure


def _unflatten(flat: Sequence[Any], structure: _Structure) -> list[Any]:
    """The values that `_flatten` was given, tuples as lists."""
    values: list[Any] = []
    start = 0
    for length in structure:
        if length is None:
            values.append(flat[start])
            start += 1
        else:
            values.append(list(flat[start : start + length]))
            start += length
    return values
