"""Chooses an op's implementation: its torch reference, or the Triton kernel of the same name."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from .manual_backward import is_transformed

_Op = TypeVar("_Op", bound=Callable[..., Any])
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Device types on which kernels run; `crosslayer.use_kernels` sets them.
kernel_devices: tuple[str, ...] = ()


class _RegisteredKernel(NamedTuple):
    """An op's kernel, and whether it can run on given arguments (those of the op)."""

    run: Callable[..., Any]
    supports: Callable[..., bool]


# By the name of the op. `crosslayer.kernels` fills it when it is imported.
registered_kernels: dict[str, _RegisteredKernel] = {}


def reference_of(op: Callable[..., Any]) -> Callable[..., Any]:
    """An op's torch reference."""
    return cast(Any, op).__wrapped__


def _supports_everything(*args: Any, **kwargs: Any) -> bool:
    return True


def register_kernel(
    name: str,
    kernel: Callable[..., Any],
    supports: Callable[..., bool] = _supports_everything,
) -> None:
    """Make `kernel` the implementation of an op wherever kernels are in use.

    Args:
        name: the op's name.
        kernel: takes the op's arguments and returns what its reference returns.
        supports: takes the op's arguments; where it returns False, the reference runs instead.
    """
    registered_kernels[name] = _RegisteredKernel(kernel, supports)


def uses_kernel(x: Tensor) -> bool:
    """Whether ops run their kernels on tensors like x."""
    supported = x.device.type in kernel_devices and x.dtype in _KERNEL_DTYPES
    # A DTensor, known by its mesh as its class takes long to import, has no rules for kernels.
    return supported and not is_transformed() and not hasattr(x, "device_mesh")


def kernel_op(reference: _Op) -> _Op:
    """Decorate a torch reference: its registered kernel runs instead where it can.

    That is where `uses_kernel` says so of the first tensor, and the kernel supports the arguments.
    `reference_of` returns the reference.
    """
    name = reference.__name__

    @functools.wraps(reference)
    def op(X: Tensor | tuple[Tensor, ...], *args: Any, **kwargs: Any) -> Any:
        first = X[0] if isinstance(X, tuple) else X
        if uses_kernel(first):
            kernel = registered_kernels[name]
            if kernel.supports(X, *args, **kwargs):
                return kernel.run(X, *args, **kwargs)
        return reference(X, *args, **kwargs)

    return cast(_Op, op)
