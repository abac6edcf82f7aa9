"""`use_kernels`: whether ops on CUDA tensors run their Triton kernels.

They are off by default, because no kernel has been measured on a GPU yet.
"""

import importlib
import os
from importlib.util import find_spec
from typing import Any

import torch

from .ops import dispatch
from .validation import check_option_type


class use_kernels:
    """Switch the Triton kernels on CUDA tensors on or off, from here on or within a `with` block.

    The switch is the process's, not the thread's: blocks of several threads undo each other's. A
    block must contain the backward pass too where `torch.utils.checkpoint` reruns the forward pass,
    which raises an error if it then runs the other implementation. The end of a block restores what
    held when its `use_kernels` was made, as that of `torch.set_grad_enabled` does.

        crosslayer.use_kernels(True)
        with crosslayer.use_kernels(False):
            ...

    Args:
        enabled: True, False, or None for the default: on where the environment has
            CROSSLAYER_KERNELS=1 and triton is installed, otherwise off.

    Raises:
        ValueError: `enabled` is something else.
        ModuleNotFoundError: `enabled` is True and triton is not installed.
        RuntimeError: kernels are switched on with a build of PyTorch for AMD.
    """

    def __init__(self, enabled: bool | None = True):
        check_option_type("enabled", enabled, bool | None)
        has_triton = find_spec("triton") is not None
        if enabled is None:
            enabled = os.environ.get("CROSSLAYER_KERNELS") == "1" and has_triton
        if enabled:
            if not has_triton:
                raise ModuleNotFoundError(
                    "triton is not installed; pip install -e '.[kernels]'", name="triton"
                )
            if torch.version.hip is not None:
                raise RuntimeError("the kernels need an NVIDIA GPU, and this PyTorch is for AMD")
            importlib.import_module("crosslayer.kernels")
        self._devices = ("cuda",) if enabled else ()
        self._devices_before = dispatch.kernel_devices
        dispatch.kernel_devices = self._devices

    def __enter__(self) -> None:
        dispatch.kernel_devices = self._devices

    def __exit__(self, *_: Any) -> None:
        dispatch.kernel_devices = self._devices_before
