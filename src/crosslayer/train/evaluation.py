"""Evaluation on validation sets, and the metrics that follow from it, on any number of ranks."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import default_collate

from ..data.sources import ALL_SETS
from ..evaluation_mode import evaluation_mode
from ..losses import bits_per_byte, exp_or_inf
from .task import Examples, TrainingTask


class EvaluationStopped(Exception):
    """An evaluation ended before its last batch, because a rank was asked to stop."""


@torch.no_grad()
def evaluate_examples(
    fabric: Fabric,
    model: nn.Module,
    task: TrainingTask,
    dataset: Any,
    indices: list[int],
    batch: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Means of a task's metrics over examples of one validation set.

    Args:
        fabric: its ranks share the examples.
        model: set up by Fabric. It runs in evaluation mode.
        task: its `evaluate` gives each example's metrics.
        dataset: a validation set.
        indices: the examples, the same on every rank.
        batch: examples of a rank at once.
        should_stop: asked before each batch; the same answer on every rank.

    Raises:
        EvaluationStopped: the answer was True.
    """
    # Every rank evaluates the same number of full batches (FSDP's ranks must call the model
    # together): index -1 marks padding, whose weight is 0.
    rounds = -(-len(indices) // (batch * fabric.world_size))
    rank_indices = indices[fabric.global_rank :: fabric.world_size]
    rank_indices += [-1] * (rounds * batch - len(rank_indices))

    sums: dict[str, Tensor] = {}
    # the GPUs of a Mac have no float64
    dtype = torch.float32 if fabric.device.type == "mps" else torch.float64
    with evaluation_mode(model):
        for start in range(0, len(rank_indices), batch):
            if should_stop():
                raise EvaluationStopped
            chosen = rank_indices[start : start + batch]
            padded = [max(index, 0) for index in chosen]
            examples = fabric.to_device(default_collate([dataset[index] for index in padded]))
            weight = torch.tensor([index >= 0 for index in chosen], device=fabric.device)
            for name, values in task.evaluate(model, examples, padded).items():
                sums[name] = sums.get(name, 0) + (values.to(dtype) * weight).sum()
    return {
        name: fabric.all_reduce(total, reduce_op="sum").item() / len(indices)
        for name, total in sums.items()
    }


def summarise_metrics(
    examples: Examples, evaluation: dict[str, dict[str, float]]
) -> dict[str, float]:
    """Metrics of an evaluation besides the first validation set's loss, like perplexity.

    Those of the second set and later ones carry its name: "pile loss", "pile perplexity". Means
    over sets, each counting the same, carry the name of their group: "V2 perplexity" is the mean
    of the perplexities of the sets of V2. Several sets are a group called "mean".
    """
    of_sets = {name: _set_metrics(examples, name, values) for name, values in evaluation.items()}
    metrics = {}
    for number, (name, values) in enumerate(of_sets.items()):
        label = f"{name} " if number else ""
        for key, value in values.items():
            if number or key != "loss":
                metrics[label + key] = value

    groups = dict(examples.valid_groups)
    if len(of_sets) > 1 and ALL_SETS not in of_sets:
        groups[ALL_SETS] = list(of_sets)
    for group, names in groups.items():
        for key in of_sets[names[0]]:
            mean = statistics.fmean(of_sets[name][key] for name in names)
            metrics[f"{group} {key}"] = mean
    return metrics


def _set_metrics(examples: Examples, name: str, values: dict[str, float]) -> dict[str, float]:
    """The metrics of one validation set, and what follows from its loss."""
    metrics = dict(values)
    loss = values["loss"]
    # nobody quotes the perplexity of bytes, whose tokenizer has no definition
    if examples.tokenizer is not None and examples.tokenizer.definition:
        metrics["perplexity"] = exp_or_inf(loss)
    if name in examples.bytes_per_token:
        metrics["bits/byte"] = bits_per_byte(loss, examples.bytes_per_token[name])
    return metrics
