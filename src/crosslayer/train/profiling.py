"""What a run takes: memory, FLOPs, and their share of what the machine has."""

import resource
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..cost.estimate import GPUS, activation_bytes, flop_counter
from .task import Task


def measure_forward(model: nn.Module, job: Task, batches: Iterator[Any]) -> tuple[int, int]:
    """Bytes that a micro-batch's forward pass keeps for the backward, and its FLOPs."""
    batch = next(batches)
    with flop_counter() as count, torch.compiler.set_stance("force_eager"), torch.random.fork_rng():
        kept = activation_bytes(model, batch, job.loss)
    return kept, count.get_total_flops()


def model_flops_utilization(flops: int, seconds: float) -> float | None:
    """Of a GPU in the table: forward and backward compute three times what the forward does."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((gpu.flops for key, gpu in GPUS.items() if key in name), None)
    return 3 * flops / seconds / peak if peak else None


def peak_memory() -> int:
    """Bytes: of the GPU, or of the process where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
