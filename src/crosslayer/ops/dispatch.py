"""Which of an op's two implementations runs: the torch reference, or the Triton kernel of the same name."""

import functools
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

Op = TypeVar("Op", bound=Callable[..., Any])
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# where kernels run: with CROSSLAYER_KERNELS=1, until they have been seen on a GPU and not in the interpreter alone
DEVICES = ("cuda",) if os.environ.get("CROSSLAYER_KERNELS") == "1" and find_spec("triton") else ()


class Dispatched(Protocol):
    reference: Callable[..., Any]


def runs(x: Tensor) -> bool:
    """Whether an op with a kernel takes it for this tensor."""
    return x.device.type in DEVICES and x.dtype in DTYPES


def kernel(module: str) -> Callable[[Op], Op]:
    """Where the first tensor is on a GPU and not float64, the function of this name in `crosslayer.kernels.<module>`.

    The torch reference stays at hand as `.reference`.
    """

    def decorate(reference: Op) -> Op:
        @functools.wraps(reference)
        def op(X: Tensor | tuple[Tensor, ...], *args: Any, **kwargs: Any) -> Any:
            x = X[0] if isinstance(X, tuple) else X
            if runs(x):
                # imported when asked for, as triton is no part of `import crosslayer`; the compiler follows this form
                from .. import kernels

                return getattr(getattr(kernels, module), reference.__name__)(X, *args, **kwargs)
            return reference(X, *args, **kwargs)

        cast(Dispatched, op).reference = reference
        return cast(Op, op)

    return decorate
