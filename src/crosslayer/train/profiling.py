"""Memory, FLOPs and model FLOPs utilization of a run."""

import resource
import sys
from collections.abc import Iterator

import torch
from torch import nn

from ..cost.estimate import GPUS, activation_bytes
from ..cost.flops import flop_counter
from .task import Batch, TrainingTask


def measure_forward(
    model: nn.Module, task: TrainingTask, batches: Iterator[Batch]
) -> tuple[int, int]:
    """Bytes that one micro-batch's forward pass stores for the backward pass, and its FLOPs."""
    batch = next(batches)
    eager = torch.compiler.set_stance("force_eager")
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with flop_counter() as counter, eager, torch.random.fork_rng(devices):
        stored_bytes = activation_bytes(model, batch, task.loss)
    return stored_bytes, counter.get_total_flops()


def model_flops_utilization(forward_flops: int, seconds: float) -> float | None:
    """Share of the GPU's peak FLOP/s (MFU), with a backward pass of twice the forward pass's FLOPs.

    The peak is that of bfloat16, whatever the precision of the run. None where there is no GPU, or
    one whose peak `GPUS` does not have.
    """
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_name()
    peaks = {gpu.device_name: gpu.flops for gpu in GPUS.values()}
    if device not in peaks:
        return None
    return 3 * forward_flops / seconds / peaks[device]


def reset_peak_memory() -> None:
    """Let `peak_memory` begin anew, where there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> int:
    """Peak bytes of the GPU since `reset_peak_memory`; of the process where there is no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, not KiB
