"""Separate inputs for q, k and v: an attention that takes its inputs from three ports."""

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..class_swap import restore_class, swap_class
from .families import FusedQKV


class QKVInputs(tuple):
    """The inputs of q, k and v, in place of one tensor until each projection selects its own.

    Arithmetic with a number, a tensor or other inputs is that of each input.
    """

    __slots__ = ()
    shape = property(lambda self: self[0].shape)
    ndim = property(lambda self: self[0].ndim)
    dtype = property(lambda self: self[0].dtype)
    device = property(lambda self: self[0].device)
    requires_grad = property(lambda self: any(x.requires_grad for x in self))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the attention's input is a tuple of {len(self)} here, because its projections read "
            f"different inputs; a tuple has no {name!r}"
        )

    def _compute(self, operation: Callable[[Any, Any], Any], other: Any) -> "QKVInputs":
        others = other if isinstance(other, QKVInputs) else [other] * len(self)
        return QKVInputs([operation(x, y) for x, y in zip(self, others, strict=True)])

    def __add__(self, other: Any) -> "QKVInputs":
        return self._compute(operator.add, other)

    def __sub__(self, other: Any) -> "QKVInputs":
        return self._compute(operator.sub, other)

    def __mul__(self, other: Any) -> "QKVInputs":
        return self._compute(operator.mul, other)

    def __truediv__(self, other: Any) -> "QKVInputs":
        return self._compute(operator.truediv, other)

    def __matmul__(self, other: Any) -> "QKVInputs":
        return self._compute(operator.matmul, other)

    def __rsub__(self, other: Any) -> "QKVInputs":
        return -1 * self + other

    __radd__ = __add__
    __rmul__ = __mul__

    def dim(self) -> int:
        return self[0].dim()

    def size(self, *dim: int) -> Any:
        return self[0].size(*dim)


