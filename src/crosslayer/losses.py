"""Losses of language models: cross-entropy of the next token, and a router's z-loss; and their
other units.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross-entropy of the next token, plus a router's auxiliary losses if the backbone has them.

    tokens: [B T + 1].
    """
    output = model(input_ids=tokens[:, :-1], use_cache=False)
    loss = cross_entropy(output.logits, tokens[:, 1:]).mean()
    config: Any = getattr(model, "config", None)
    if getattr(output, "aux_loss", None) is not None:
        loss = loss + config.router_aux_loss_coef * output.aux_loss
    z_loss_weight = getattr(config, "router_z_loss_coef", 0.0)
    if z_loss_weight and output.router_logits:
        loss = loss + z_loss_weight * router_z_loss(output.router_logits)
    return loss


def router_z_loss(router_logits: Sequence[Tensor]) -> Tensor:
    """The mean of logsumexp² over tokens and layers: ST-MoE (arXiv 2202.08906), Eq. 5.

    router_logits: of each layer, [tokens experts].
    """
    of_layers = [logits.float().logsumexp(-1).square().mean() for logits in router_logits]
    return torch.stack(of_layers).mean()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats. logits [B … classes], targets [B …] -> [B …]."""
    losses = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """A loss in bits per byte of text. loss: in nats a token."""
    return loss / math.log(2) / bytes_per_token


def exp_or_inf(x: float) -> float:
    """e^x, or infinity: the perplexity of an untrained model's words, or of a diverged run, may be
    no float.
    """
    return math.inf if x >= 700 else math.exp(x)
