"""`connect`: replace the residual connections of a model."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..connection import find_connections
from ..sites import plan
from ..spec import ConnectionSpec, make
from ..stack import Stack
from .adapters import register_with_imported_peft
from .attach import (
    attach_connections,
    check_not_wrapped,
    final_norm,
    find_backbone,
    is_connected,
    is_diffusers_model,
    set_config_keys,
)
from .families import ModelWiring
from .initial_outputs import KeptScales, find_kept_scales, looks_pretrained, reason_for_change
from .mlp_widths import growing_widths, mlp_hidden_width
from .output_weights import scale_output_weights
from .projections import explain_joint_input
from .registration import register_with_diffusers
from .sharding import keep_parameters_apart
from .stream_factors import check_stream_factors
from .verification import verify_wiring

Model = TypeVar("Model", bound=nn.Module)


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
            changes by at most half a percent, or by rounding to whole numbers.
        verify: check first that the layers were recognised correctly. One layer of each kind is
            connected with the residual connection that it has already, and must compute the same
            as before. Stand-ins take the place of what is in the layers, so the time does not grow
            with their width.

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
    check_not_wrapped(model, "connect")
    if any(isinstance(module, Stack) for module in model.modules()):
        raise ValueError("the model has a crosslayer.Stack; give the connection to the Stack")
    spec = make(spec)
    backbone, wiring = find_backbone(model)
    if is_connected(backbone):
        raise ValueError(_already_connected(model, backbone))
    if verify:
        verify_wiring(model, backbone, wiring)
    if spec.method.norms_its_stream:
        _check_norms(backbone, wiring, spec)
    check_stream_factors(backbone, wiring, spec)
    mlp_widths = None
    if reallocate:
        layers = wiring.find_layers(backbone)
        mlp_widths = growing_widths(len(layers), mlp_hidden_width(backbone, wiring))
    kept_scales = find_kept_scales(backbone, wiring)
    # Parameters made under torch.inference_mode cannot be trained: leave that mode, unless the
    # model's own were made under it.
    makes_for_inference = (
        torch.is_inference_mode_enabled() and next(backbone.parameters()).is_inference()
    )
    with _restored_on_error(model), torch.inference_mode(makes_for_inference):
        _give_own_config(model, backbone)
        attach_connections(backbone, wiring, spec, mlp_widths)
        set_config_keys(model, crosslayer=str(spec), crosslayer_widths=mlp_widths)
        for part in (backbone, model):
            keep_parameters_apart(part)
        register_with_imported_peft()  # It may have put adapters into the model.
        for message in (
            _describe_change(backbone, wiring, spec, kept_scales, reallocate),
            _describe_joint_inputs(backbone, wiring, spec),
            *_describe_skipped_layers(backbone),
        ):
            if message:
                warnings.warn(message, stacklevel=2)
        # Last, because an error does not restore weights.
        scale_output_weights(wiring.find_layers(backbone))
    return model


def _check_norms(backbone: nn.Module, wiring: ModelWiring, spec: ConnectionSpec) -> None:
    """Raise a ValueError where a connection norms its streams and a model has no norms for it."""
    if not wiring.norms_inputs:
        raise ValueError(
            f"{spec} applies the norms before sub-layers to its streams, "
            "and this family has no such norms"
        )
    if final_norm(backbone, wiring) is None:
        raise ValueError(
            f"{spec} ends with a norm of its streams, and {type(backbone).__name__} has no norm "
            "after its layers"
        )


def _already_connected(model: Any, backbone: Any) -> str:
    """What is wrong with connecting a model that has a connected backbone."""
    spec = repr(backbone.connection_spec)
    if backbone in (model, getattr(model, "base_model", model)):
        return f"the model is already connected, with {spec}; call crosslayer.disconnect first"
    path_of = {module: path for path, module in model.named_modules()}
    language_model = model.get_decoder() if hasattr(model, "get_decoder") else model
    example = ""
    if path_of.get(language_model) and not any(map(is_connected, language_model.modules())):
        example = f", like model.{path_of[language_model]}"
    return (
        f"the model's {path_of[backbone]} is already connected, with {spec}; pass the part that "
        f"you want to connect{example}, or call crosslayer.disconnect first"
    )


def _give_own_config(model: Any, backbone: Any) -> None:
    """Give a model a config that may name its connection, where it may share its config."""
    if is_diffusers_model(model):
        register_with_diffusers()
    elif model is not backbone and (_has_config_of(model, backbone) or _has_head(model)):
        _unshare_config(model)


def _describe_change(
    backbone: Any,
    wiring: ModelWiring,
    spec: ConnectionSpec,
    kept_scales: KeptScales,
    reallocate: bool,
) -> str:
    """Why a pretrained model no longer computes the same; empty where it does."""
    connections = find_connections(backbone)
    reasons = [reason_for_change(connection, wiring, kept_scales) for connection in connections]
    if reallocate:
        reasons.append("reallocate replaces the weights of its MLPs")
    reason = next(filter(None, reasons), "")
    if not reason or not looks_pretrained(backbone, wiring):
        return ""
    return (
        f"connecting {spec} changes the outputs of this pretrained model ({reason}); fine-tune it "
        "before use"
    )


def _describe_joint_inputs(backbone: Any, wiring: ModelWiring, spec: ConnectionSpec) -> str:
    """That q, k and v have one input, where the connection would separate it; else empty."""
    joint = _joint_attention(backbone, wiring)
    if not joint or not _splits_inputs(spec, backbone, wiring):
        return ""
    return (
        f"connecting {spec} gives the attention of this model one input for q, k and v ({joint}); "
        'see "Separate inputs for q, k and v" in docs/your-model.md'
    )


def _describe_skipped_layers(backbone: Any) -> Iterator[str]:
    """That a model skips layers in training, once for each option of its config that says so."""
    name = type(backbone).__name__
    options = {"layerdrop": "", "encoder_layerdrop": "Encoder", "decoder_layerdrop": "Decoder"}
    for key, part in options.items():
        share = getattr(getattr(backbone, "config", None), key, 0)
        if share and part in name:
            yield (
                f"in training this model skips layers at random (config.{key} is {share}), but a "
                "connection needs them all: a step that skips one raises an error, unless it is "
                f"one of the last; load the model with {key}=0"
            )


def _joint_attention(backbone: Any, wiring: ModelWiring) -> str:
    """Why `connect` cannot separate the projections of q, k and v of an attention; else empty."""
    for layer, layer_wiring in wiring.wired_layers(backbone):
        for sublayer in layer_wiring.sublayers:
            attention = layer.get_submodule(sublayer.module)
            if sublayer.port == "mixer" and (reason := explain_joint_input(attention)):
                return reason
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


def _unshare_config(model: Any) -> None:
    """Give a model and its parts separate configs, because they name this model's connection."""
    copies: dict[int, Any] = {}  # by the id of the config, or of what it contains
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        shared_config = vars(module).get("config")
        if id(shared_config) in copies:
            module.config = copies[id(shared_config)]