class SplitInputAttention:
    """An attention whose projections select their inputs.

    This includes a projection that is set later, like an adapter or a quantised one.
    """

    # Of q, k and v, or the one that is all three. Further ones, such as gates, read q's input.
    projections: tuple[str, ...]
    fused: FusedQKV | None

    def __init_subclass__(cls) -> None:
        """Wrap the host's forward. vLLM finds its attention in the source, but does not merge
        projections of q, k and v whose inputs differ.
        """
        if "original" not in vars(cls):  # FSDP2 makes a subclass of it.
            return
        host_forward: Any = vars(cls)["original"].forward

        input_name = next(islice(inspect.signature(host_forward).parameters, 1, None), "")

        @wraps(host_forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            # A hook may have made a plain tuple or a list of the inputs.
            if args and type(args[0]) in (tuple, list):
                args = (QKVInputs(args[0]), *args[1:])
            elif type(kwargs.get(input_name)) in (tuple, list):
                kwargs[input_name] = QKVInputs(kwargs[input_name])
            return host_forward(self, *args, **kwargs)

        cls.forward = forward  # type: ignore[attr-defined]

    def __setattr__(self, name: str, module: Any) -> None:
        super().__setattr__(name, module)
        if name not in self.projections:
            return
        if self.fused is None:
            index = self.projections.index(name)
            # before the hooks of others, like those of tensor parallelism, which take one input
            if not any(map(is_port_hook, module._forward_pre_hooks.values())):
                module.register_forward_pre_hook(partial(select_port, index), prepend=True)
        elif not isinstance(module, FusedProjection):
            # A subclass may only add how it is initialised, as torchtitan's does.
            is_linear = type(module).forward in (nn.Linear.forward, Conv1D.forward)
            swap_class(module, FusedLinear if is_linear else FusedProjection)
            module.fused = self.fused


def split_qkv_inputs(attention: Any, projections: tuple[str, ...], fused: FusedQKV | None) -> None:
    """Let the attention's projections of q, k and v take separate inputs.

    Args:
        attention: the host's attention module.
        projections: names of its projections of q, k and v, or of the one that is all three. They
            may be within one module of it.
        fused: how the outputs of the one projection are divided; None where there are three.
    """
    parent = projections[0].rpartition(".")[0]
    if parent:
        names = tuple(path.rpartition(".")[2] for path in projections)
        split_qkv_inputs(attention.get_submodule(parent), names, fused)
        return
    swap_class(attention, SplitInputAttention)
    vars(attention).update(projections=projections, fused=fused)
    for name in projections:
        setattr(attention, name, getattr(attention, name))


@contextmanager
def plain_fused_projections(model: nn.Module) -> Iterator[None]:
    """Give the fused projections of a model the classes of its host within the block.

    What replaces a projection there is fused again, and so is what stays.
    """
    attentions: list[Any] = [m for m in model.modules() if isinstance(m, SplitInputAttention)]
    fused = [(m, m.projections[0]) for m in attentions if m.fused is not None]
    for attention, name in fused:
        merge_fused_projection(getattr(attention, name))
    try:
        yield
    finally:
        for attention, name in fused:
            setattr(attention, name, getattr(attention, name))


def merge_fused_projection(projection: Any) -> None:
    """Undo what `split_qkv_inputs` has made of a fused projection."""
    restore_class(projection)
    del projection.fused


def select_port(index: int, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A forward-pre-hook: the projection of q, k or v selects its own input, others that of q."""
    inputs = args[0]
    if not isinstance(inputs, QKVInputs):
        return None
    return (inputs[index if index < len(inputs) else 0],)


def is_port_hook(hook: Any) -> bool:
    """Whether a hook selects an input of q, k or v."""
    return isinstance(hook, partial) and hook.func is select_port


class FusedProjection:
    """One projection for q, k and v: each input gives its share of the outputs.

    Each input passes the whole module, with its hooks and whatever others have made of its
    `forward`. Selecting from all outputs is right whatever the projection is made of.
    """

    fused: FusedQKV

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(x, QKVInputs) or self._takes_all_inputs():
            return super().__call__(x, *args, **kwargs)  # type: ignore[misc]
        shares = []
        for index, port in enumerate(x):
            outputs = super().__call__(port, *args, **kwargs)  # type: ignore[misc]
            shares.append(self._select_outputs(outputs, -1, index))
        return self._join_shares(shares)

    def _takes_all_inputs(self) -> bool:
        """Whether `forward` takes `QKVInputs`."""
        return False

    def _join_shares(self, shares: Iterable[Tensor]) -> Tensor:
        """The outputs of the whole projection, from those of q, k and v."""
        grouped = [
            share.unflatten(-1, (-1, size))
            for share, size in zip(shares, self.fused.sizes, strict=True)
        ]
        return torch.cat(grouped, -1).flatten(-2)

    def _select_outputs(self, outputs: Tensor, dim: int, index: int) -> Tensor:
        """The share of q, k or v in a dimension that runs over all outputs.

        A rank of a tensor-parallel group may have the outputs of some groups alone.
        """
        grouped = outputs.unflatten(dim, (-1, sum(self.fused.sizes)))
        axis = dim + 1 if dim >= 0 else dim
        return grouped.split(self.fused.sizes, axis)[index].flatten(axis - 1, axis)


class FusedLinear(FusedProjection):
    """A plain linear projection, which computes the selected outputs alone."""

    weight: Tensor
    bias: Tensor | None

    def _takes_all_inputs(self) -> bool:
        # Not a quantised weight, nor one that is distributed over ranks. Others may have replaced
        # the forward, like some libraries of adapters.
        return type(self.weight) in (nn.Parameter, Tensor) and "forward" not in vars(self)

    def forward(self, x: Any) -> Tensor:
        if not isinstance(x, QKVInputs):
            return super().forward(x)  # type: ignore[misc]
        return self._join_shares(self._project(index, port) for index, port in enumerate(x))

    def _project(self, index: int, x: Tensor) -> Tensor:
        weight = self.weight.T if isinstance(self, Conv1D) else self.weight
        bias = None if self.bias is None else self._select_outputs(self.bias, 0, index)
        return nn.functional.linear(x, self._select_outputs(weight, 0, index), bias)
