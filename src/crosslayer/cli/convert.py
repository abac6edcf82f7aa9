"""`crosslayer convert`: a published checkpoint's folder to one that transformers loads."""

import os
import shutil
from pathlib import Path
from typing import Any

from ..validation import check_choice
from .console import make_parser, silence_libraries

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def parser() -> Any:
    command = make_parser(
        "Convert a published checkpoint (the layout of MUDDFormer-2.8B or MUDDPythia) into a folder that "
        "transformers' from_pretrained loads once crosslayer is imported. The tokenizer's files are carried along."
    )
    command.add_argument("source", type=str, help="folder with config.json and safetensors")
    command.add_argument("out", type=str, help="folder to write, new or empty")
    command.add_argument(
        "--rope", type=str, default="exact",
        help="exact, bfloat16 or float16: what RoPE's table is rounded to (the references': MUDDFormer bfloat16, "
        "MUDDPythia float16)",
    )  # fmt: skip
    command.add_argument(
        "--dtype", type=str | None, default=None, help="of the weights; the checkpoint's by default"
    )
    return command


def run(options: Any) -> int:
    silence_libraries()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all it reads is local
    from ..convert import load_published
    from ..validation import DTYPES

    source, out = Path(options.source), Path(options.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already; name a new or an empty folder")
    model = load_published(
        source, options.rope, options.dtype and check_choice("dtype", options.dtype, DTYPES)
    )
    model.save_pretrained(out)
    for path in (source / name for name in TOKENIZER):
        if path.is_file():
            shutil.copyfile(path, out / path.name)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{out}: {type(model).__name__} with {model.config.crosslayer}, {parameters:,} parameters"
    )
    return 0
