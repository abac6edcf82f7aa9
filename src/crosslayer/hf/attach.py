"""Connect the layers of a backbone: what `connect` and the loading of saved models share."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..class_swap import swap_class
from ..connection import Connection, NormFactory
from ..partitioned import parameter_shape
from ..sites import SPLIT_PORTS, Site, plan_layers
from ..spec import ConnectionSpec
from .arguments import argument_names, takes_any_keyword
from .connected_model import ConnectedModel, mark_as_initialised
from .families import FAMILIES, FunctionCall, LayerWiring, ModelWiring
from .host_norms import FinalNormReference, NormFunction, NormReference, copy_norm
from .layers import LAYER_ATTRIBUTES, ConnectedLayer, make_readout
from .mlp_widths import set_mlp_widths
from .qkv import SplitInputAttention, split_qkv_inputs
from .recognition import NoLayersError, recognise_model


def attach_connections(
    backbone: Any, wiring: ModelWiring, spec: ConnectionSpec, mlp_widths: list[int] | None
) -> None:
    """Connect the layers of a backbone, in place.

    Args:
        backbone: the module that owns the layers.
        wiring: the wiring of its layers.
        spec: the connection.
        mlp_widths: the hidden width of each layer's MLP, which gets new weights; None to leave the
            MLPs unchanged.

    Raises:
        ValueError: an option has a wrong value, or the model is dispatched by accelerate. The
            backbone is then unchanged.
    """
    layers = wiring.find_layers(backbone)
    final = None if wiring.final is None else backbone.get_submodule(wiring.final)

    # Build all connections first. Whatever can fail does so before the model changes.
    check_not_dispatched(backbone, wiring)
    _check_attribute_names(layers)
    *sites, readout_site = plan_layers([ports_of_sites(layer) for layer in wiring.of_layers])
    connections_of_layer: list[list[Connection[Any]]] = [[] for _ in layers]
    for site in sites:
        layer = layers[site.layer]
        connections = connections_of_layer[site.layer]
        norms = _host_norms(layers, wiring.of_layers, site, len(connections))
        connections.append(_make_on_device(spec, site, wiring.dim, norms, layer))
    if connections_of_layer[0][0].output_scale != 1:
        _check_output_projections(wiring, spec)
    norms = _readout_norms(backbone, layers[-1], wiring)
    readout = _make_on_device(spec, readout_site, wiring.dim, norms, backbone)
    if final is None:
        connections_of_layer[-1].append(readout)

    if mlp_widths is not None:
        set_mlp_widths(backbone, wiring, mlp_widths)
    for layer, layer_wiring, connections in zip(
        layers, wiring.of_layers, connections_of_layer, strict=True
    ):
        _connect_layer(layer, layer_wiring, connections)
    if final is not None:
        make_readout(final, readout)
    swap_class(backbone, ConnectedModel)
    backbone.connection_spec = str(spec)
    backbone.wiring = wiring
    set_config_keys(backbone, crosslayer=str(spec), crosslayer_widths=mlp_widths)


def _check_attribute_names(layers: list[Any]) -> None:
    """Raise a ValueError where a host's layer has an attribute that a connected one needs."""
    for number, layer in enumerate(layers):
        for name in LAYER_ATTRIBUTES:
            if hasattr(layer, name):
                raise ValueError(
                    f"layer {number} ({type(layer).__name__}) has an attribute {name!r}, which a "
                    "connected layer needs; give it another name"
                )


def _check_output_projections(wiring: ModelWiring, spec: ConnectionSpec) -> None:
    """Raise a ValueError where a sub-layer has no weight that scales what it adds to the stream."""
    for sublayer in wiring.sublayers:
        if not sublayer.output_projection:
            raise ValueError(
                f"{spec} cannot scale what {sublayer.module!r} adds to the stream: connect knows "
                "no output projection in it that no norm follows; use output_scale='1'"
            )


