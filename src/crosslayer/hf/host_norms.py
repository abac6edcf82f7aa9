"""The host's norms as those of connections: references to them, and copies for k and v.

A module that may not be registered twice is kept in a `ModuleReference`, where nn.Module does not
find it.
"""

import copy
from collections.abc import Iterable
from itertools import chain, islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..class_swap import swap_class
from ..partitioned import gathered_parameters
from .families import FunctionCall


def find_attribute(owner: Any, path: str) -> Any:
    """The module or parameter at a path, "a.b", through adapters, which pass on attributes.

    The owner itself where the path is empty.
    """
    return attrgetter(path)(owner) if path else owner


class ModuleReference(tuple):
    """A module of the host's, as a tuple of one.

    A copy of the whole model refers to the copied module. A copy of a connection alone, which PEFT
    makes of `modules_to_save`, refers to the module itself.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModuleReference":
        return ModuleReference(memo.get(id(module), module) for module in self)


class NormReference(nn.Module):
    """A norm of the host's, looked up at each call, as an adapter may have replaced it.

    It is not registered a second time.

    Args:
        owner: the layer that has the norm.
        path: the norm's name in the layer; None where the family has no norm there.
    """

    def __init__(self, owner: nn.Module, path: str | None):
        super().__init__()
        self.owner = ModuleReference((owner,))
        self.path = path

    def host_norm_module(self) -> Any:
        return find_attribute(self.owner[0], self.path) if self.path else nn.Identity()

    @property
    def dtype(self) -> torch.dtype:
        return _sublayer_dtype(self.host_norm_module(), self.owner[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.host_norm_module()(x) if self.path else x

    def extra_repr(self) -> str:
        """The norm's name in the host."""
        return self.path or "no norm"


class FinalNormReference(NormReference):
    """The host's final norm as a norm, because the module itself is now the `ReadoutNorm`."""

    def __init__(self, backbone: nn.Module, final: nn.Module):
        super().__init__(backbone, None)
        self.final = ModuleReference((final,))

    def host_norm_module(self) -> Any:
        return self.final[0]

    def forward(self, *inputs: Tensor) -> Tensor:
        # vLLM traces modules with one named input, and would replace this one by vLLM's norm
        # without the host's weight.
        (x,) = inputs
        return self.host_norm_module().host_norm(x)

    def extra_repr(self) -> str:
        """The norm's name in the backbone."""
        modules = self.owner[0].named_modules()
        return next((name for name, module in modules if module is self.final[0]), "")


class NormFunction(nn.Module):
    """A norm that the host's layers call as a function. It has no weights.

    Args:
        owner: the layer that calls it.
        function: the norm.
    """

    def __init__(self, owner: nn.Module, function: FunctionCall):
        super().__init__()
        self.owner = ModuleReference((owner,))
        self.function = function

    @property
    def dtype(self) -> torch.dtype:
        return _sublayer_dtype(self, self.owner[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        """The function's name."""
        return repr(self.function)


class OwnedNorm:
    """A norm with separate weights, for k or v. Made by `copy_norm`.

    Where a checkpoint has no weights for it, it takes those of the host's norm.
    """

    owner: ModuleReference  # the layer or the backbone that has the host's norm ...
    host_path: str  # ... and the norm's name in it

    def find_host_norm(self) -> Any:
        """The host's norm, looked up at each call, as another may have replaced it."""
        return find_attribute(self.owner[0], self.host_path)

    @property
    def dtype(self) -> torch.dtype:
        return _sublayer_dtype(self, self.owner[0])

    @torch.no_grad()
    def copy_from_host(self, names: Iterable[str]) -> None:
        host_norm = self.find_host_norm()
        pairs = [(find_attribute(self, name), find_attribute(host_norm, name)) for name in names]
        with gathered_parameters([p for pair in pairs for p in pair], changes=True):
            for own, of_host in pairs:
                own.copy_(of_host)


def copy_norm(owner: nn.Module, path: str) -> nn.Module:
    """A copy of a host's norm, with separate weights and without hooks.

    The weights learn, also where the host is frozen.

    Args:
        owner: the layer or the backbone that has the norm.
        path: the norm's name in it.
    """
    host_norm = owner.get_submodule(path)
    with gathered_parameters(host_norm.parameters()):
        norm: Any = copy.deepcopy(host_norm).requires_grad_(True)
    # A hook stays with the norm that it was registered on: its handle would not remove the copy.
    for module in norm.modules():
        for name in ("forward", "forward_pre", "backward", "backward_pre"):
            getattr(module, f"_{name}_hooks").clear()
    swap_class(norm, OwnedNorm)
    norm.owner = ModuleReference((owner,))
    norm.host_path = path
    return norm


def _sublayer_dtype(norm: Any, owner: nn.Module) -> torch.dtype:
    """The dtype that a host's sub-layers compute in: that of its matrices.

    A norm may be wider than these. Quantised matrices, of one byte or of integers, do not say, and
    adapters beside them may be wider. There the norm says it.
    """
    first_matrix = (parameter for parameter in owner.parameters() if parameter.ndim > 1)
    candidates = (islice(first_matrix, 1), norm.parameters(recurse=False), owner.parameters())
    for parameter in chain(*candidates):
        if parameter.is_floating_point() and parameter.itemsize > 1:
            return parameter.dtype
    raise ValueError(
        f"stream_dtype: no parameter of {type(owner).__name__} says what dtype it computes in"
    )
