"""The wiring of a host that no row describes: its list of layers, its final norm, and what its
layers' own code does (`layer_recognition.py`).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..module_lists import has_children, has_numbered_layers, list_layers
from ..partitioned import parameter_shape
from .families import LayerWiring, ModelWiring
from .layer_recognition import recognise_layer
from .projections import is_norm

# Of every module, whatever its code.
_MODULE_ATTRIBUTES = {*vars(nn.Module()), "_compiled_call_impl", "_is_hf_initialized"}
_SHARED_LAYERS = "its layers share their weights, and connections need separate layers"


class NoLayersError(ValueError):
    """A model has no layers that could be connected, whatever they compute."""


def recognise_model(backbone: Any) -> tuple[Any, ModelWiring]:
    """The module that owns a model's layers, and its wiring.

    Args:
        backbone: a model, or a part of it, in which a module has a list of layers and their final
            norm.

    Raises:
        ValueError: there is no such list, or its layers have no stream. The message says why.
    """
    if hasattr(backbone, "encoder") and hasattr(backbone, "decoder"):
        raise NoLayersError(
            "an encoder-decoder model has two lists of layers; connect those you choose, like "
            "connect(model.get_decoder(), spec)"
        )
    owner, path, alike = _find_layers(backbone)
    layers = _layers_before_norm(owner.get_submodule(path))
    final = _find_final_norm(owner, path)
    _check_layers(layers)
    config = next(_configs((owner, backbone, *layers)), None)
    dim = _stream_width(owner, layers, final, config, backbone)
    try:
        of_layers = _recognise_layers(layers, dim, _attends_encoder(config))
    except ValueError:
        _check_list_of_layers(owner, path)
        raise
    if len(alike) > 1:
        kind = type(layers[0]).__name__
        separate = [place for place in alike if alike.count(place) == 1]
        if not separate:
            raise ValueError(f"it has several lists of {kind} in one module; each needs its own")
        raise ValueError(
            f"it has several lists of {kind}, {', '.join(separate)}; connect those you choose, "
            f"like connect(model.base_model.{separate[0]}, spec)"
        )
    last_norms = {bool(wiring.last_norm) for wiring in of_layers}
    if len(last_norms) == 2:
        raise ValueError("some of its layers are pre-norm and others post-norm")
    return owner, ModelWiring(path, None if True in last_norms else final, dim, of_layers)


def _check_layers(layers: list[Any]) -> None:
    """Raise a ValueError for layers that no connection can be added to, whatever they compute."""
    if len(set(map(id, layers))) < len(layers):
        raise ValueError(_SHARED_LAYERS)
    if any(
        isinstance(layer, torch._dynamo.OptimizedModule)
        or getattr(layer, "_compiled_call_impl", None) is not None
        for layer in layers
    ):
        raise ValueError("its layers are compiled; connect the model first, then compile it")


def _attends_encoder(config: Any) -> bool:
    """Whether the config says that a decoder gets an encoder's outputs.

    ProphetNet's `add_cross_attention` is True by default, with an encoder or without.
    """
    if getattr(config, "is_encoder_decoder", False):
        return True
    is_default = getattr(type(config), "add_cross_attention", False)
    return bool(getattr(config, "add_cross_attention", False)) and not is_default


def _recognise_layers(
    layers: list[Any], dim: int, attends_encoder: bool
) -> tuple[LayerWiring, ...]:
    wiring_of_kind: dict[Any, LayerWiring] = {}
    of_layers = []
    for number, layer in enumerate(layers):
        if isinstance(layer, nn.ModuleList | nn.ModuleDict):
            raise ValueError(
                f"layer {number} is a {type(layer).__name__}, whose modules the model runs and "
                "adds up itself; make each layer a module that does so in its forward"
            )
        kind = layer_kind(layer)
        if kind not in wiring_of_kind:
            try:
                wiring_of_kind[kind] = recognise_layer(layer, dim, attends_encoder)
            except ValueError as error:
                name = type(layer).__name__
                if name.endswith("Stage"):
                    raise ValueError(
                        f"its layers are in stages ({name}), between which the stream changes its "
                        "width or length"
                    ) from None
                raise ValueError(f"layer {number} ({name}): {error}") from None
        of_layers.append(wiring_of_kind[kind])
        if number and of_layers[-1].embedding_norm:
            raise ValueError(
                f"layer {number} ({type(layer).__name__}): it norms the stream itself with its "
                f"{of_layers[-1].embedding_norm}, which only the first layer may"
            )
    return tuple(of_layers)


def _check_list_of_layers(owner: nn.Module, path: str) -> None:
    """Raise a ValueError where the members of a list are no layers."""
    if getattr(getattr(owner, "config", None), "num_hidden_groups", None):
        raise ValueError(_SHARED_LAYERS)
    parent, _, name = path.rpartition(".")
    children: dict[str, Any] = dict(owner.get_submodule(parent).named_children())
    lists = {key: child for key, child in children.items() if _lists_modules(child)}
    alike = [key for key, child in lists.items() if len(child) == len(lists[name])]
    if len(alike) > 1:
        raise ValueError(f"its sub-layers are in separate lists, {', '.join(alike)}, not in layers")


def layer_kind(layer: nn.Module) -> tuple[Any, ...]:
    """What tells layers apart: their classes, those of their modules, and all attributes of these
    that the layer's own code may read.

    Not the weights, and not the number of the layer that transformers gives to an attention.
    """
    kind: list[Any] = []
    for path, module in layer.named_modules():
        kind.append((path, type(module)))
        for name, value in {**vars(module), **module._buffers}.items():
            is_number = name == "layer_idx" and path != ""
            if name not in _MODULE_ATTRIBUTES and not is_number:
                kind.append((path, name, _setting(value)))
    return tuple(kind)


def _setting(value: Any, depth: int = 0) -> Any:
    """What can be compared of an attribute's value. Any other object is equal to itself alone."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)  # NaN is not equal to itself
    if isinstance(value, list | tuple | dict) and depth < 3 and len(value) < 100:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return (type(value), *((str(key), _setting(item, depth + 1)) for key, item in items))
    if isinstance(value, Tensor):
        return _tensor_setting(value)
    return id(value)


