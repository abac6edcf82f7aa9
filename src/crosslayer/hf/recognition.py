"""The wiring of a host that no row describes: its list of layers, its final norm, and what its
layers' own code does (`layer_recognition.py`).
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .families import LayerWiring, ModelWiring
from .layer_recognition import is_norm, paths_around, recognise_layer


def recognise_model(backbone: Any) -> tuple[Any, ModelWiring]:
    """The module that owns a model's layers, and its wiring.

    Args:
        backbone: a model, or a part of it, in which a module has a list of layers and their final
            norm.

    Raises:
        ValueError: there is no such list, or its layers have no stream. The message says why.
    """
    if hasattr(backbone, "encoder") and hasattr(backbone, "decoder"):
        raise ValueError(
            "encoder-decoder models cannot be connected, as their layers have two inputs"
        )
    path = _find_layers(backbone)
    layers: Any = backbone.get_submodule(path)
    final = _find_final_norm(backbone, path)
    owner_path = _find_owner(backbone, path, final)
    owner = backbone.get_submodule(owner_path)
    config = getattr(owner, "config", getattr(backbone, "config", None))
    parameters = backbone.get_submodule(final).parameters() if final else ()
    weights = [parameter for parameter in parameters if parameter.dim() == 1]
    dim = weights[0].shape[0] if weights else getattr(config, "hidden_size", None)
    if dim is None:
        raise ValueError("nothing tells the width of its stream, like a final norm with a weight")
    try:
        of_layers = _recognise_layers(layers, dim)
    except ValueError:
        _check_list_of_layers(backbone, path, config)
        raise
    last_norms = {bool(wiring.last_norm) for wiring in of_layers}
    if last_norms == {True}:
        final = f"{path}.{len(layers) - 1}.{of_layers[-1].last_norm}"
    elif True in last_norms:
        raise ValueError("some of its layers are pre-norm and others post-norm")
    elif not final:
        raise ValueError(f"{type(backbone).__name__} has no norm after its pre-norm layers")
    prefix = f"{owner_path}." if owner_path else ""
    wiring = ModelWiring(path.removeprefix(prefix), final.removeprefix(prefix), dim, of_layers)
    return owner, wiring


def _recognise_layers(layers: Any, dim: int) -> tuple[LayerWiring, ...]:
    wiring_of_kind: dict[Any, LayerWiring] = {}
    of_layers = []
    for number, layer in enumerate(layers):
        kind = layer_kind(layer)
        if kind not in wiring_of_kind:
            try:
                wiring_of_kind[kind] = recognise_layer(layer, dim)
            except ValueError as error:
                raise ValueError(f"layer {number}, a {type(layer).__name__}: {error}") from None
        of_layers.append(wiring_of_kind[kind])
    return tuple(of_layers)


def _check_list_of_layers(backbone: nn.Module, path: str, config: Any) -> None:
    """Raise a ValueError where the members of a list are no layers."""
    if getattr(config, "num_hidden_groups", None):
        raise ValueError("its layers share their weights, and connections need layers of their own")
    owner_path, _, name = path.rpartition(".")
    children = dict(backbone.get_submodule(owner_path).named_children())
    lists = {key: child for key, child in children.items() if isinstance(child, nn.ModuleList)}
    alike = [key for key, child in lists.items() if len(child) == len(lists[name])]
    if len(alike) > 1:
        raise ValueError(
            f"its sub-layers are in lists of their own, {', '.join(alike)}, not in layers"
        )


def layer_kind(layer: nn.Module) -> tuple[Any, ...]:
    """What tells layers apart: their classes, those of their modules, and their settings."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    settings = [
        (name, value)
        for name, value in vars(layer).items()
        if isinstance(value, bool | float | str) and name != "training"
    ]
    return (modules, *settings)


def _find_layers(backbone: nn.Module) -> str:
    """The path of the list of layers."""
    config: Any = getattr(backbone, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    count = getattr(config, "num_hidden_layers", None)
    found = []
    owners: list[tuple[str, nn.Module]] = [("", backbone)]
    while owners:
        prefix, owner = owners.pop(0)
        for name, child in owner.named_children():
            if not isinstance(child, nn.ModuleList):
                owners.append((f"{prefix}{name}.", child))
            elif len(child):
                found.append((prefix + name, child))
    for path, layers in found:
        if len(layers) == count:
            return path
    if not found:
        raise ValueError("it has no list of layers")
    return found[0][0]


def _find_final_norm(backbone: nn.Module, layers: str) -> str:
    """The path of the last norm beside the layers, or beside a module around them; or empty."""
    for path in paths_around(layers):
        prefix = f"{path}." if path else ""
        for name, child in reversed(list(backbone.get_submodule(path).named_children())):
            if is_norm(name, child):
                return prefix + name
    return ""


def _find_owner(backbone: nn.Module, layers: str, final: str) -> str:
    """The path of the innermost module of transformers' with the layers and the final norm, which
    records hidden states; of the innermost module of all where there is none.
    """
    around_final = paths_around(final or layers)
    paths = [path for path in paths_around(layers) if path in around_final]
    for path in paths:
        if isinstance(backbone.get_submodule(path), PreTrainedModel):
            return path
    return paths[0]
