"""`connect`: any model of a known family, with another connection."""

import copy
import inspect
import warnings
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import nn

from ..class_swap import swap_class
from ..connection import Connection, NormFactory, Site, plan
from ..spec import ConnectionSpec, make
from .families import FAMILIES, Family
from .layers import (
    ConnectedLayer,
    ConnectedModel,
    FinalNormReference,
    NormReference,
    ReadoutNorm,
    copy_norm,
)
from .mlp_widths import growing_widths, mlp_hidden_width, set_mlp_widths
from .qkv import split_qkv_inputs

Model = TypeVar("Model", bound=nn.Module)

FAMILY_TEMPLATE = """
    from crosslayer.hf.families import FAMILIES, Family, Sublayer

    FAMILIES["{name}"] = Family(
        attn=Sublayer("self_attn", norm="input_layernorm"),  # names within a layer: the module, the norm before it
        mlp=Sublayer("mlp", norm="post_attention_layernorm"),  # after=("dropout",): what its output passes
        qkv=("q_proj", "k_proj", "v_proj"),  # names within the attention
        layers="layers",  # names within the model: its list of layers ...
        final="norm",  # ... and its final norm
    )
"""


def connect(model: Model, connection: str | ConnectionSpec, reallocate: bool = False) -> Model:
    """Replace what connects the layers of `model`, in place, and return it.

    Its classes, module paths and state-dict keys stay; the connection's parameters are added beneath each layer
    (`…layers.3.connections.0.W1`) and the final norm, float32. `model.config.crosslayer` names the connection, so that
    `save_pretrained` and `from_pretrained` go on working. Where the method starts as PreNorm, so does the model; where
    it does not and the model looks trained, a warning says so.

    Args:
        model: a model of a family in `crosslayer.hf.families`, on any device, meta included.
        connection: like "mudd(dilation=2)", or what `make` returns.
        reallocate: for training from scratch, let the MLPs' hidden widths grow with depth from half to one and a half
            times the config's, with new weights (MUDD, Eq. 9; the total stays within half a percent).

    Raises:
        ValueError: the connection, an option or the family is unknown, or the model is connected already. The model is
            then as it was.
    """
    factory = connection if isinstance(connection, ConnectionSpec) else make(connection)
    body, family = find_backbone(model)
    if is_connected(body):
        raise ValueError(f"the model is connected already, with {body.arm!r}")
    config: Any = getattr(body, "config", None)
    if factory.method.norms_its_stream and family.attn.norm is None:
        raise ValueError(
            f"{factory} norms its streams by the norms before sub-layers, which this family does not have"
        )
    if getattr(config, "add_cross_attention", False):
        raise ValueError(
            "connect knows layers of attention and MLP; this model's have cross-attention too"
        )
    widths = (
        growing_widths(len(getattr(body, family.layers)), mlp_hidden_width(body, family))
        if reallocate
        else None
    )
    reason = inequivalence_reason(factory.method, family)
    if reason and looks_pretrained(body, family):
        warnings.warn(
            f"{factory} {reason}: what this model has learnt is changed until it is trained on",
            stacklevel=2,
        )
    if model is not body and hasattr(model, "config"):
        unshare_config(model)
    attach_connections(body, family, factory, widths)
    set_config_keys(model, crosslayer=body.arm, crosslayer_widths=widths)
    return model


def attach_connections(
    body: Any, family: Family, factory: ConnectionSpec, widths: list[int] | None
) -> None:
    """Make a body's layers those of a connection; all that can fail comes before anything is changed."""
    config: Any = getattr(body, "config", None)
    layers, final = getattr(body, family.layers), getattr(body, family.final)
    check_not_dispatched(*layers, final)
    parallel = bool(family.parallel and getattr(config, family.parallel))
    dim = attrgetter(family.width)(body)
    *sites, out = plan(len(layers), parallel)
    inner = [
        [make_with_host_norms(factory, s, dim, layer, family) for s in sites if s.layer == i]
        for i, layer in enumerate(layers)
    ]
    # the final norm is lent to the first port once it has become the readout
    readout = make_on_device(
        factory,
        out,
        dim,
        lambda port: FinalNormReference(body, final) if port == "out" else copy_norm(final, body),
        body,
    )

    if widths is not None:
        set_mlp_widths(body, family, widths)
    for layer, connections in zip(layers, inner, strict=True):
        layer.connections, layer.family = nn.ModuleList(connections).train(layer.training), family
        layer.arguments = tuple(inspect.signature(layer.forward).parameters)[1:]
        swap_class(layer, ConnectedLayer)
        if any("q" in connection.ports for connection in connections):
            split_qkv_inputs(
                getattr(layer, family.attn.module),
                family.qkv,
                family.fused and family.fused(config),
            )
    swap_class(final, ReadoutNorm)
    final.connection = readout.train(final.training)
    for layer, following in zip(
        layers, [*(layer.connections[0] for layer in layers[1:]), readout], strict=True
    ):
        layer.next_connection = (following,)
    swap_class(body, ConnectedModel)
    body.arm = str(factory)
    set_config_keys(body, crosslayer=body.arm, crosslayer_widths=widths)