def _tensor_setting(value: Tensor) -> Any:
    try:
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        return (value.dtype, value.shape, hashlib.sha256(content.numpy().tobytes()).hexdigest())
    except (RuntimeError, NotImplementedError, TypeError):  # on the meta device, sparse or nested
        return id(value)


def _find_layers(backbone: nn.Module) -> tuple[nn.Module, str, list[str]]:
    """The module that owns the layers, the name of their list in it, and the parts of the backbone
    that have a list of such layers.
    """
    config: Any = getattr(backbone, "config", None)
    searched = backbone
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
        searched = _find_language_model(backbone, config)
    found = _find_lists(searched)
    if not found:
        remedy = "build it with crosslayer.Stack"
        if any(map(_has_layers_and_others, searched.modules())):
            remedy = (
                "put its layers into an nn.ModuleList, or into an nn.Sequential of nothing else"
            )
        raise NoLayersError(f"it has no list of layers; {remedy}")
    # a list of embeddings is none of layers
    found = _prefer(found, lambda place: has_children(place.layers[0]))
    # a sequence of one module may be a head
    found = _prefer(found, lambda place: len(place.layers) > 1 or not place.is_sequence)
    count = getattr(config, "num_hidden_layers", None)
    candidates = _prefer(found, lambda place: len(place.layers) == count)
    # Beside a list, a sequence is no list of layers, but may be a stem of convolutions.
    siblings = [place for place in candidates if place.owner is candidates[0].owner]
    chosen = min(siblings, key=lambda place: place.is_sequence)
    # A tower of images beside a language model has layers of another class.
    alike = [p for p in candidates if type(p.layers[0]) is type(chosen.layers[0])]
    names = {module: name for name, module in backbone.named_modules()}
    paths = [names[p.owner if p.model is searched else p.model] for p in alike]
    # Two lists that a model runs alternately, each with its norm, are connected separately.
    lists = [p for p in found if p.model is chosen.model and _norm_names(p.owner)]
    is_one_of_lists = len(lists) > 1 and _norm_names(chosen.owner)
    if isinstance(chosen.model, PreTrainedModel) and not is_one_of_lists:
        return chosen.model, chosen.path, paths
    return chosen.owner, chosen.name, paths


class _ListPlace(NamedTuple):
    """Where a list of modules is."""

    owner: nn.Module  # of the list
    name: str  # of the list in its owner
    model: nn.Module  # around the owner, which reports hidden states
    path: str  # of the list in this model

    @property
    def layers(self) -> list[Any]:
        return _layers_before_norm(getattr(self.owner, self.name))

    @property
    def is_sequence(self) -> bool:
        return isinstance(getattr(self.owner, self.name), nn.Sequential)


def _prefer(places: list[_ListPlace], condition: Callable[[_ListPlace], bool]) -> list[_ListPlace]:
    """The places that satisfy a condition; all of them where none does."""
    return [place for place in places if condition(place)] or places


def _find_lists(backbone: nn.Module) -> list[_ListPlace]:
    """The lists of modules in a backbone."""
    found: list[_ListPlace] = []
    owners = [(backbone, backbone, "")]  # a module, the model around it, the module's path in it
    while owners:
        owner, model, prefix = owners.pop(0)
        if _has_layers_and_others(owner):
            continue
        children: Iterable[tuple[str, Any]] = owner.named_children()
        for name, child in children:
            if isinstance(child, PreTrainedModel):
                owners.append((child, child, ""))
            elif _lists_modules(child):
                found.append(_ListPlace(owner, name, model, prefix + name))
            elif not _is_list(child):
                owners.append((child, model, f"{prefix}{name}."))
    return found


