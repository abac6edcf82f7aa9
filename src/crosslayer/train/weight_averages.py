"""An exponential moving average of the weights, which is evaluated in their place.

The averages are part of the optimizers' states. They are therefore sharded, saved and resumed with
these, and the weights that are trained do not depend on them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..fsdp import sharded_modules
from ..validation import HALF_DTYPES

AVERAGE_KEY = "average"  # in a parameter's optimizer state


def track_averages(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Average the weights of an optimizer after each of its steps.

    average ← decay · average + (1 - decay) · weight. As in torch's `AveragedModel`, it begins as
    the weight after the first step.

    Raises:
        ValueError: a weight has half precision, in which such an average stands still.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dtype in HALF_DTYPES:
                raise ValueError(
                    f"ema needs float32 weights, got {parameter.dtype}; "
                    "choose precision bf16-mixed or 32-true"
                )
    update_averages = get_ema_multi_avg_fn(decay)

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        averages: list[Tensor] = []
        weights: list[Tensor] = []
        for parameter, state in optimizer.state.items():
            if AVERAGE_KEY in state:
                averages.append(state[AVERAGE_KEY])
                weights.append(parameter.detach())
            else:
                state[AVERAGE_KEY] = parameter.detach().clone()
        if averages:
            update_averages(averages, weights, None)

    optimizer.register_step_post_hook(after_step)


@contextmanager
def averaged_weights(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Iterator[None]:
    """Within this context the model has its averages for weights, if there are averages."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if AVERAGE_KEY in state:
                pairs.append((parameter.detach(), state[AVERAGE_KEY]))
    trained = [weight.clone() for weight, _ in pairs]
    # FSDP keeps the root's gathered weights after a forward pass without a backward
    sharded = sharded_modules(model) if pairs else []
    try:
        for module in sharded:
            module.reshard()
        for weight, average in pairs:
            weight.copy_(average)
        yield
    finally:
        for (weight, _), value in zip(pairs, trained, strict=True):
            weight.copy_(value)
        for module in sharded:
            module.reshard()
