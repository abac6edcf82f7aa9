"""Published checkpoints of whole models: from their folder to a connected model of transformers,
and back.
"""

import json
import reprlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from ..files import read_json
from ..hf.host_quirks import ROPE_DTYPES
from ..hf.weights import WEIGHTS_FILE, read_tensor_shapes, read_tensors
from ..run_folders import CONFIG_FILE
from ..spec import is_same_connection
from ..validation import check_choice, did_you_mean, dtype_name, parse_dtype
from . import muddformer, muddpythia
from .layout import IDLE_TENSORS, ConfigDict, anchor_shapes, complete_config
from .rows import check_names, check_shapes, convert_tensors, read_shapes, reverse_rows

_LAYOUTS = {"muddformer": muddformer.LAYOUT, "muddpythia": muddpythia.LAYOUT}
_LAYOUT_OF_HOST = {"llama": "muddformer", "qwen3": "muddformer", "gpt_neox": "muddpythia"}


def load_published(
    folder: str | Path, rope: str | None = None, dtype: torch.dtype | str | None = None
) -> PreTrainedModel:
    """A published checkpoint (MUDDFormer's or MUDDPythia's layout) as a connected model of
    transformers.

    Args:
        folder: has config.json and the weights as safetensors, single or sharded with an index.
        rope: the dtype that RoPE's cos and sin are rounded to: "exact" (also None), "bfloat16" as
            in MUDDFormer's reference, or "float16" as in MUDDPythia's. The model's config keeps it.
        dtype: of the backbone; None is the dtype of the embedding in the file. Connection
            parameters are float32, or float64 in a float64 model.

    Raises:
        ValueError: the layout is unknown, or config.json or the weights are damaged or incomplete.
            All names and shapes are checked before a model is built.
    """
    folder = Path(folder)
    if isinstance(dtype, str):
        dtype = parse_dtype(dtype)
    given_config = read_json(folder / CONFIG_FILE)
    shapes = read_tensor_shapes(folder)
    layout = _LAYOUTS[_find_layout(given_config, shapes, folder)]
    try:
        config = complete_config(given_config, layout)
        _check_anchors(config, shapes)
        model_class, settings = layout.host_config(config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    if check_choice("rope", rope or "exact", ROPE_DTYPES) is not None:
        settings["crosslayer_rope"] = rope
    host_config = model_class.config_class(**settings)
    rows = layout.tensor_rows(config)

    # Names and shapes, from the files' headers and a model without weights.
    if not config["dense"]:
        shapes = {n: shape for n, shape in shapes.items() if not n.startswith(IDLE_TENSORS)}
    with torch.device("meta"):
        host_tensors = model_class(host_config).state_dict()
    expected = convert_tensors(reverse_rows(rows), host_tensors)
    try:
        check_names(expected, shapes)
        check_shapes(read_shapes(expected), shapes)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None

    tensors = {name: tensor for name, tensor in read_tensors(folder).items() if name in shapes}
    if dtype is None:
        dtype = tensors["tok_embeddings.weight"].dtype
    state_dict = convert_tensors(rows, tensors)
    return model_class.from_pretrained(None, config=host_config, state_dict=state_dict, dtype=dtype)


def save_published(model: PreTrainedModel, folder: str | Path) -> None:
    """The inverse of `load_published`: config.json and model.safetensors, in the dtype of the
    backbone. Parameters of connections that it would round are saved in float32.

    What `load_published` read keeps its values, without the idle dense parameters of a checkpoint
    with dense=False. The layout does not say how RoPE's table is rounded.

    Args:
        model: a Llama, Qwen3 or GPT-NeoX connected with "mudd" or "prenorm".
        folder: to write.

    Raises:
        ValueError: the layout cannot represent the model. Nothing is written then.
    """
    config: Any = model.config
    spec = getattr(config, "crosslayer", None)
    if config.model_type not in _LAYOUT_OF_HOST or spec is None:
        connection = "unconnected" if spec is None else f"with {spec!r}"
        raise ValueError(
            f"the published layouts are of {', '.join(_LAYOUT_OF_HOST)}, "
            f"got {config.model_type!r} {connection}"
        )
    name = _LAYOUT_OF_HOST[config.model_type]
    layout = _LAYOUTS[name]
    published_config = layout.published_config(config)
    # What loading would make of this config.json must be the model's own config.
    _, settings = layout.host_config(complete_config(published_config, layout))
    for key, expected in settings.items():
        value = getattr(config, key, None)
        is_equal = value == expected
        if key == "crosslayer":
            is_equal = is_same_connection(spec, expected)
        if not is_equal:
            raise ValueError(
                f"the layout of {layout.architecture} cannot represent {key}={value!r}, "
                f"only {expected!r}"
            )
    rows = layout.tensor_rows(published_config)
    tensors = convert_tensors(reverse_rows(rows), model.state_dict())
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {n: _narrow_exactly(t, model.dtype).contiguous() for n, t in tensors.items()},
        folder / WEIGHTS_FILE,
        {"format": "pt"},
    )
    header = {
        "architectures": [layout.architecture],
        "model_type": name,
        "dtype": dtype_name(model.dtype),
    }
    content = json.dumps(header | published_config, indent=2)
    (folder / CONFIG_FILE).write_text(content + "\n")


def _narrow_exactly(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU, converted to a dtype, or unchanged where conversion would round it."""
    tensor = tensor.cpu()
    narrow = tensor.to(dtype)
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


def is_published(folder: Path) -> bool:
    """Whether a folder's config.json has a published layout rather than transformers'."""
    config = read_json(folder / CONFIG_FILE)
    if "model_type" in config:
        return config["model_type"] in list(_LAYOUTS)  # which compares values that cannot be hashed
    return "n_layer" in config


def _find_layout(config: ConfigDict, shapes: dict[str, tuple[int, ...]], folder: Path) -> str:
    """The layout's name, which config.json says or the names of the weights show."""
    if isinstance(config.get("crosslayer"), str):
        raise ValueError(
            f"{folder} is a connected model of transformers already; "
            "crosslayer.from_pretrained loads it"
        )
    model_type = config.get("model_type")
    if model_type in list(_LAYOUTS):
        return str(model_type)
    if model_type is not None:
        reason = f"model_type {reprlib.repr(model_type)}{did_you_mean(model_type, _LAYOUTS)}"
    elif {"dim", "n_layer"} <= config.keys() and "tok_embeddings.weight" in shapes:
        # gpt-fast's names; MUDDPythia's norms have biases
        return "muddpythia" if "norm.bias" in shapes else "muddformer"
    else:
        reason = "neither a model_type nor gpt-fast's names"
    raise ValueError(f"{folder} is of no known layout ({reason}); known: {', '.join(_LAYOUTS)}")


def _check_anchors(config: ConfigDict, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise a ValueError where the sizes in config.json are not those of the weights.

    Before anything of the sizes in config.json is built.
    """
    expected = anchor_shapes(config)
    check_names(expected, expected.keys() & shapes.keys())
    check_shapes(expected, shapes)
