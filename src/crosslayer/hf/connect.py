"""`connect`: replace the residual connections of a model."""

import copy
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..connection import PRENORM_FUNCTIONS, Connection, find_connections, plan
from ..partitioned import gathered_parameters, parameter_shape
from ..spec import ConnectionSpec, make
from ..stack import Stack
from ..validation import HALF_DTYPES, dtype_name, parse_dtype
from .adapters import register_with_imported_peft
from .attach import (
    attach_connections,
    final_norm,
    find_backbone,
    is_connected,
    is_diffusers_model,
    set_config_keys,
)
from .families import ModelWiring
from .host_norms import find_attribute
from .mlp_widths import growing_widths, mlp_hidden_width
from .projections import has_projection_names
from .registration import register_with_diffusers
from .sharding import keep_parameters_apart
from .verification import verify_wiring

Model = TypeVar("Model", bound=nn.Module)

# of methods that scale the stream, which a norm removes
SCALING_FUNCTIONS = ("prenorm up to scales", "prenorm up to scale of readout")


def connect(
    model: Model, spec: str | ConnectionSpec, reallocate: bool = False, verify: bool = True
) -> Model:
    """Replace the residual connections of a model, in place.

    The model keeps its classes, module paths and state-dict keys. The connection's parameters are
    added under each layer (`…layers.3.connections.0.W1`) and under the final norm, in float32.
    `model.config.crosslayer` names the connection, so `save_pretrained` and `from_pretrained` keep
    working. A model with a head gets a copy of its config for this. A headless model keeps its
    config. Most connections are equivalent to pre-norm at initialisation and leave the model's
    outputs unchanged. For the others a warning says that a pretrained model has changed.

    Args:
        model: a model whose layers `connect` recognises (docs/families.md), or that has a row in
            `crosslayer.hf.families`, on any device, meta included.
        spec: a string like "mudd(dilation=2)", or what `make` returns.
        reallocate: for training from scratch: give the MLPs new weights and hidden widths that grow
            with depth, from half to one and a half of the config's width (MUDD, Eq. 9). Their sum
            changes by at most half a percent.
        verify: check first that the layers were recognised correctly. One layer of each kind is
            connected with the residual connection that it has already, and must compute the same
            as before. This takes milliseconds for a model of any size, as it uses no weights.

    Returns:
        The same model.

    Raises:
        ValueError: the connection or an option is unknown, the model's layers cannot be connected,
            or it is connected already. The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"connect takes a model, got a {type(model).__name__}; load one with "
            "AutoModelForCausalLM.from_pretrained"
        )
    _check_not_wrapped(model)
    if any(isinstance(module, Stack) for module in model.modules()):
        raise ValueError("the model has a crosslayer.Stack; give the connection to the Stack")
    spec = make(spec)
    backbone, wiring = find_backbone(model)
    if is_connected(backbone):
        raise ValueError(_already_connected(model, backbone))
    if verify:
        verify_wiring(backbone, wiring)
    if spec.method.norms_its_stream and not wiring.norms_inputs:
        raise ValueError(
            f"{spec} applies the norms before sub-layers to its streams, "
            "and this family has no such norms"
        )
    if spec.method.norms_its_stream and final_norm(backbone, wiring) is None:
        raise ValueError(
            f"{spec} ends with a norm of its streams, and {type(backbone).__name__} has no norm "
            "after its layers"
        )
    _check_stream_factors(backbone, wiring, spec)
    mlp_widths = None
    if reallocate:
        layers = wiring.find_layers(backbone)
        mlp_widths = growing_widths(len(layers), mlp_hidden_width(backbone, wiring))
    with _restored_on_error(model):
        _connect_backbone(model, backbone, wiring, spec, mlp_widths)
    return model


def _check_not_wrapped(model: nn.Module) -> None:
    """Raise a ValueError for a model in what distributes the parameters that it has had so far."""
    wrappers: tuple[type, ...] = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        wrappers += (FSDPModule, FullyShardedDataParallel)
    for module in model.modules():
        if isinstance(module, wrappers):
            raise ValueError(
                f"connect before {type(module).__name__} wraps the model: it would not know the "
                "parameters of the connections"
            )


def _already_connected(model: Any, backbone: Any) -> str:
    """What is wrong with connecting a model that has a connected backbone."""
    spec = repr(backbone.connection_spec)
    if backbone in (model, getattr(model, "base_model", model)):
        return f"the model is already connected, with {spec}; call crosslayer.disconnect first"
    path = next(path for path, module in model.named_modules() if module is backbone)
    return (
        f"the model's {path} is already connected, with {spec}; pass the part that you want to "
        "connect, or call crosslayer.disconnect first"
    )


def _connect_backbone(
    model: Any,
    backbone: Any,
    wiring: ModelWiring,
    spec: ConnectionSpec,
    mlp_widths: list[int] | None,
) -> None:
    """Change a model whose connection has been checked. What changes weights comes last."""
    if is_diffusers_model(model):
        register_with_diffusers()
    elif model is not backbone and (_has_config_of(model, backbone) or _has_head(model)):
        _unshare_config(model)
    final_keeps_scale = inputs_keep_scale = False
    if spec.method.initial_function in SCALING_FUNCTIONS:
        final = final_norm(backbone, wiring)
        final_keeps_scale = final is not None and _keeps_scale(final, wiring.dim)
        first_norms = _norms_of_first_layer(backbone, wiring)
        inputs_keep_scale = any(_keeps_scale(norm, wiring.dim) for norm in first_norms)
    attach_connections(backbone, wiring, spec, mlp_widths)
    set_config_keys(model, crosslayer=str(spec), crosslayer_widths=mlp_widths)
    for part in (backbone, model):
        keep_parameters_apart(part)
    register_with_imported_peft()  # It may have put adapters into the model.
    connections = find_connections(backbone)
    reasons = [
        inequivalence_reason(c, wiring, final_keeps_scale, inputs_keep_scale) for c in connections
    ]
    if mlp_widths is not None:
        reasons.append("reallocate replaces the weights of its MLPs")
    reason = next(filter(None, reasons), "")
    if reason and looks_pretrained(backbone, wiring):
        warnings.warn(
            f"connecting {spec} changes the outputs of this pretrained model ({reason}); "
            "fine-tune it before use",
            stacklevel=3,
        )
    joint = _joint_attention(backbone, wiring)
    if joint and _splits_inputs(spec, backbone, wiring):
        warnings.warn(
            f"connecting {spec} gives the attention of this model one input for q, k and v ("
            f"{joint} does more with its input than to call three projections of it); see "
            '"Separate inputs for q, k and v" in docs/your-model.md',
            stacklevel=3,
        )
    name = type(backbone).__name__
    for key, part in (("layerdrop", ""), ("encoder_layerdrop", "Encoder")):
        share = getattr(getattr(backbone, "config", None), key, 0)
        if share and part in name:
            warnings.warn(
                f"in training this model skips layers at random (config.{key} is {share}), but a "
                "connection needs them all: a step that skips one raises an error, unless it is "
                f"one of the last; load the model with {key}=0",
                stacklevel=3,
            )
    scale_output_weights(backbone, wiring)


def _joint_attention(backbone: Any, wiring: ModelWiring) -> str:
    """The class of an attention with projections of q, k and v that `connect` cannot separate."""
    for layer, layer_wiring in zip(wiring.find_layers(backbone), wiring.of_layers, strict=True):
        for sublayer in layer_wiring.sublayers:
            attention = layer.get_submodule(sublayer.module)
            if sublayer.port == "mixer" and has_projection_names(attention):
                return type(attention).__name__
    return ""


def _splits_inputs(spec: ConnectionSpec, backbone: Any, wiring: ModelWiring) -> bool:
    """Whether the connection would mix separate inputs for q, k and v in a model of this size."""
    dim = find_connections(backbone)[0].dim
    sites = plan(len(wiring.find_layers(backbone)))
    with torch.device("meta"):
        connections = [spec(site, dim, lambda port: nn.Identity()) for site in sites]
    return any(connection.splits_inputs for connection in connections)


@contextmanager
def _restored_on_error(model: nn.Module) -> Iterator[None]:
    """Undo what is done to a model's modules and config where an error ends it.

    The values of weights are not restored: who changes them in place does so last.
    """
    changed: list[Any] = [*model.modules()]
    found = [vars(module).get("config") for module in changed]
    configs = {id(config): config for config in found if isinstance(config, PreTrainedConfig)}
    changed += configs.values()
    classes = [type(thing) for thing in changed]
    # A module's parameters, children and hooks are dicts.
    attributes = [
        {name: copy.copy(v) if isinstance(v, dict) else v for name, v in vars(thing).items()}
        for thing in changed
    ]
    try:
        yield
    except BaseException:
        for thing, cls, before in zip(changed, classes, attributes, strict=True):
            thing.__class__ = cls
            vars(thing).clear()
            vars(thing).update(before)
        raise


def _has_config_of(model: Any, backbone: Any) -> bool:
    """Whether a model's config is its backbone's. A larger model's config contains that config."""
    config = getattr(model, "config", None)
    return config is not None and config is getattr(backbone, "config", None)


