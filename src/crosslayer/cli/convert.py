"""`crosslayer convert`: a published checkpoint as a folder that transformers loads."""

from pathlib import Path
from typing import Any

from ..files import new_folder
from .console import silence_libraries
from .options import make_parser, parse_model_dtype


def parser() -> Any:
    command = make_parser(
        "Convert a published checkpoint (MUDDFormer's or MUDDPythia's layout) into a folder for "
        "transformers' from_pretrained. The tokenizer's files are copied."
    )
    add = command.add_argument
    add("source", type=str, help="folder with config.json and safetensors")
    add("out", type=str, help="folder to write; new or empty")
    add(
        "--rope",
        type=str,
        default="exact",
        help="dtype that RoPE's table is rounded to: exact, bfloat16 (MUDDFormer's reference) or "
        "float16 (MUDDPythia's)",
    )
    add("--dtype", type=str, default="auto", help="dtype of the weights; default: as saved")
    return command


def run(options: Any) -> int:
    silence_libraries()
    from ..convert import load_published
    from ..convert.pretrained import copy_tokenizer

    source = Path(options.source)
    out = Path(options.out)
    if not source.is_dir():
        raise ValueError(f"{source}: no such folder; download the checkpoint first")
    dtype = parse_model_dtype(options.dtype)
    with new_folder(out) as work:
        model = load_published(source, options.rope, None if dtype == "auto" else dtype)
        model.save_pretrained(work)
        copy_tokenizer(source, work)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{out}: {type(model).__name__} with {model.config.crosslayer}, {parameters:,} parameters"
    )
    return 0
