"""How much memory a step's activations take at their peak, by every storage that lives, whoever holds it.

    peak("hyper", sized(layers=24, dim=2048, heads=16), batch=8, context=2048, recompute="streams").peak / 2**30   # GiB

The model is on the meta device, where a step of any size is free. What it gives there is what the operations ask an
allocator for; a fused kernel asks for less, and an allocator's own waste is not in it.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..connection import find_connections
from ..recompute import enable_recompute
from .estimate import build_on_meta, language_model_loss


class PeakMemory(NamedTuple):
    """Bytes beside parameters, their gradients and the batch."""

    kept: int  # between forward and backward
    peak: int  # of both


def estimate_peak_memory(
    arm: str,
    body: Any,
    batch: int,
    context: int,
    recompute: str = "none",
    dtype: torch.dtype = torch.bfloat16,
) -> PeakMemory:
    """The activation memory of an arm's step on a body, a batch and a context, without building it.

    Args:
        arm: like "mudd(dilation=2)".
        body: a transformers configuration of a family `connect` knows; `costs.sized` makes one.
        batch: sequences a step on one GPU.
        context: tokens a sequence.
        recompute: none, or as `retrace` takes it: streams or inversion.
        dtype: of the model and its stream.
    """
    model = build_on_meta(arm, body, context, dtype)
    if recompute != "none":
        enable_recompute(find_connections(model), recompute)
    return measure_peak_memory(
        model, torch.zeros(batch, context + 1, dtype=torch.long, device="meta")
    )


def measure_peak_memory(
    model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor] = language_model_loss
) -> PeakMemory:
    """The same of a model that is there, on its device; its gradients are zero afterwards."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    given = [*tree_leaves(batch), *(x for p in model.parameters() for x in (p, p.grad))]
    with LiveMemoryTracker(x for x in given if isinstance(x, Tensor)) as live:
        value = loss(model, batch)
        kept = live.now
        value.backward()
    model.zero_grad(set_to_none=False)
    return PeakMemory(kept, live.peak)


class LiveMemoryTracker(TorchDispatchMode):
    """Bytes of the storages that operations have made and that are alive, and their peak."""

    def __init__(self, given: Iterable[Tensor]):
        super().__init__()
        self.now = self.peak = 0
        # by the storage itself, as all meta tensors have the address 0
        self.known: dict[int, Any] = {x.untyped_storage()._cdata: None for x in given}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.count(x.untyped_storage())
        return out

    def count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.now += size
            self.peak = max(self.peak, self.now)
            self.known[key] = weakref.ref(storage, functools.partial(self.freed, key, size))

    def freed(self, key: int, size: int, _: Any) -> None:
        self.now -= size
        del self.known[key]
