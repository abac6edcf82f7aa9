"""`connect`: any transformers model of a known family, with another connection."""

import copy
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ..connection import Connection, Site, plan
from ..registry import Factory, make
from .families import FAMILIES, Family
from .modules import Body, Borrowed, CopiedNorm, FusedProjection, Layer, Readout, become, take
from .reallocate import reallocate as widen
from .reallocate import widths

Model = TypeVar("Model", bound=PreTrainedModel)


def connect(model: Model, connection: str | Factory, reallocate: bool = False) -> Model:
    """Replace what connects the layers of `model`, in place, and return it.

    Its classes, module paths and state-dict keys stay; the connection's parameters are added beneath each layer
    (`…layers.3.connections.0.W1`) and the final norm, float32. `model.config.crosslayer` names the connection, so that
    `save_pretrained` and `from_pretrained` go on working. Where the method starts as PreNorm, so does the model.

    Args:
        model: a transformers model of a family in `crosslayer.hf.families`, on any device, meta included.
        connection: like "mudd(dilation=2)", or what `make` returns.
        reallocate: for training from scratch, let the MLPs' hidden widths grow with depth from half to one and a half
            times the config's, with new weights (MUDD, Eq. 9; the total stays within half a percent).
            `model.config.crosslayer_widths` lists them; a config that has this key already says the widths itself.

    Raises:
        ValueError: the connection, an option or the family is unknown, or the model is connected already. The model is
            then as it was.
    """
    factory = make(connection) if isinstance(connection, str) else connection
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"connect takes a transformers model, got {type(model).__name__}; "
            "in a model of your own, call the four verbs (see crosslayer.connection)"
        )
    body: Any = model.base_model
    family = FAMILIES.get(body.config.model_type)
    if family is None or not hasattr(body, family.layers):
        raise ValueError(
            f"connect does not know the family {body.config.model_type!r}; it knows {', '.join(FAMILIES)}; "
            "in any other model, call the four verbs (see crosslayer.connection)"
        )
    if Body in type(body).__mro__:
        raise ValueError(f"the model is connected already, with {body.config.crosslayer!r}")

    layers, final = getattr(body, family.layers), getattr(body, family.final)
    parallel = bool(family.parallel and getattr(body.config, family.parallel))
    *sites, out = plan(len(layers), parallel)
    # everything that can fail comes before anything of the model is changed
    inner = [[build(factory, s, body, layer, family) for s in sites if s.layer == i] for i, layer in enumerate(layers)]
    with torch.device(next(final.parameters()).device):
        # the final norm is lent to the first port once it has become the readout
        readout = factory(out, body.config.hidden_size, lambda port: nn.Identity() if port == "out" else own(final))

    if reallocate:
        found = widths(len(layers), body.config.intermediate_size)
        model.config.crosslayer_widths = body.config.crosslayer_widths = found
    if getattr(body.config, "crosslayer_widths", None) is not None:
        widen(body, family, body.config.crosslayer_widths)
    for layer, connections in zip(layers, inner, strict=True):
        layer.connections, layer.family = nn.ModuleList(connections).train(layer.training), family
        become(layer, Layer)
        if any("q" in connection.ports for connection in connections):
            part_ports(getattr(layer, family.attn.module), family, body.config.num_attention_heads)
    become(final, Readout)
    final.connection = readout.train(final.training)
    readout.norms[0] = Borrowed(final.host_norm)
    become(body, Body)
    model.config.crosslayer = body.config.crosslayer = str(factory)
    return model


def build(factory: Factory, site: Site, body: PreTrainedModel, layer: nn.Module, family: Family) -> Connection:
    """A connection that borrows its layer's norms; where k and v are fed apart each gets a copy of the attention's."""

    def norm(port: str) -> nn.Module:
        host = getattr(layer, (family.mlp if port == "mlp" else family.attn).norm)
        return own(host) if port in ("k", "v") else Borrowed(host)

    with torch.device(next(layer.parameters()).device):
        return factory(site, body.config.hidden_size, norm)


def own(host: nn.Module) -> nn.Module:
    """A copy of a host's norm, with weights of its own."""
    norm: Any = copy.deepcopy(host)
    become(norm, CopiedNorm)
    norm.origin = (host,)
    return norm


def part_ports(attention: nn.Module, family: Family, heads: int) -> None:
    """Let the attention's projections take q's, k's and v's inputs apart."""
    if len(family.qkv) == 1:
        fused = getattr(attention, family.qkv[0])
        fused.heads = heads
        become(fused, FusedProjection)
    else:
        for index, name in enumerate(family.qkv):
            getattr(attention, name).register_forward_pre_hook(partial(take, index))