def _connect_layer(
    layer: Any, layer_wiring: LayerWiring, connections: list[Connection[Any]]
) -> None:
    """Let a layer's stream pass through connections, in place.

    Args:
        layer: a layer of the host.
        layer_wiring: its wiring.
        connections: one for each site, and then the readout where this layer returns the hidden
            state.
    """
    layer.connections = nn.ModuleList(connections).train(layer.training)
    layer.wiring = layer_wiring
    layer.opened_paths = sorted(layer_wiring.opened_modules)
    layer.argument_names = argument_names(layer)
    layer.takes_any_keyword = takes_any_keyword(layer)
    swap_class(layer, ConnectedLayer)
    for connection, sublayers in zip(connections, layer_wiring.sites, strict=False):
        for sublayer in sublayers:
            if "q" in connection.ports and sublayer.qkv:
                attention = layer.get_submodule(sublayer.module)
                split_qkv_inputs(attention, sublayer.qkv, sublayer.fused)


def find_backbone(model: Any) -> tuple[Any, ModelWiring]:
    """The module that owns a model's layers, and its wiring: of its family's row, or recognised.

    Raises:
        ValueError: the wiring is not that of a stream with sub-layers. The error says why.
    """
    host = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside PEFT's
    backbone: Any = getattr(host, "base_model", host)
    for module in backbone.modules():
        # While a saved model is built, its class comes before its connections and their wiring.
        if is_connected(module) and "wiring" in vars(module):
            return module, module.wiring
    _check_of_one_model(backbone)
    name = getattr(getattr(backbone, "config", None), "model_type", None)
    name = name or type(backbone).__name__
    family = FAMILIES.get(name)
    modules = dict(backbone.named_modules())
    if family and family.layers in modules and (family.final is None or family.final in modules):
        return backbone, family.wire(backbone)
    try:
        return recognise_model(backbone)
    except NoLayersError as error:
        raise ValueError(f"connect cannot connect {name!r}: {error}") from None
    except ValueError as error:
        raise ValueError(
            f"connect cannot connect {name!r}: {error}. In a model of your own, use "
            "crosslayer.Stack, or write the loop (docs/concepts.md)"
        ) from None


def _check_of_one_model(backbone: nn.Module) -> None:
    """Raise a ValueError for a plain model with a layer or an attention of a connected one."""
    for path, module in backbone.named_modules():
        if isinstance(module, ConnectedLayer | SplitInputAttention):
            raise ValueError(
                f"{path} belongs to another model, which is connected; connect each model's own "
                "layers, like those of copy.deepcopy(model)"
            )


def final_norm(backbone: nn.Module, wiring: ModelWiring) -> Any:
    """The norm before the head: beside the layers, or at the end of the last post-norm layer; None
    where there is neither.
    """
    path = _final_norm_path(backbone, wiring)
    return None if path is None else backbone.get_submodule(path)


def _final_norm_path(backbone: nn.Module, wiring: ModelWiring) -> str | None:
    last_norm = wiring.of_layers[-1].last_norm
    if wiring.final is not None or not last_norm:
        return wiring.final
    return f"{wiring.layer_paths(backbone)[-1]}.{last_norm}"


def is_connected(backbone: Any) -> bool:
    """Whether this module itself is a connected backbone."""
    return isinstance(backbone, ConnectedModel)


def set_config_keys(model: Any, **keys: Any) -> None:
    """Set keys in a model's config, if it has transformers' or diffusers', to be saved with it.

    None removes a key.
    """
    if is_diffusers_model(model):  # Its config is frozen.
        config = {**model.config, **keys}
        config = {key: value for key, value in config.items() if value is not None}
        model._internal_dict = type(model.config)(config)
        return
    if not isinstance(getattr(model, "config", None), PreTrainedConfig):
        return
    for key, value in keys.items():
        if value is None:
            vars(model.config).pop(key, None)
        else:
            setattr(model.config, key, value)


