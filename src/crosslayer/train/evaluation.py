"""Evaluation on validation sets. The result does not depend on the number of ranks."""

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import default_collate

from ..evaluation_mode import evaluation_mode
from .task import TrainingTask


@torch.no_grad()
def evaluate_examples(
    fabric: Fabric,
    model: nn.Module,
    task: TrainingTask,
    dataset: Any,
    indices: list[int],
    batch: int,
) -> dict[str, float]:
    """Means of a task's metrics over examples of one validation set.

    Args:
        fabric: its ranks share the examples.
        model: set up by Fabric. It runs in evaluation mode.
        task: its `evaluate` gives each example's metrics.
        dataset: a validation set.
        indices: the examples, the same on every rank.
        batch: examples of all ranks at once.
    """
    # Every rank evaluates the same number of full batches (FSDP's ranks must call the model
    # together): index -1 marks padding, whose weight is 0.
    rank_batch = -(-batch // fabric.world_size)
    rounds = -(-len(indices) // (rank_batch * fabric.world_size))
    rank_indices = indices[fabric.global_rank :: fabric.world_size]
    rank_indices += [-1] * (rounds * rank_batch - len(rank_indices))

    sums: dict[str, Tensor] = {}
    with evaluation_mode(model):
        for start in range(0, len(rank_indices), rank_batch):
            chosen = rank_indices[start : start + rank_batch]
            padded = [max(index, 0) for index in chosen]
            examples = fabric.to_device(default_collate([dataset[index] for index in padded]))
            weight = torch.tensor([index >= 0 for index in chosen], device=fabric.device)
            for name, values in task.evaluate(model, examples, padded).items():
                sums[name] = sums.get(name, 0) + (values.double() * weight).sum()
    return {
        name: fabric.all_reduce(total, reduce_op="sum").item() / len(indices)
        for name, total in sums.items()
    }
