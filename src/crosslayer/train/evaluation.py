"""Validation: means over examples that the ranks share, the same for any number of them."""

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import default_collate

from .task import Task


def evenly_spaced(length: int, most: int) -> list[int]:
    """At most so many indices, spread evenly over so many examples."""
    count = min(length, most)
    return [index * length // count for index in range(count)]


@torch.no_grad()
def evaluate_examples(
    fabric: Fabric, model: nn.Module, job: Task, part: Any, chosen: list[int], batch: int
) -> dict[str, float]:
    """Means over examples, whose batches the ranks share, each padded to the same number with examples of no weight."""
    model.eval()
    each = -(-batch // fabric.world_size)
    mine = chosen[fabric.global_rank :: fabric.world_size]
    rounds = -(-len(chosen) // (each * fabric.world_size))
    mine += [-1] * (rounds * each - len(mine))
    sums: dict[str, Tensor] = {}
    for start in range(0, len(mine), each):
        indices = mine[start : start + each]
        numbers = [max(index, 0) for index in indices]
        values = job.judge(
            model, fabric.to_device(default_collate([part[number] for number in numbers])), numbers
        )
        weight = torch.tensor([index >= 0 for index in indices], device=fabric.device)
        for name, value in values.items():
            sums[name] = sums.get(name, 0) + (value.double() * weight).sum()
    model.train()
    return {
        name: fabric.all_reduce(total, reduce_op="sum").item() / len(chosen)
        for name, total in sums.items()
    }
