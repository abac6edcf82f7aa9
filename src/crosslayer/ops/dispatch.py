"""Chooses an op's implementation: the torch reference, or the Triton kernel registered under the same name."""

import functools
import importlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

Op = TypeVar("Op", bound=Callable[..., Any])
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Device types on which kernels run. Empty by default: no kernel has been measured on a GPU yet.
kernel_devices: tuple[str, ...] = ()
_KERNELS: dict[
    str, Callable[..., Any]
] = {}  # by the name of the op; `crosslayer.kernels` fills it when imported


class KernelOp(Protocol):
    reference: Callable[..., Any]


def register_kernel(name: str, kernel: Callable[..., Any]) -> None:
    """Make `kernel` the implementation of the op called `name` wherever kernels are in use."""
    _KERNELS[name] = kernel


def uses_kernel(x: Tensor) -> bool:
    """Whether ops run their kernels on tensors like x."""
    return x.device.type in kernel_devices and x.dtype in KERNEL_DTYPES


def kernel_op(reference: Op) -> Op:
    """Decorate a torch reference: where `uses_kernel(first tensor)`, its registered kernel runs instead.

    The reference stays available as the attribute `reference`.
    """
    name = reference.__name__

    @functools.wraps(reference)
    def op(X: Tensor | tuple[Tensor, ...], *args: Any, **kwargs: Any) -> Any:
        first = X[0] if isinstance(X, tuple) else X
        if uses_kernel(first):
            return _KERNELS[name](X, *args, **kwargs)
        return reference(X, *args, **kwargs)

    cast(KernelOp, op).reference = reference
    return cast(Op, op)


class use_kernels:
    """Switch the Triton kernels on CUDA tensors on or off, from here on or within a `with` block.

        crosslayer.use_kernels(True)
        with crosslayer.use_kernels(False):
            ...

    Args:
        enabled: True, False, or None for the default: on where the environment has CROSSLAYER_KERNELS=1 and triton is
            installed, otherwise off.

    Raises:
        ModuleNotFoundError: `enabled` is True and triton is not installed.
    """

    def __init__(self, enabled: bool | None = True):
        global kernel_devices
        if enabled is None:
            enabled = (
                os.environ.get("CROSSLAYER_KERNELS") == "1" and find_spec("triton") is not None
            )
        if enabled:
            importlib.import_module("crosslayer.kernels")
        self._devices_before = kernel_devices
        kernel_devices = ("cuda",) if enabled else ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global kernel_devices
        kernel_devices = self._devices_before
