"""What a model loses without one of its parts.

Papers: Multi-Gate Residuals (arXiv 2605.23259, Figure 4), DenseFormer (arXiv 2402.02622, Figure 7).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..connection import find_connections
from ..connections.denseformer import DenseFormer
from ..connections.mgr import MGR
from ..connections.mudd import Mudd
from ..evaluation_mode import evaluation_mode
from ..hf.attach import find_backbone
from ..hf.host_norms import find_attribute
from ..losses import exp_or_inf
from .observation import ModelInputs, connected_for_analysis, layer_label, port_label
from .scoring import check_scored, score_logits

# makes a context in which the model is without one of its parts
Removal = Callable[[], AbstractContextManager[Any]]


@dataclass
class PartAblation:
    """Loss of a language model, or of a classifier of images, without each sub-layer or way.

    "Without" means that the sub-layer's output y is zero. The connection handles this zero as any
    output: a stream that is gated towards y shrinks.

    Attributes:
        loss: of the whole model, nats a token.
        labels: of the sub-layers, or of MUDD's ways. Sub-layers whose output becomes a new stream
            (the first n − 1 of MGR) are left out: a stream of zeros is no model without the
            sub-layer. Modules that two layers share are left out too.
        increase: log(perplexity without / perplexity with) of each, nats a token.
    """

    loss: float
    labels: list[str]
    increase: list[float]


@dataclass
class BlockAblation:
    """Perplexity of a language model without each block: the outputs of its sub-layers are zero.

    Attributes:
        perplexity: of the whole model.
        labels: of the blocks. Left out are those of which MGR appends an output as a stream, and
            those with a module that another layer has, too.
        increase: ΔPPL, the perplexity without a block less that of the whole model.
    """

    perplexity: float
    labels: list[str]
    increase: list[float]


@dataclass
class PruningCurve:
    """Loss against the share of the smallest weights over depth that are set to zero."""

    shares: list[float]
    losses: list[float]


def ablate_sublayers(model: nn.Module, batches: Sequence[ModelInputs]) -> PartAblation:
    """The loss without each sub-layer: one pass over the batches a sub-layer.

    Args:
        model: a language model or a classifier of a family that `connect` knows, connected or not.
        batches: with `input_ids`, and an `attention_mask` where some are padded; or with
            `pixel_values` and `labels`.
    """
    return _ablate_parts(model, batches, sublayer_removals(model))


def ablate_blocks(model: nn.Module, batches: Sequence[ModelInputs]) -> BlockAblation:
    """The perplexity without each block: one pass over the batches a block.

    Args:
        model: a language model of a family that `connect` knows, connected or not.
        batches: with `input_ids`, and an `attention_mask` where some are padded.
    """
    removals = block_removals(model)
    loss, losses = losses_without(model, batches, [removal for _, removal in removals])
    perplexity = exp_or_inf(loss)
    increases = [exp_or_inf(without) - perplexity for without in losses]
    return BlockAblation(perplexity, [label for label, _ in removals], increases)


def ablate_ways(model: nn.Module, batches: Sequence[ModelInputs]) -> PartAblation | None:
    """The loss without each mixture of MUDD: the ways it feeds read X_l, as in a plain residual.

    None for a model without ways.

    Args:
        model: a language model, connected with mudd.
        batches: with `input_ids`, and an `attention_mask` where some are padded.
    """
    removals = way_removals(model)
    return _ablate_parts(model, batches, removals) if removals else None


def _ablate_parts(
    model: nn.Module, batches: Sequence[ModelInputs], removals: Sequence[tuple[str, Removal]]
) -> PartAblation:
    loss, losses = losses_without(model, batches, [removal for _, removal in removals])
    labels = [label for label, _ in removals]
    return PartAblation(loss, labels, [without - loss for without in losses])


@torch.no_grad()
def losses_without(
    model: nn.Module, batches: Sequence[ModelInputs], removals: Iterable[Removal]
) -> tuple[float, list[float]]:
    """The loss, and the loss while each removal is entered: one pass over the batches each.

    A model without a connection is connected meanwhile: modules like BLOOM's attention add the
    stream to their output themselves, and a connection asks them not to.

    Args:
        model: a language model or a classifier.
        batches: as in `mean_token_loss`, which says what the losses are.
        removals: of the model's parts, each entered alone.
    """
    losses = []
    with connected_for_analysis(model), evaluation_mode(model):
        whole = mean_token_loss(model, batches)
        for removal in removals:
            with removal():
                losses.append(mean_token_loss(model, batches))
    return whole, losses


def sublayer_removals(model: nn.Module) -> list[tuple[str, Removal]]:
    """The sub-layers that can be removed: their labels, and contexts in which they write zero."""
    found = _removable_sublayers(model)
    return [(output.label, partial(_zero_outputs, [output.module])) for output in found]


def block_removals(model: nn.Module) -> list[tuple[str, Removal]]:
    """The blocks of which all sub-layers can be removed: their labels, and such contexts."""
    _, wiring = find_backbone(model)
    blocks: dict[int, list[nn.Module]] = {}
    for output in _removable_sublayers(model):
        blocks.setdefault(output.layer, []).append(output.module)
    return [
        (str(layer), partial(_zero_outputs, modules))
        for layer, modules in blocks.items()
        if len(modules) == len(wiring.of_layers[layer].sublayers)
    ]


def way_removals(model: nn.Module) -> list[tuple[str, Removal]]:
    """The ways that each mixture of MUDD feeds, like "qk", and contexts in which they read X_l."""
    sites = [site for site in find_connections(model) if isinstance(site, Mudd)]
    of_sites = [ways_of_mixtures(site) for site in sites]
    ways = max(of_sites, key=len, default=[])  # an MLP or the readout may have fewer
    return [(way, partial(_without_way, sites, way)) for way in ways]


class _SublayerOutput(NamedTuple):
    """Where a sub-layer's output can be taken away.

    Attributes:
        layer: of the sub-layer.
        label: like "3.mlp".
        module: the last one that this output alone passes.
    """

    layer: int
    label: str
    module: nn.Module


def _removable_sublayers(model: nn.Module) -> list[_SublayerOutput]:
    """The outputs of sub-layers, without modules that two layers share: neither of these can be
    removed alone.
    """
    found = list(_find_outputs(model))
    uses = Counter(id(output.module) for output in found)
    return [output for output in found if uses[id(output.module)] == 1]


def _find_outputs(model: nn.Module) -> Iterator[_SublayerOutput]:
    """`_removable_sublayers`, with shared modules."""
    backbone, wiring = find_backbone(model)
    appended = _appended_writes(model)
    site = 0
    for number, layer in enumerate(wiring.find_layers(backbone)):
        layer_wiring = wiring.of_layers[number]
        steps = Counter(
            step for sublayer in layer_wiring.sublayers for step in sublayer.paths_after
        )
        labels_before: Counter[str] = Counter()
        for sublayers in layer_wiring.sites:
            for sublayer in sublayers:
                name = port_label(sublayer.port)
                label = layer_label(number, labels_before[name], name)
                labels_before[name] += 1
                if site in appended:
                    continue
                path = sublayer.module
                for step in sublayer.paths_after:
                    # ViT's attention and MLP pass the same dropout. BEiT's scales are parameters.
                    if steps[step] == 1 and isinstance(find_attribute(layer, step), nn.Module):
                        path = step
                yield _SublayerOutput(number, label, layer.get_submodule(path))
            site += 1


def ways_of_mixtures(site: Mudd) -> list[str]:
    """The ways that each mixture of a site feeds, in their order."""
    ways = [""] * (0 if site.a is None else len(site.a))
    for way, mixture in site.mixture_of_way.items():
        if mixture is not None and ways:
            ways[mixture] += way
    return ways


@contextmanager
def _without_way(sites: Sequence[Mudd], ways: str) -> Iterator[None]:
    before = [(site.mixture_of_way, site.can_fuse_norms) for site in sites]
    for site in sites:
        site.mixture_of_way = site.mixture_of_way | dict.fromkeys(ways)
        site.can_fuse_norms = False  # X_l is no output of the op that mixes
    try:
        yield
    finally:
        for site, (mixtures, can_fuse) in zip(sites, before, strict=True):
            site.mixture_of_way = mixtures
            site.can_fuse_norms = can_fuse


@torch.no_grad()
def prune_depth_weights(
    model: nn.Module, batches: Sequence[ModelInputs], shares: Sequence[float]
) -> PruningCurve | None:
    """The loss with the smallest weights over depth set to zero, over the whole model.

    The weights are DenseFormer's α, or the static part a of MUDD. They are restored afterwards.
    None for a model without such weights.

    Args:
        model: a language model, connected with denseformer or mudd.
        batches: with `input_ids`.
        shares: of weights to set to zero, from 0 to 1.
    """
    weights = find_depth_weights(model)
    if not weights:
        return None
    saved = [weight.clone() for weight in weights]
    magnitudes = torch.cat([weight.abs().flatten() for weight in weights]).sort().values
    losses = []
    try:
        with evaluation_mode(model):
            for share in shares:
                pruned = round(share * len(magnitudes))
                limit = magnitudes[pruned - 1] if pruned else -1.0
                for weight, value in zip(weights, saved, strict=True):
                    weight.copy_(torch.where(value.abs() <= limit, 0, value))
                losses.append(mean_token_loss(model, batches))
    finally:
        for weight, value in zip(weights, saved, strict=True):
            weight.copy_(value)
    return PruningCurve(list(shares), losses)


def find_depth_weights(model: nn.Module) -> list[nn.Parameter]:
    """DenseFormer's α, or the static part a of MUDD, of every site that averages."""
    weights = []
    for connection in find_connections(model):
        weight = None
        if isinstance(connection, DenseFormer):
            weight = connection.alpha
        elif isinstance(connection, Mudd):
            weight = connection.a
        if weight is not None:
            weights.append(weight)
    return weights


@torch.no_grad()
def mean_token_loss(model: Any, batches: Iterable[ModelInputs]) -> float:
    """Cross-entropy of the next token, the mean over tokens that no mask excludes.

    Of images with `labels`, that of their class.

    Raises:
        ValueError: no token has a next one.
    """
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for batch in batches:
        logits, targets = score_logits(model, batch)
        total += F.cross_entropy(logits, targets, reduction="sum").cpu()
        count += len(targets)
    check_scored(count)
    return (total / count).item()


@contextmanager
def _zero_outputs(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Zeros for the output of each module, or for the first of its outputs."""

    def zero(_: nn.Module, __: Any, outputs: Any) -> Any:
        if isinstance(outputs, tuple | list):
            return (torch.zeros_like(outputs[0]), *outputs[1:])
        return torch.zeros_like(outputs)

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(zero))
        yield


def _appended_writes(model: nn.Module) -> set[int]:
    """The sub-layers whose outputs MGR appends as streams, by their number."""
    readers = [site for site in find_connections(model)[1:] if isinstance(site, MGR)]
    return {site.site.index - 1 for site in readers if not site.gates_pending_write}
