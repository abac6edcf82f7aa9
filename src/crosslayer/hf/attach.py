"""Connect the layers of a backbone: what `connect` and the loading of saved models share."""

import inspect
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ..class_swap import swap_class
from ..connection import Connection, NormFactory, Site, plan
from ..spec import ConnectionSpec
from .families import FAMILIES, Family
from .layers import (
    ConnectedLayer,
    ConnectedModel,
    FinalNormReference,
    NormReference,
    copy_norm,
    make_readout,
)
from .mlp_widths import set_mlp_widths
from .qkv import split_qkv_inputs

FAMILY_TEMPLATE = """
    from crosslayer.hf.families import FAMILIES, Family, Sublayer

    FAMILIES["{name}"] = Family(
        # names within a layer: the module, and the norm before it
        attn=Sublayer("self_attn", norm="input_layernorm"),
        mlp=Sublayer("mlp", norm="post_attention_layernorm"),  # after=("dropout",) for its output
        qkv=("q_proj", "k_proj", "v_proj"),  # within the attention
        layers="layers",  # within the model: its list of layers ...
        final="norm",  # ... and its final norm
    )
"""


def attach_connections(
    backbone: Any, family: Family, spec: ConnectionSpec, mlp_widths: list[int] | None
) -> None:
    """Connect the layers of a backbone, in place.

    Args:
        backbone: the module that owns the layers.
        family: its row.
        spec: the connection.
        mlp_widths: a hidden width for each layer's MLP, with new weights; None to leave the MLPs
            alone.

    Raises:
        ValueError: an option has a wrong value, or the model is dispatched by accelerate. The
            backbone is then unchanged.
    """
    config: Any = getattr(backbone, "config", None)
    layers = backbone.get_submodule(family.layers)
    final = backbone.get_submodule(family.final)

    # Build all connections first. Whatever can fail does so before the model changes.
    check_not_dispatched(*layers, final)
    is_parallel = bool(family.parallel and getattr(config, family.parallel))
    dim = attrgetter(family.width)(backbone)
    *sites, readout_site = plan(len(layers), is_parallel)
    connections_of_layer: list[list[Connection[Any]]] = [[] for _ in layers]
    for site in sites:
        layer = layers[site.layer]
        connections_of_layer[site.layer].append(
            _make_on_device(spec, site, dim, _host_norms(layer, family), layer)
        )
    if connections_of_layer[0][0].output_scale != 1 and not family.attn.output_projection:
        raise ValueError(
            f"{spec}: output_scale needs a family whose row names output projections "
            "that no norm follows"
        )
    readout = _make_on_device(spec, readout_site, dim, _readout_norms(backbone, final), backbone)

    if mlp_widths is not None:
        set_mlp_widths(backbone, family, mlp_widths)
    for layer, connections in zip(layers, connections_of_layer, strict=True):
        layer.connections = nn.ModuleList(connections).train(layer.training)
        layer.family = family
        layer.argument_names = tuple(inspect.signature(layer.forward).parameters)[1:]
        swap_class(layer, ConnectedLayer)
        if any("q" in connection.ports for connection in connections):
            fused = None if family.fused is None else family.fused(config)
            split_qkv_inputs(getattr(layer, family.attn.module), family.qkv, fused)
    make_readout(final, readout)
    swap_class(backbone, ConnectedModel)
    backbone.connection_spec = str(spec)
    backbone.family = family
    set_config_keys(backbone, crosslayer=str(spec), crosslayer_widths=mlp_widths)


def find_backbone(model: Any) -> tuple[Any, Family]:
    """The module that owns a model's layers, and the row of its family.

    Raises:
        ValueError: the family is unknown. The error shows the row to add.
    """
    host = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside PEFT's
    backbone: Any = getattr(host, "base_model", host)
    name = getattr(getattr(backbone, "config", None), "model_type", None)
    name = name or type(backbone).__name__
    family = FAMILIES.get(name)
    paths = dict(backbone.named_modules()) if family else {}
    if family is None or not (family.layers in paths and family.final in paths):
        raise ValueError(
            f"connect does not know the family {name!r}; it knows {', '.join(FAMILIES)}. "
            "In your own model, use crosslayer.Stack or the four verbs of crosslayer.connection. "
            "For a model with pre-norm layers, add one row:\n" + FAMILY_TEMPLATE.format(name=name)
        )
    return backbone, family


def is_connected(backbone: Any) -> bool:
    return isinstance(backbone, ConnectedModel)


def is_adapted(model: Any) -> bool:
    """Whether PEFT has put adapters into a model."""
    return hasattr(model, "peft_config")


def set_config_keys(model: Any, **keys: Any) -> None:
    """Set keys in a model's config, if it has one, to be saved with it. None removes a key."""
    if is_diffusers_model(model):  # Its config is frozen.
        config = {**model.config, **keys}
        config = {key: value for key, value in config.items() if value is not None}
        model._internal_dict = type(model.config)(config)
        return
    if not hasattr(model, "config"):
        return
    for key, value in keys.items():
        if value is None:
            vars(model.config).pop(key, None)
        else:
            setattr(model.config, key, value)


def check_not_dispatched(*modules: nn.Module) -> None:
    """Raise a ValueError where accelerate has put its own `forward` on a module.

    It would hide the `forward` of the swapped class.
    """
    if any("forward" in vars(module) for module in modules):
        raise ValueError(
            "the model is already dispatched, with hooks on its layers; "
            "connect it first, then dispatch"
        )


def is_diffusers_model(model: Any) -> bool:
    return hasattr(model, "register_to_config")


def _host_norms(layer: nn.Module, family: Family) -> NormFactory:
    """The norms of a layer's ports: references to the host's, and copies of it for k and v."""

    def norm(port: str) -> nn.Module:
        sublayer = family.mlp if port == "mlp" else family.attn
        if sublayer.norm is not None and port in ("k", "v"):
            return copy_norm(layer.get_submodule(sublayer.norm), layer, sublayer.norm)
        return NormReference(layer, sublayer.norm)

    return norm


def _readout_norms(backbone: nn.Module, final: nn.Module) -> NormFactory:
    """The norms of the readout: a reference to the host's final norm; copies for more ports."""

    def norm(port: str) -> nn.Module:
        if port == "out":
            return FinalNormReference(backbone, final)
        return copy_norm(final, backbone)

    return norm


def _make_on_device(
    spec: ConnectionSpec, site: Site, dim: int, norm: NormFactory, like: nn.Module
) -> Connection[Any]:
    """A connection on the device of `like`.

    Its own parameters are float32, or float64 in a float64 model.
    """
    parameter = next(like.parameters())
    with torch.device(parameter.device):
        connection = spec(site, dim, norm)
    return connection.double() if parameter.dtype == torch.float64 else connection