def _has_head(model: Any) -> bool:
    """Whether a model of transformers is a whole one. One without a head may be a part of a larger
    model, whose config contains the part's.
    """
    return isinstance(model, PreTrainedModel) and model.base_model is not model


@torch.no_grad()
def scale_output_weights(backbone: Any, wiring: ModelWiring) -> None:
    """Multiply the weights of each sub-layer's output projection by its `output_scale`, in place.

    `connect` does so once. What is loaded afterwards replaces the weights.
    """
    weights = {}  # by id: layers may share sub-layers
    for layer in wiring.find_layers(backbone):
        for connection, sublayers in zip(layer.connections, layer.wiring.sites, strict=False):
            if connection.output_scale == 1:
                continue
            for sublayer in sublayers:
                path = f"{sublayer.module}.{sublayer.output_projection}"
                projection = attrgetter(path)(layer)
                weight = getattr(projection, "weight", projection)
                weights[id(weight)] = (weight, connection.output_scale)
    for weight, scale in weights.values():  # once all are found
        with gathered_parameters([weight], changes=True):
            weight.mul_(scale)


def _check_stream_factors(backbone: Any, wiring: ModelWiring, spec: ConnectionSpec) -> None:
    """Raise a ValueError where layers multiply the stream and a norm does not remove the factor.

    A connection's streams are without these factors. `_check_size_of_factors` has the limits of
    their values.
    """
    factor = next((w.stream_factor for w in wiring.of_layers if w.stream_factor), "")
    if not factor:
        return
    _check_size_of_factors(backbone, wiring, factor, spec)
    norms = {f"its final norm, {wiring.final},": final_norm(backbone, wiring)}
    pairs = zip(wiring.find_layers(backbone), wiring.of_layers, strict=True)
    for number, (layer, layer_wiring) in enumerate(pairs):
        for path in layer_wiring.input_norms:
            norms[f"the {path} of layer {number}"] = layer.get_submodule(path)
    for name, norm in norms.items():
        if norm is not None and _keeps_scale(norm, wiring.dim):
            raise ValueError(
                f"its layers multiply their stream by {factor}, and {name} does not remove this "
                "factor, as connections need it"
            )


