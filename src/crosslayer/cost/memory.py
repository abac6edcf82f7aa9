"""Peak activation memory of a training step: every live storage is counted, whoever holds it.

    memory = estimate_peak_memory("hyper", config, batch=8, context=2048, recompute="streams")
    memory.peak_bytes / 2**30   # GiB

On the meta device a step of any size costs nothing. The result is what the operations ask an
allocator for: a fused kernel asks for less, and fragmentation comes on top.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..connection import find_connections
from ..losses import next_token_loss
from ..recompute import enable_recompute
from ..validation import check_option_type
from .estimate import build_on_meta, check_step, cost_refusals


class PeakMemory(NamedTuple):
    """Activation memory of a training step, without parameters, their gradients and the batch.

    Args:
        saved_bytes: live between the forward and the backward pass.
        peak_bytes: the maximum over both passes.
    """

    saved_bytes: int
    peak_bytes: int


def estimate_peak_memory(
    spec: str,
    config: Any,
    batch: int,
    context: int,
    recompute: Literal["none", "streams", "inversion"] = "none",
    dtype: torch.dtype = torch.bfloat16,
) -> PeakMemory:
    """Estimate the activation memory of a connected model's training step, without allocating the
    model.

    Args:
        spec: the connection, for example "mudd(dilation=2)".
        config: a transformers configuration of a family that `connect` knows.
        batch: sequences a step on one GPU.
        context: tokens a sequence.
        recompute: "none", or what `enable_recompute` recomputes: "streams" or "inversion".
        dtype: dtype of the model and of its stream.

    Raises:
        ValueError: as in `estimate_costs`, or of `recompute`.
    """
    check_step(config, batch, context)
    check_option_type("recompute", recompute, Literal["none", "streams", "inversion"])
    model = build_on_meta(spec, config, context, dtype)
    if recompute != "none":
        enable_recompute(find_connections(model), recompute)
    tokens = torch.zeros(batch, context + 1, dtype=torch.long, device="meta")
    with cost_refusals(model):
        return measure_peak_memory(model, tokens)


def measure_peak_memory(
    model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor] = next_token_loss
) -> PeakMemory:
    """Measure the activation memory of one training step on the model's own device.

    The model's gradients are zero afterwards.

    Args:
        model: any module.
        batch: what `loss` takes; tokens [B T+1] by default.
        loss: computes the loss of a batch.
    """
    not_counted = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
        not_counted += [p, p.grad]
    with _LiveMemoryTracker(not_counted) as tracker:
        value = loss(model, batch)
        saved_bytes = tracker.live_bytes
        value.backward()
    model.zero_grad(set_to_none=False)
    return PeakMemory(saved_bytes, tracker.peak_bytes)


class _LiveMemoryTracker(TorchDispatchMode):
    """Counts the bytes of live storages that operations have allocated, and their peak.

    Args:
        not_counted: tensors that exist already.
    """

    def __init__(self, not_counted: Iterable[Tensor]):
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        # Storages are identified by themselves, because all meta tensors have the address 0.
        self._known: dict[int, Any] = {x.untyped_storage()._cdata: None for x in not_counted}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._add_storage(x.untyped_storage())
        return out

    def _add_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._known[key] = weakref.ref(storage, functools.partial(self._remove_storage, key, size))

    def _remove_storage(self, key: int, size: int, _: Any) -> None:
        self.live_bytes -= size
        del self._known[key]
