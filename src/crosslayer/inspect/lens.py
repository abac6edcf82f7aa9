"""What each depth already predicts, and what each depth learns from.

The lens reads a model out at every site, as if it were the last: the site's input through the final
norm and the head. Gradients are those of Multi-Gate Residuals (arXiv 2605.23259), Figure 2.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..connection import find_connections
from ..hf.attach import find_backbone
from .moments import RunningMoments
from .observation import (
    Batch,
    SiteVisit,
    connected_for_analysis,
    evaluation_mode,
    site_label,
    visited_sites,
)


@dataclass
class SiteLosses:
    """Loss of the next token where a model is read out at each site.

    Attributes:
        labels: of the sites, the readout last.
        losses: nats a token.
    """

    labels: list[str]
    losses: list[float]


@dataclass
class BlockGradients:
    """√mean(g²) over the parameters of each layer, where g is of the mean loss of all tokens."""

    rms: list[float]


class _LensAnalysis:
    """Reads out at every site of one batch."""

    def __init__(self, model: Any):
        self.model = model
        self.readout = find_connections(model)[-1]
        self.losses: dict[str, RunningMoments] = {}
        self.targets = torch.zeros(0)  # [N]; −100 where a token has no next one

    def visit_site(self, visit: SiteVisit) -> None:
        hidden = self.readout.apply_port_norms(visit.inputs[0])[0][0]
        logits = self.model.get_output_embeddings()(hidden.to(self.model.dtype)).float()
        losses = F.cross_entropy(logits, self.targets, reduction="none")
        moments = self.losses.setdefault(site_label(visit.connection), RunningMoments())
        moments.add(losses[self.targets >= 0])


@torch.no_grad()
def measure_site_losses(model: Any, batches: Iterable[Batch]) -> SiteLosses:
    """The loss at every site.

    Args:
        model: a language model of a family that `connect` knows, connected or not, whose readout
            has one norm.
        batches: with `input_ids`, and an `attention_mask` where some are padded.
    """
    backbone, _ = find_backbone(model)
    device = next(model.parameters()).device
    with connected_for_analysis(model), evaluation_mode(model):
        analysis = _LensAnalysis(model)
        for batch in batches:
            ids = batch["input_ids"].to(device)
            mask = batch.get("attention_mask", torch.ones_like(ids)).to(device)
            analysis.targets = _next_tokens(ids, mask)[mask.bool()]
            with visited_sites(model, mask, [analysis]):
                backbone(input_ids=ids, attention_mask=mask, use_cache=False)
    labels = list(analysis.losses)
    return SiteLosses(labels, [analysis.losses[label].mean.item() for label in labels])


def measure_block_gradients(model: Any, batches: Iterable[Batch]) -> BlockGradients:
    """The size of each layer's gradient, from one backward pass over the batches.

    Gradients that the parameters had before are restored.

    Args:
        model: a language model of a family that `connect` knows.
        batches: with `input_ids`, and an `attention_mask` where some are padded.
    """
    backbone, family = find_backbone(model)
    device = next(model.parameters()).device
    before = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    try:
        with evaluation_mode(model), torch.enable_grad():
            tokens = 0
            for batch in batches:
                ids = batch["input_ids"].to(device)
                mask = batch.get("attention_mask", torch.ones_like(ids)).to(device)
                logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
                targets = _next_tokens(ids, mask).flatten()
                tokens += int((targets >= 0).sum())
                logits = logits.flatten(0, 1).float()
                F.cross_entropy(logits, targets, reduction="sum").backward()
        layers = getattr(backbone, family.layers)
        return BlockGradients([_gradient_rms(layer) / max(tokens, 1) for layer in layers])
    finally:
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            parameter.grad = gradient


def _next_tokens(ids: Tensor, mask: Tensor) -> Tensor:
    """The next token of each, −100 where there is none."""
    targets = torch.full_like(ids, -100)
    has_next = (mask[:, :-1] * mask[:, 1:]).bool()
    targets[:, :-1] = torch.where(has_next, ids[:, 1:], -100)
    return targets


def _gradient_rms(layer: nn.Module) -> float:
    gradients = [p.grad.flatten().double() for p in layer.parameters() if p.grad is not None]
    return torch.cat(gradients).square().mean().sqrt().item()