def check_not_dispatched(backbone: Any, wiring: ModelWiring) -> None:
    """Raise a ValueError if the `forward` of a backbone, of a layer or of the final norm was
    replaced, as accelerate's dispatch does.

    The replacement would hide the `forward` of the swapped class.
    """
    modules = [backbone, *wiring.find_layers(backbone)]
    if wiring.final is not None:
        modules.append(backbone.get_submodule(wiring.final))
    for module in modules:
        if "forward" in vars(module):
            raise ValueError(
                f"the forward of a {type(module).__name__} was replaced, by accelerate's dispatch, "
                "by Liger or by hand; undo that, or connect before you dispatch or patch"
            )


def check_not_wrapped(model: nn.Module, function: str) -> None:
    """Raise a ValueError for a model in what distributes the parameters that it has had so far.

    Args:
        model: that `connect` or `disconnect` was given.
        function: which of them.
    """
    wrappers: tuple[type, ...] = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        wrappers += (FSDPModule, FullyShardedDataParallel)
    for module in model.modules():
        if isinstance(module, wrappers):
            raise ValueError(
                f"{function} before {type(module).__name__} wraps the model: it keeps to the "
                "parameters that the model has then"
            )


def is_diffusers_model(model: Any) -> bool:
    """Whether a model is one of diffusers, whose config is kept by `register_to_config`."""
    return hasattr(model, "register_to_config")


def ports_of_sites(layer: LayerWiring) -> list[tuple[str, ...]]:
    """The ports of each of a layer's sites, as `plan_layers` takes them."""
    return [tuple(sublayer.port for sublayer in site) for site in layer.sites]


def _host_norms(
    layers: Any, layer_wirings: tuple[LayerWiring, ...], site: Site, number: int
) -> NormFactory:
    """The norms of a site's ports: references to the host's, and copies of it for k and v.

    Args:
        layers: of the host.
        layer_wirings: of these layers.
        site: of the ports.
        number: of the site in its layer.
    """
    owner = layers[site.layer]
    norm_of_port: dict[str, str | FunctionCall | None] = {}
    for sublayer in layer_wirings[site.layer].sites[number]:
        ports = (sublayer.port, *SPLIT_PORTS.get(sublayer.port, ()))
        norm_of_port |= dict.fromkeys(ports, sublayer.norm)
    last_norm = layer_wirings[site.layer - 1].last_norm
    if number == 0 and site.layer > 0 and last_norm:
        # A post-norm layer reads what the norm at the end of the layer before it would return.
        owner = layers[site.layer - 1]
        norm_of_port = dict.fromkeys(norm_of_port, last_norm)

    def norm(port: str) -> nn.Module:
        host_norm = norm_of_port[port]
        if isinstance(host_norm, FunctionCall):
            return NormFunction(owner, host_norm)
        if host_norm is not None and port in ("k", "v", "kv"):
            return copy_norm(owner, host_norm)
        return NormReference(owner, host_norm)

    return norm


def _readout_norms(backbone: nn.Module, last_layer: nn.Module, wiring: ModelWiring) -> NormFactory:
    """The norms of the readout: a reference to the host's final norm; copies for more ports."""
    path = _final_norm_path(backbone, wiring)

    def norm(port: str) -> nn.Module:
        if path is not None and port != "out":
            return copy_norm(backbone, path)
        if wiring.final is not None:
            return FinalNormReference(backbone, backbone.get_submodule(wiring.final))
        return NormReference(last_layer, wiring.of_layers[-1].last_norm or None)

    return norm


def _make_on_device(
    spec: ConnectionSpec, site: Site, dim: int, norm: NormFactory, like: nn.Module
) -> Connection[Any]:
    """A connection on the device of `like`, marked as initialised where `like` is.

    Its own parameters are float32, or float64 in a float64 model. Where DeepSpeed has partitioned
    the model, they have its dtype.
    """
    parameter = next(like.parameters())
    with torch.device(parameter.device):
        connection = spec(site, dim, norm)
    mark_as_initialised(connection, like)
    dtype = torch.float32
    # DeepSpeed has one dtype for all, and float32 copies in its optimizer.
    if parameter.dtype == torch.float64 or parameter.shape != parameter_shape(parameter):
        dtype = parameter.dtype
    for own in connection.parameters(recurse=False):
        own.data = own.data.to(dtype)
    return connection
