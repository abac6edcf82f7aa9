"""What a language model loses without one weight of one mix.

The weight is α_ij of DenseFormer, A_ij of one way of MUDD for every token, p of attention residuals
and of MGR's pool, or the weight of a stream in an input for the other methods. It is set to zero
and the other weights keep their values: a softmax is not renormalised.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..connection import Connection, autocast_disabled, find_connections
from ..connections.denseformer import DenseFormer
from ..connections.mudd import Mudd
from .ablation import Removal, losses_without, ways_of_mixtures
from .mixing_summary import MixingAnalysis, SiteMixing, averaged_sources
from .observation import ModelInputs, SiteVisit, observe_model, site_label


class MixWeight(NamedTuple):
    """One weight of one mix.

    Attributes:
        mix: label of the mix, like "3.attn", "3.q" or "readout".
        source: label of what the weight is of, like "X_0" or "stream 1".
        removal: makes a context in which the weight is zero.
    """

    mix: str
    source: str
    removal: Removal


@dataclass
class SourceAblation:
    """Loss of a language model without each weight of its mixes.

    Attributes:
        loss: of the whole model, nats a token.
        mixes: labels, in the order of depth.
        sources: labels of what is mixed.
        increase: log(perplexity without / perplexity with), nats a token, [mixes sources]; NaN
            where there is no weight.
    """

    loss: float
    mixes: list[str]
    sources: list[str]
    increase: Tensor


def ablate_sources(
    model: nn.Module, batches: Sequence[ModelInputs], layers: Collection[int] | None = None
) -> SourceAblation | None:
    """The loss without each weight of each mix; None for a model without mixes.

    One pass over the batches a weight: L(L + 3)/2 of them for a DenseFormer of L layers, almost
    four times as many for MUDD. One batch is often enough, because the losses are of the same
    tokens.

    Args:
        model: a language model, connected.
        batches: with `input_ids`, and an `attention_mask` where some are padded.
        layers: whose mixes lose weights, the number of layers for the readout; None for all.
    """
    weights = find_mix_weights(model, batches[:1], layers)
    if not weights:
        return None
    mixes = list(dict.fromkeys(weight.mix for weight in weights))
    names = dict.fromkeys(weight.source for weight in weights)
    sources = sorted(names, key=lambda name: int(re.findall(r"\d+", name)[-1]))
    increase = torch.full((len(mixes), len(sources)), torch.nan, dtype=torch.float64)
    loss, losses = losses_without(model, batches, [weight.removal for weight in weights])
    for weight, without in zip(weights, losses, strict=True):
        increase[mixes.index(weight.mix), sources.index(weight.source)] = without - loss
    return SourceAblation(loss, mixes, sources, increase)


def find_mix_weights(
    model: nn.Module, batches: Iterable[ModelInputs], layers: Collection[int] | None = None
) -> list[MixWeight]:
    """The weights of all mixes of some layers, or of all, in the order of depth.

    Methods that weigh channels separately have none: a single number says little there.

    Args:
        model: connected.
        batches: any, for one pass of the model.
        layers: whose mixes, the number of layers for the readout; None for all.
    """
    connections = find_connections(model)
    if not connections or connections[-1].weighs_channels:
        return []
    analysis = MixingAnalysis()
    observe_model(model, batches, [analysis])
    weights: list[MixWeight] = []
    for connection, site in zip(connections, analysis.result(), strict=True):
        if site.is_mix and (layers is None or connection.site.layer in layers):
            weights += _weights_of_site(connection, site)
    return weights


def _weights_of_site(connection: Connection[Any], site: SiteMixing) -> Iterator[MixWeight]:
    sources = [f"X_{block}" for block in averaged_sources(connection)]
    if isinstance(connection, DenseFormer):
        for place, source in enumerate(sources):
            yield MixWeight(site.label, source, partial(_without_alpha, connection, place))
    elif isinstance(connection, Mudd):
        for way, mix in enumerate(_way_labels(connection)):
            for place, source in enumerate(sources):
                removal = partial(_without_aggregation, connection, way, place)
                yield MixWeight(mix, source, removal)
    else:
        for part, source in enumerate(site.parts):
            yield MixWeight(site.label, source, partial(_without_part, connection, part))


def _way_labels(connection: Mudd) -> list[str]:
    """Like "3.q" or "3.qkv", by the streams that each mixture feeds."""
    if connection.is_readout:
        return [site_label(connection)]
    return [f"{connection.site.layer}.{ways}" for ways in ways_of_mixtures(connection)]


@contextmanager
def _without_alpha(connection: DenseFormer, place: int) -> Iterator[None]:
    assert connection.alpha is not None
    before = connection.alpha[place].item()
    connection.alpha[place] = 0
    try:
        yield
    finally:
        connection.alpha[place] = before


@contextmanager
def _without_aggregation(connection: Mudd, way: int, place: int) -> Iterator[None]:
    write_and_weigh = connection.write_and_weigh

    def weigh_others(h: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        X_l, A = write_and_weigh(h, y)
        A = A.clone()
        A[..., way, place] = 0
        return X_l, A

    connection.write_and_weigh = weigh_others  # type: ignore[method-assign]
    try:
        yield
    finally:
        del connection.write_and_weigh


@contextmanager
def _without_part(connection: Connection[Any], part: int) -> Iterator[None]:
    def read_others(module: nn.Module, arguments: Any, outputs: Any) -> Any:
        state = arguments[0]
        visit = SiteVisit(connection, state, torch.zeros(0), torch.zeros(0))
        with autocast_disabled(state):
            x = visit.inputs[0]
            read = visit.weights.read
            x = x - (read[..., 0, part, :] * visit.written[:, part]).view(x.shape).to(x.dtype)
            if isinstance(outputs, Tensor):  # asked for the hidden state, before its norm
                return x
            return connection.apply_port_norms(x), visit.next_state

    with connection.register_forward_hook(read_others):
        yield