def unshare_config(model: Any) -> None:
    """Give the model a config that no other model shares, for it is to say what connects this one."""
    shared = model.config
    own = copy.deepcopy(shared)
    for module in model.modules():
        if vars(module).get("config") is shared:
            module.config = own


def find_backbone(model: Any) -> tuple[Any, Family]:
    """The module that owns the layers, and the row that says where it keeps what."""
    host = model.get_base_model() if hasattr(model, "get_base_model") else model  # beneath PEFT's
    body: Any = getattr(host, "base_model", host)
    name = getattr(getattr(body, "config", None), "model_type", None) or type(body).__name__
    family = FAMILIES.get(name)
    if family is None or not (hasattr(body, family.layers) and hasattr(body, family.final)):
        raise ValueError(
            f"connect does not know the family {name!r}; it knows {', '.join(FAMILIES)}. In a loop of your own, call "
            f"the four verbs (see crosslayer.connection); a model of PreNorm layers is added with one row:\n"
            + FAMILY_TEMPLATE.format(name=name)
        )
    return body, family


def is_connected(body: Any) -> bool:
    return isinstance(body, ConnectedModel)


def inequivalence_reason(method: type[Connection], family: Family) -> str:
    """Why connecting changes what a model computes, or nothing."""
    if not method.starts_as_prenorm:
        return "cannot start as the plain residual that the model was trained with"
    if method.prenorm_up_to_scale and family.attn.norm is None:
        return "scales what sub-layers read, which this family does not norm"
    return ""


def looks_pretrained(body: Any, family: Family) -> bool:
    """Whether its final norm has moved from its start; without weights there, whether it was loaded."""
    weight = getattr(getattr(body, family.final), "weight", None)
    if weight is None:
        return bool(getattr(getattr(body, "config", None), "_name_or_path", ""))
    return not weight.is_meta and bool((weight != weight.flatten()[0]).any())


def set_config_keys(model: Any, **keys: Any) -> None:
    """Put keys in the model's config, where it has one, to be saved with it; None takes a key out."""
    if hasattr(model, "register_to_config"):  # diffusers' configs are frozen
        model._internal_dict = type(model.config)(
            {k: v for k, v in {**model.config, **keys}.items() if v is not None}
        )
        return
    for key, value in keys.items():
        if not hasattr(model, "config"):
            continue
        if value is None:
            vars(model.config).pop(key, None)
        else:
            setattr(model.config, key, value)


def make_with_host_norms(
    factory: ConnectionSpec, site: Site, dim: int, layer: nn.Module, family: Family
) -> Connection:
    """A connection that borrows its layer's norms; where k and v are fed apart each gets a copy of the attention's."""

    def norm(port: str) -> nn.Module:
        path = (family.mlp if port == "mlp" else family.attn).norm
        if path is None:
            return NormReference(layer, path)
        host = layer.get_submodule(path)
        return copy_norm(host, layer, path) if port in ("k", "v") else NormReference(layer, path)

    return make_on_device(factory, site, dim, norm, layer)


def make_on_device(
    factory: ConnectionSpec, site: Site, dim: int, norm: NormFactory, like: nn.Module
) -> Connection:
    """A connection where a module of the body is; its own parameters are float32, or float64 as the body."""
    parameter = next(like.parameters())
    with torch.device(parameter.device):
        connection = factory(site, dim, norm)
    return connection.double() if parameter.dtype == torch.float64 else connection


def check_not_dispatched(*modules: nn.Module) -> None:
    """accelerate puts its own forward on an instance, where it would hide the one that is to come or to go."""
    if any("forward" in vars(module) for module in modules):
        raise ValueError(
            "the model is dispatched already, with hooks on its layers; connect it first, then dispatch"
        )
