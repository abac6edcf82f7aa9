"""A small random model of any family of transformers, and what it computes for a small input."""

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from crosslayer.testing.tiny_model import perturb_weights
from tests.hf.family_sizes import DROPPED, LAYERS, NESTED_SIZES, ROWS, SIZES, TOWERS

MAX_PARAMETERS = 5e7
IMAGE = SIZES["image_size"]
PATCH = SIZES["patch_size"]
PATCHES = (IMAGE // PATCH) ** 2

Inputs = dict[str, Any]


class SmallModel(NamedTuple):
    model: Any
    inputs: Inputs
    expected: Tensor  # logits, or what it has in place of them
    note: str


class Kind(NamedTuple):
    """Families that take inputs of one kind."""

    name: str
    classes: dict[str, str]  # by family
    # Inputs to try with a model, in order, and what the page says of them.
    make_inputs: Callable[[str, Any], Iterator[tuple[Inputs, str]]]


def make_ids(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(3, 80, (batch, length), generator=torch.Generator().manual_seed(3))


def shrink_config(cls: Any, sizes: dict[str, Any] = SIZES) -> dict[str, Any]:
    """Arguments of a config class for a small model."""
    default = cls()
    names = getattr(cls, "attribute_map", {})
    settings: dict[str, Any] = {}
    for key, size in {**sizes, "num_hidden_layers": LAYERS}.items():
        name = names.get(key, key)
        if _has_key(default, name):
            settings[name] = size
    for key, value in vars(default).items():
        if isinstance(value, transformers.PreTrainedConfig):
            nested = {**SIZES, **NESTED_SIZES.get(key, {})}
            settings[key] = {**value.to_dict(), **shrink_config(type(value), nested)}
        is_of_layers = isinstance(value, list) and key not in settings
        if is_of_layers and len(value) == getattr(default, "num_hidden_layers", None):
            kinds = [kind for i, kind in enumerate(value) if kind not in value[:i]]
            settings[key] = (kinds + value[-1:] * LAYERS)[:LAYERS]
    return settings


def _has_key(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # where layers differ in it
        return True


def build_small(kind: Kind, family: str) -> SmallModel:
    """A small random model of a family.

    Raises:
        Exception: of any class, where the shrunk config is none of the family's.
    """
    config_class = CONFIG_MAPPING[family]
    model_class = getattr(transformers, kind.classes[family])
    settings = _merge(shrink_config(config_class), ROWS.get(family, {}))
    problem: Exception | None = None
    for dropped in DROPPED:
        try:
            kept = {key: value for key, value in settings.items() if key not in dropped}
            config = config_class(**copy.deepcopy(kept))
            config = _part_for(model_class, config)
            with torch.device("meta"):
                parameters = model_class(copy.deepcopy(config)).num_parameters()
            if parameters > MAX_PARAMETERS:
                raise ValueError(f"the shrunk model has {parameters:,} parameters")
            torch.manual_seed(0)
            model = perturb_weights(model_class(config).eval(), 0.05)
            return _run_first(kind, family, model)
        except Exception as error:  # of any class, from a family's own code
            problem = problem or error
    raise problem  # type: ignore[misc]


def _part_for(model_class: Any, config: Any) -> Any:
    """The config that a class of models takes: a family's own, or a part of it."""
    parts = [config, *vars(config).values()]
    return next((part for part in parts if type(part) is model_class.config_class), config)


def _run_first(kind: Kind, family: str, model: Any) -> SmallModel:
    """Run the model with the first inputs that it takes."""
    problem: Exception | None = None
    for inputs, note in kind.make_inputs(family, model):
        try:
            output = read_output(model, inputs)
        except Exception as error:  # of any class, from a family's own code
            problem = problem or error
            continue
        if not torch.isfinite(output).all():
            raise ValueError("the shrunk model's logits are not finite")
        return SmallModel(model, inputs, output, note)
    raise problem  # type: ignore[misc]


@torch.no_grad()
def read_output(model: Any, inputs: Inputs) -> Tensor:
    """A model's logits, or the first tensor that it returns."""
    torch.manual_seed(0)  # Some models mask patches at random.
    outputs = model(**inputs, return_dict=True)
    for name in ("logits", "last_hidden_state"):
        if isinstance(outputs.get(name), Tensor):
            return outputs[name]
    return next(value for value in outputs.values() if isinstance(value, Tensor))


def _merge(settings: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Settings with those of a row in their place. None removes one."""
    merged = dict(settings)
    for key, value in row.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        elif value is None:
            merged.pop(key, None)
        else:
            merged[key] = value
    return merged


def _token_inputs(family: str, model: Any) -> Iterator[tuple[Inputs, str]]:
    yield {"input_ids": make_ids(), "use_cache": False}, ""


def _pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


def _image_inputs(family: str, model: Any) -> Iterator[tuple[Inputs, str]]:
    """What vision models take: images, patches of them, or frames."""
    size = getattr(model.config, "image_size", IMAGE)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    frames = getattr(model.config, "num_frames", 2)
    flat = 3 * PATCH * PATCH
    patches = {
        "pixel_values": _pixels(2, PATCHES, flat),
        "spatial_shapes": torch.full((2, 2), IMAGE // PATCH),
    }
    grid = torch.tensor([[1, IMAGE // PATCH, IMAGE // PATCH]])
    temporal = getattr(model.config, "temporal_patch_size", 1)
    merge = getattr(model.config, "spatial_merge_size", 1)
    candidates: list[Inputs] = [
        {"pixel_values": _pixels(2, 3, height, width)},
        {**patches, "pixel_attention_mask": torch.ones(2, PATCHES, dtype=torch.long)},
        {"pixel_values": _pixels(2, frames, 3, height, width)},
        {"pixel_values_videos": _pixels(2, frames, 3, height, width)},
        {"input_ids": make_ids()},
        {"hidden_states": _pixels(PATCHES, flat * temporal), "grid_thw": grid},
        {
            "pixel_values": _pixels(PATCHES, flat),
            "grid_thw": grid,
            "merge_sizes": torch.tensor([merge]),
        },
        {"input_values": _pixels(2, 32, 16)},
    ]
    for inputs in candidates:
        yield inputs, ""


def _features(model: Any, inputs: Inputs) -> int:
    """The number of image tokens that a model's features of two images replace."""
    owner = model if hasattr(model, "get_image_features") else model.model
    outputs = owner.get_image_features(**inputs)
    features = getattr(outputs, "pooler_output", outputs)
    if features is None:
        features = outputs.last_hidden_state
    tensors = [features] if isinstance(features, Tensor) else list(features)
    if isinstance(tensors[0], list | tuple):  # with deep features beside them
        tensors = list(tensors[0])
    width = model.config.get_text_config().hidden_size
    return sum(tensor.numel() for tensor in tensors) // width


def _image_and_text_inputs(family: str, model: Any) -> Iterator[tuple[Inputs, str]]:
    """Two texts with an image each; text alone where nobody knows what the model takes."""
    vision = getattr(model.config, "vision_config", model.config)
    size = getattr(vision, "image_size", IMAGE)
    size = size if isinstance(size, int) else size[0]
    flat = 3 * PATCH * PATCH * getattr(vision, "temporal_patch_size", 1)
    sizes = torch.full((2, 2), size)
    grid = torch.tensor([[1, IMAGE // PATCH, IMAGE // PATCH]] * 2)
    candidates: list[Inputs] = [
        {"pixel_values": _pixels(2, 3, size, size)},
        {"pixel_values": _pixels(2, 3, size, size), "image_sizes": sizes},
        {"pixel_values": _pixels(2, 5, 3, size, size), "image_sizes": sizes},
        {"pixel_values": _pixels(2, 1, 3, size, size)},
        {"pixel_values": _pixels(2 * PATCHES, flat), "image_grid_thw": grid},
        {
            "pixel_values": _pixels(2, PATCHES, flat),
            "spatial_shapes": torch.full((2, 2), IMAGE // PATCH),
            "pixel_attention_mask": torch.ones(2, PATCHES, dtype=torch.long),
        },
    ]
    token = next(
        (
            getattr(model.config, name)
            for name in ("image_token_id", "image_token_index")
            if isinstance(getattr(model.config, name, None), int)
        ),
        None,
    )
    for images in candidates:
        try:
            with torch.no_grad():
                count = _features(model, images) // 2
        except Exception:  # of any class, from a family's own code
            continue
        if token is None or not count:
            break
        ids = torch.cat((make_ids(), torch.full((2, count), token), make_ids()), 1)
        inputs = {"input_ids": ids, "use_cache": False, **images}
        if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
            inputs["mm_token_type_ids"] = (ids == token).long()
        yield inputs, "with images"
    pixels = candidates[0]
    yield {"input_ids": make_ids(), "use_cache": False}, "with text alone"
    yield {"input_ids": make_ids(), "decoder_input_ids": make_ids()}, "with text alone"
    yield {"input_ids": make_ids(), **pixels}, "with images"
    yield {"decoder_input_ids": make_ids(), **pixels}, "with images"
    yield {"input_ids": make_ids(), "qformer_input_ids": make_ids(), **pixels}, "with images"


def _first_class(names: str | tuple[str, ...]) -> str:
    return names if isinstance(names, str) else names[0]


def _classes(mapping: dict[str, Any]) -> dict[str, str]:
    return {family: _first_class(names) for family, names in mapping.items()}


LANGUAGE = Kind("language", _classes(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), _token_inputs)
VISION = Kind(
    "vision",
    {
        **_classes(auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
        **_classes({f: c for f, c in auto.MODEL_MAPPING_NAMES.items() if f in TOWERS}),
    },
    _image_inputs,
)
MULTI_MODAL = Kind(
    "multi-modal",
    _classes(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    _image_and_text_inputs,
)
ENCODER = Kind(
    "encoder",
    {
        family: cls
        for family, cls in _classes(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES).items()
        if family not in LANGUAGE.classes
    },
    _token_inputs,
)
MODEL_KINDS = (LANGUAGE, ENCODER, VISION, MULTI_MODAL)