@torch.no_grad()
def _check_size_of_factors(
    backbone: Any, wiring: ModelWiring, name: str, spec: ConnectionSpec
) -> None:
    """Raise a ValueError for factors that are not positive, because norms keep signs, or whose
    product leaves the range of the streams' dtype. Those on the meta device are not checked.
    """
    dtype = next(backbone.parameters()).dtype
    if spec.options.get("stream_dtype") is not None:
        dtype = parse_dtype(spec.options["stream_dtype"], "stream_dtype")
    largest = math.sqrt(torch.finfo(dtype).max)  # the streams need the other half of the range
    product = 1.0
    pairs = zip(wiring.find_layers(backbone), wiring.of_layers, strict=True)
    for number, (layer, layer_wiring) in enumerate(pairs):
        if not layer_wiring.stream_factor:
            continue
        factor = find_attribute(layer, layer_wiring.stream_factor)
        if factor.is_meta:
            continue
        value = factor.item()
        if not value > 0:
            raise ValueError(
                f"layer {number} multiplies its stream by {name}, which is {value:.3g}; "
                "connections need positive factors"
            )
        product *= value
        if not 1 / largest < product < largest:
            remedy = "; try stream_dtype='float32'" if dtype in HALF_DTYPES else ""
            raise ValueError(
                f"up to layer {number} its layers multiply the stream by {product:.3g} in all "
                f"({name}), and {dtype_name(dtype)} has no range for its inverse{remedy}"
            )