def _is_list(module: Any) -> bool:
    if isinstance(module, nn.ModuleDict):
        return has_numbered_layers(module)
    if isinstance(module, nn.Sequential):  # Most are MLPs, or parts of a model.
        layers = _layers_before_norm(module)
        classes = {type(layer) for layer in layers}
        return len(classes) == 1 and nn.Sequential not in classes and all(map(has_children, layers))
    return isinstance(module, nn.ModuleList)


def _layers_before_norm(listed: nn.Module) -> list[Any]:
    """The layers in a list of them, without the norm that may end an `nn.Sequential`."""
    layers = list_layers(listed)
    if isinstance(listed, nn.Sequential) and len(layers) > 1 and is_norm("", layers[-1]):
        layers.pop()
    return layers


def _has_layers_and_others(module: nn.Module) -> bool:
    """Whether it is a sequence in which several layers are beside other modules."""
    if not isinstance(module, nn.Sequential) or _is_list(module):
        return False
    classes = [type(m) for m in module.children() if has_children(m)]
    return len(set(classes)) < len(classes)


def _lists_modules(module: Any) -> bool:
    """Whether a module is a list with modules in all its places. Some libraries put None there."""
    return _is_list(module) and len(module) > 0 and None not in list_layers(module)


def _find_language_model(model: nn.Module, text_config: Any) -> nn.Module:
    """The outermost part of a model that has the config of its text; the model, if it has none."""
    for module in model.modules():
        if type(getattr(module, "config", None)) is type(text_config):
            return module
    return model


def _find_final_norm(owner: nn.Module, layers: str) -> str | None:
    """The norm at the end of a sequence of layers; or the last norm beside the list of layers, of
    those after it in the module if there are any.

    timm's models have two norms after the layers, and one of them is an `nn.Identity`. Where that
    is the first one, the tokens are pooled before they are normed, so there is no final norm.
    """
    listed = owner.get_submodule(layers)
    if len(_layers_before_norm(listed)) < len(list_layers(listed)):
        return f"{layers}.{list(listed.named_children())[-1][0]}"
    parent, _, list_name = layers.rpartition(".")
    parts = owner.get_submodule(parent)
    order = [name for name, _ in parts.named_children()]
    norms = _norm_names(parts)
    norms = [n for n in norms if order.index(n) > order.index(list_name)] or norms
    # Gemma 4 has one of its per-layer inputs, too.
    widths = _norm_widths(list_layers(listed)[0])
    norms = [n for n in norms if _norm_width(getattr(parts, n)) in (None, *widths)] or norms
    if not norms or isinstance(getattr(parts, norms[0]), nn.Identity):
        return None
    chosen = [name for name in norms if not isinstance(getattr(parts, name), nn.Identity)]
    return f"{parent}.{chosen[-1]}".lstrip(".")


def _norm_names(owner: nn.Module) -> list[str]:
    """The children of a module that are norms."""
    return [name for name, child in owner.named_children() if is_norm(name, child)]


def _norm_widths(layer: nn.Module) -> list[int]:
    """The widths of a layer's norms, without those that have no vector of weights."""
    found = [_norm_width(layer.get_submodule(name)) for name in _norm_names(layer)]
    return [width for width in found if width is not None]


def _norm_width(norm: nn.Module) -> int | None:
    """The length of a norm's weights. It may have vectors of one number too, like DyT's alpha."""
    shapes = [parameter_shape(parameter) for parameter in norm.parameters()]
    return max((shape[0] for shape in shapes if len(shape) == 1), default=None)


def _configs(parts: Iterable[nn.Module]) -> Iterator[Any]:
    """The configs of parts of a model and of what they contain."""
    for part in parts:
        for module in part.modules():
            if hasattr(module, "config"):
                yield module.config


def _stream_width(
    owner: nn.Module, layers: list[Any], final: str | None, config: Any, backbone: nn.Module
) -> int:
    """The width of the stream, from a norm of it, the config, or embeddings of one width."""
    widths = _norm_widths(layers[0])
    if final is not None and (final_width := _norm_width(owner.get_submodule(final))):
        widths.insert(0, final_width)
    width = widths[0] if widths else getattr(config, "hidden_size", None)
    if isinstance(width, int):
        return width
    embeddings = [m.embedding_dim for m in backbone.modules() if isinstance(m, nn.Embedding)]
    if len(set(embeddings)) != 1:
        raise ValueError(
            f"{type(owner).__name__} has no stream of one width: no norm in its layers or beside "
            "them, no hidden_size, and no embeddings of one width"
        )
    return embeddings[0]
