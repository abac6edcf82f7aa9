"""Published checkpoints of whole models: their folder to a transformers model with its connection, and back."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..hf import from_pretrained
from ..hf.checkpoint import WEIGHTS_FILE, FolderWeights, check_weights, read_json
from ..hf.host_quirks import ROPE_DTYPES
from ..validation import DTYPES, check_choice, did_you_mean
from . import muddformer, muddpythia
from .layout import UNUSED, completed, same_arm
from .rows import check_names, check_shapes, convert, turned

LAYOUTS = {"muddformer": muddformer.LAYOUT, "muddpythia": muddpythia.LAYOUT}
HOSTS = {"llama": "muddformer", "qwen3": "muddformer", "gpt_neox": "muddpythia"}


def load_published(
    folder: str | Path, rope: str | None = None, dtype: torch.dtype | str | None = None
) -> PreTrainedModel:
    """A published checkpoint (MUDDFormer's or MUDDPythia's layout) as a connected transformers model.

    Args:
        folder: has config.json and the weights as safetensors, single or sharded with an index.
        rope: "exact" (also None), or "bfloat16" or "float16": what RoPE's cos and sin are rounded to. MUDDFormer's
            reference rounds them to bfloat16 and MUDDPythia's to float16. It is kept in the config.
        dtype: of the body, that of the embedding in the file where None; connection parameters are float32.

    Raises:
        ValueError: the folder, its config.json or its weights are not whole, or of a layout that is not known. All
            names and shapes are checked before a model is built.
    """
    folder = Path(folder)
    dtype = check_choice("dtype", dtype, DTYPES) if isinstance(dtype, str) else dtype
    given = read_json(folder / "config.json")
    weights = FolderWeights(folder)
    layout = LAYOUTS[named(given, weights, folder)]
    config = completed(given, layout)
    cls, settings = layout.host(config)
    if check_choice("rope", rope or "exact", ROPE_DTYPES) is not None:
        settings["crosslayer_rope"] = rope
    host = cls.config_class(**settings)
    rows = layout.rows(config)
    shapes = {
        n: s for n, s in weights.shapes.items() if config["dense"] or not n.startswith(UNUSED)
    }
    with torch.device("meta"):
        expected = convert(turned(rows), cls(host).state_dict())
    try:
        check_names(expected, shapes)
        check_shapes(expected, shapes)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    tensors = {name: tensor for name, tensor in weights.read().items() if name in shapes}
    dtype = tensors["tok_embeddings.weight"].dtype if dtype is None else dtype
    return cls.from_pretrained(None, config=host, state_dict=convert(rows, tensors), dtype=dtype)


def save_published(model: PreTrainedModel, folder: str | Path) -> None:
    """The way back: config.json and model.safetensors in the published layout, in the body's dtype.

    What `load` took comes back to the last bit, but for the idle dense parameters of a checkpoint with dense=False.
    The layout does not say how RoPE's table is rounded.

    Raises:
        ValueError: the model is no Llama, Qwen3 or GPT-NeoX connected with MUDD or "prenorm", or has an option that
            the layout cannot say. Nothing is written then.
    """
    config: Any = model.config
    if config.model_type not in HOSTS or not hasattr(config, "crosslayer"):
        connected = (
            f"with {config.crosslayer!r}" if hasattr(config, "crosslayer") else "unconnected"
        )
        raise ValueError(
            f"the published layouts are of {', '.join(HOSTS)}, got {config.model_type!r} {connected}"
        )
    name = HOSTS[config.model_type]
    layout = LAYOUTS[name]
    theirs = layout.theirs(config)
    for key, wanted in layout.host(completed(theirs, layout))[1].items():
        found: Any = getattr(config, key, None)
        if not (same_arm(found, wanted) if key == "crosslayer" else found == wanted):
            raise ValueError(
                f"the layout of {layout.architecture} cannot say {key}={found!r}, only {wanted!r}"
            )
    tensors = convert(turned(layout.rows(theirs)), model.state_dict())
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {n: t.to("cpu", model.dtype).contiguous() for n, t in tensors.items()},
        folder / WEIGHTS_FILE,
        {"format": "pt"},
    )
    whole = {
        "architectures": [layout.architecture],
        "model_type": name,
        "dtype": str(model.dtype).split(".")[1],
    }
    (folder / "config.json").write_text(json.dumps(whole | theirs, indent=2) + "\n")


def named(config: dict[str, Any], weights: FolderWeights, folder: Path) -> str:
    """The layout's name: what config.json says, or else what the weights look like."""
    if isinstance(config.get("crosslayer"), str):
        raise ValueError(
            f"{folder} is a transformers folder already; AutoModelForCausalLM.from_pretrained loads it"
        )
    said = config.get("model_type")
    if said in LAYOUTS:
        return str(said)
    if (
        said is None
        and {"dim", "n_layer"} <= config.keys()
        and "tok_embeddings.weight" in weights.shapes
    ):
        return "muddpythia" if "norm.bias" in weights.shapes else "muddformer"
    what = (
        f"model_type {said!r}{did_you_mean(str(said), LAYOUTS)}"
        if said
        else "neither a model_type nor gpt-fast's names"
    )
    raise ValueError(f"{folder} is of no known layout ({what}); known: {', '.join(LAYOUTS)}")


def published(folder: Path) -> bool:
    """Whether a folder's config.json is of a published layout rather than transformers' own."""
    config = read_json(folder / "config.json")
    return config.get("model_type") in LAYOUTS or (
        "model_type" not in config and "n_layer" in config
    )


def open_model(
    folder: str | Path, dtype: torch.dtype | str = "auto", rope: str | None = None
) -> PreTrainedModel:
    """Any language model in a folder: a published checkpoint, a connected model, or a plain one of transformers.

    Args:
        folder: with config.json and safetensors; no pickle is loaded.
        dtype: of the body, by default as it was saved.
        rope: of a published checkpoint, see `load`.

    Raises:
        ValueError: there is no whole model in the folder.
    """
    folder = Path(folder)
    if published(folder):
        return load_published(folder, rope, None if dtype == "auto" else dtype)
    if rope is not None:
        raise ValueError(
            "rope is of a published checkpoint; this folder's config.json says its own"
        )
    if "crosslayer" in read_json(folder / "config.json"):
        return from_pretrained(folder, dtype=dtype)
    check_weights(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, local_files_only=True
    )