def _norms_of_first_layer(backbone: Any, wiring: ModelWiring) -> list[nn.Module]:
    """Those before its sub-layers."""
    first_layer = wiring.find_layers(backbone)[0]
    return [first_layer.get_submodule(path) for path in wiring.of_layers[0].input_norms]


@torch.no_grad()
def _keeps_scale(norm: nn.Module, dim: int) -> bool:
    """Whether what a norm returns grows with its input, as BatchNorm's and DyT's does.

    A copy of it is tried. False where that cannot be: on the meta device, or where a norm gets more
    than its input.
    """
    if any(parameter.is_meta for parameter in norm.parameters()):
        return False  # its weights may be offloaded, and a copy would have all of the model's
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, dim, generator=generator, dtype=torch.float64)
    try:
        with gathered_parameters(norm.parameters()):
            tried = copy.deepcopy(norm).to("cpu", torch.float64).eval()
        once, thrice = tried(x), tried(3 * x)
        return not torch.allclose(once, thrice, rtol=1e-2, atol=1e-2 * once.abs().max().item())
    except Exception:
        return False


def inequivalence_reason(
    connection: Connection[Any],
    wiring: ModelWiring,
    final_keeps_scale: bool,
    inputs_keep_scale: bool,
) -> str:
    """Why connecting changes what a model computes; empty where it does not.

    Args:
        connection: of the model.
        wiring: of its layers.
        final_keeps_scale: whether the final norm does not remove the scale of its input.
        inputs_keep_scale: whether a norm before a sub-layer does not.
    """
    if connection.output_scale != 1:
        return "output_scale multiplies weights of the model"
    if wiring.is_post_norm:
        is_same = connection.initial_function == "bitwise postnorm"
        return "" if is_same else "its layers are post-norm: postnorm alone computes the same"
    if connection.initial_function not in PRENORM_FUNCTIONS:
        return "not equivalent to pre-norm at initialisation"
    scales_inputs = connection.initial_function == "prenorm up to scales"
    scales_readout = connection.initial_function in SCALING_FUNCTIONS
    if scales_readout and wiring.final is None:
        return "it scales the hidden state, and no norm beside the layers removes that"
    if scales_inputs and not wiring.norms_inputs:
        return "it scales the inputs of sub-layers, and this family has no norm there"
    if (scales_readout and final_keeps_scale) or (scales_inputs and inputs_keep_scale):
        return "it scales what norms get, and one of them keeps the scale of its input"
    return ""


def looks_pretrained(backbone: Any, wiring: ModelWiring) -> bool:
    """Whether the final norm has left its initial value; without its weight, a norm of the first
    layer.

    Where no norm has a weight: whether the model was loaded from somewhere.
    """
    final = final_norm(backbone, wiring)
    vectors = _norm_weights([] if final is None else [final])
    vectors = vectors or _norm_weights(wiring.find_layers(backbone)[0].modules())
    if not vectors:
        return bool(getattr(getattr(backbone, "config", None), "_name_or_path", ""))
    with gathered_parameters(vectors):
        return any(not vector.is_meta and bool((vector != vector[0]).any()) for vector in vectors)


def _norm_weights(norms: Iterable[nn.Module]) -> list[Tensor]:
    """The weights of those modules whose weight is a vector."""
    weights = [getattr(norm, "weight", None) for norm in norms]
    return [w for w in weights if isinstance(w, Tensor) and len(parameter_shape(w)) == 1]


def _unshare_config(model: Any) -> None:
    """Give a model and its parts separate configs, because they name this model's connection."""
    copies: dict[int, Any] = {}  # by the id of the config, or of what it contains
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        shared_config = vars(module).get("config")
        if id(shared_config) in copies:
            module.config = copies[id(shared_config)]
