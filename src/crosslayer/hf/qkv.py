"""q, k and v apart: an attention whose projections take their inputs from three ports of the connection."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..class_swap import swap_class
from .families import Fused


class QKVInputs(tuple):
    """The inputs of q, k and v, passing for one tensor until the projection that wants its own."""

    __slots__ = ()
    shape = property(lambda self: self[0].shape)
    ndim = property(lambda self: self[0].ndim)
    dtype = property(lambda self: self[0].dtype)
    device = property(lambda self: self[0].device)


class SplitInputAttention:
    """An attention that parts its projections, also one put in their place later: an adapter, a quantised one."""

    projections: tuple[str, ...]  # of q, k and v, or the one that is all three
    fused: Fused | None

    def __setattr__(self, name: str, module: Any) -> None:
        super().__setattr__(name, module)
        if name not in self.projections:
            return
        if self.fused is None:
            module.register_forward_pre_hook(partial(select_port, self.projections.index(name)))
        elif not isinstance(module, FusedProjection):
            swap_class(
                module, FusedLinear if type(module) in (nn.Linear, Conv1D) else FusedProjection
            )
            module.fused = self.fused


def split_qkv_inputs(attention: Any, projections: tuple[str, ...], fused: Fused | None) -> None:
    """Let the attention's projections take q's, k's and v's inputs apart."""
    swap_class(attention, SplitInputAttention)
    vars(attention).update(projections=projections, fused=fused)
    for name in projections:
        setattr(attention, name, getattr(attention, name))


def select_port(index: int, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A forward-pre-hook: one projection of q, k or v takes its own port."""
    return (args[0][index],) if isinstance(args[0], QKVInputs) else None


class FusedProjection:
    """One projection for q, k and v: each port gives its own part of the outputs."""

    fused: Fused

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(x, QKVInputs):
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        parts = [self.project(i, port) for i, port in enumerate(x)]
        return torch.cat(
            [part.unflatten(-1, (self.fused.groups, -1)) for part in parts], -1
        ).flatten(-2)

    def project(self, index: int, x: Tensor) -> Tensor:
        """q, k or v of x. Whatever the projection is made of, a part of the outputs of the whole is right."""
        return self.rows(super().forward(x), -1, index)  # type: ignore[misc]

    def rows(self, outputs: Tensor, dim: int, index: int) -> Tensor:
        """q's, k's or v's share of a dimension that runs over all outputs."""
        grouped = outputs.unflatten(dim, (self.fused.groups, -1))
        axis = dim + 1 if dim >= 0 else dim
        return grouped.split(self.fused.sizes, axis)[index].flatten(axis - 1, axis)


class FusedLinear(FusedProjection):
    """A plain projection does not compute what it would throw away."""

    weight: Tensor
    bias: Tensor | None

    def project(self, index: int, x: Tensor) -> Tensor:
        weight = self.weight.T if isinstance(self, Conv1D) else self.weight
        bias = None if self.bias is None else self.rows(self.bias, 0, index)
        return nn.functional.linear(x, self.rows(weight, 0, index), bias)
