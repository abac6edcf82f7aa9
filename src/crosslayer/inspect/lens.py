"""What each depth already predicts, and what each depth learns from.

The lens reads a model out at every site, as if it were the last: the site's input, or the stream r
where q, k and v are mixed separately, through the final norm and the head. Gradients are those of
Multi-Gate Residuals (arXiv 2605.23259), Figure 2.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..connection import find_connections
from ..evaluation_mode import evaluation_mode
from ..hf.attach import find_backbone
from .moments import RunningMoments
from .observation import (
    ModelInputs,
    SiteVisit,
    connected_for_analysis,
    model_arguments,
    run_headless_model,
    site_label,
    visited_sites,
)
from .scoring import (
    NO_TARGET,
    check_scored,
    find_head,
    has_next_tokens,
    score_logits,
    score_targets,
)

_LENS_ROUNDING = 5e-4  # of a loss plus one


@dataclass
class SiteLosses:
    """Loss of the next token, or of an image's class, where a model is read out at each site.

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
    """The loss at every site, over the batches that it is shown."""

    def __init__(self, model: Any):
        self.head = find_head(model)
        parameters = (*self.head.parameters(), *model.parameters())  # a head may be quantised
        self.dtype = next(p.dtype for p in parameters if p.is_floating_point())
        self.readout = find_connections(model)[-1]
        if len(self.readout.norms) != 1:
            raise ValueError(
                f"{self.readout.name} reads out by {len(self.readout.norms)} norms, not by one"
            )
        if getattr(self.head, "in_features", self.readout.dim) != self.readout.dim:
            raise ValueError(
                f"the head of {type(model).__name__} reads something else than the hidden state"
            )
        self.losses: dict[str, RunningMoments] = {}
        self.targets = torch.zeros(0)  # of the tokens that have one
        self.is_scored: Tensor | None = None  # [N], which tokens these are; None for the answers

    def visit_site(self, visit: SiteVisit) -> None:
        is_scored = visit.answers if self.is_scored is None else self.is_scored
        hidden = visit.hidden.to(visit.inputs[0].dtype)[None]
        if not self.readout.norms_its_stream:
            (hidden,) = self.readout.apply_port_norms(hidden)
        hidden = hidden[0]
        logits = self.head(hidden[is_scored].to(self.dtype)).float()
        losses = F.cross_entropy(logits, self.targets, reduction="none")
        moments = self.losses.setdefault(site_label(visit.connection), RunningMoments())
        moments.add(losses)

    def check_readout(self, model: Any, batch: ModelInputs) -> None:
        """Raise a ValueError where the model's own loss of the only batch so far is another.

        Logits may be scaled or capped after the head, and a head may have more than one matrix.
        """
        logits, targets = score_logits(model, batch)
        expected = F.cross_entropy(logits, targets).item()
        found = self.losses[site_label(self.readout)].mean.item()
        if abs(found - expected) > _LENS_ROUNDING * (1 + expected):
            raise ValueError(
                f"{type(model).__name__} does more than its head to a hidden state: its loss is "
                f"{expected:.4f}, and {found:.4f} by the final norm and the head alone"
            )


@torch.no_grad()
def measure_site_losses(model: Any, batches: Iterable[ModelInputs]) -> SiteLosses:
    """The loss at every site.

    Args:
        model: a language model or a classifier of a family that `connect` knows, connected or not,
            whose readout has one norm.
        batches: with `input_ids`, and an `attention_mask` where some are padded; or with
            `pixel_values` and `labels`.

    Raises:
        ValueError: the model has no head, its logits are no function of the hidden state by one
            norm and the head alone, or no token has a next one.
    """
    device = next(model.parameters()).device
    with connected_for_analysis(model), evaluation_mode(model):
        analysis = _LensAnalysis(model)
        for batch in batches:
            arguments = model_arguments(batch, device)
            targets = score_targets(batch).to(device)
            has_target = targets != NO_TARGET
            analysis.targets = targets[has_target]
            if has_next_tokens(batch):
                mask = arguments.get("attention_mask", torch.ones_like(targets))
                analysis.is_scored = has_target[mask.bool()]
            if not has_target.any():
                continue
            is_first = not analysis.losses
            with visited_sites(model, arguments, [analysis]):
                run_headless_model(model, arguments)
            if is_first:
                analysis.check_readout(model, batch)
    check_scored(len(analysis.losses))
    labels = list(analysis.losses)
    return SiteLosses(labels, [analysis.losses[label].mean.item() for label in labels])


def measure_block_gradients(model: Any, batches: Iterable[ModelInputs]) -> BlockGradients:
    """The size of each layer's gradient, from one backward pass over the batches.

    Frozen parameters have gradients too. Gradients that the parameters had before are restored.

    Args:
        model: a language model or a classifier of a family that `connect` knows.
        batches: with `input_ids`, and an `attention_mask` where some are padded; or with
            `pixel_values` and `labels`.

    Raises:
        ValueError: no token has a next one.
    """
    backbone, wiring = find_backbone(model)
    before = [(parameter.grad, parameter.requires_grad) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
        parameter.requires_grad_(parameter.is_floating_point())
    count = 0
    try:
        with evaluation_mode(model), torch.enable_grad():
            for batch in batches:
                logits, targets = score_logits(model, batch)
                F.cross_entropy(logits, targets, reduction="sum").backward()
                count += len(targets)
        check_scored(count)
        layers = wiring.find_layers(backbone)
        return BlockGradients([_gradient_rms(layer) / count for layer in layers])
    finally:
        for parameter, (gradient, learns) in zip(model.parameters(), before, strict=True):
            parameter.requires_grad_(learns)
            parameter.grad = gradient


def _gradient_rms(layer: nn.Module) -> float:
    gradients = [p.grad.flatten().double() for p in layer.parameters() if p.grad is not None]
    return torch.cat(gradients).square().mean().sqrt().item()
