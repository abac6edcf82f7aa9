"""`crosslayer generate`: a model's continuation of a prompt, as it comes; without a prompt, of every line typed."""

import os
import sys
from pathlib import Path
from typing import Any

from ..validation import check_choice, check_positive
from .console import make_parser, silence_libraries


def parser() -> Any:
    command = make_parser(
        "Continue a prompt with a model, token by token. Without a prompt, read one a line; Ctrl-D leaves. Where the "
        "tokenizer has a chat template, it is a conversation."
    )
    command.add_argument(
        "model", type=str,
        help="a local folder: a transformers model, connected or not, or a published checkpoint, converted on the fly",
    )  # fmt: skip
    command.add_argument(
        "prompt", type=str | None, nargs="?", default=None, help="what to continue"
    )
    command.add_argument(
        "--tokenizer", type=str | None, default=None, help="a tokenizer.json or its folder"
    )
    command.add_argument(
        "--max-new-tokens", "--max_new_tokens", type=int, default=128, help="how many at most"
    )
    command.add_argument(
        "--temperature", type=float, default=0.0, help="of sampling; 0 takes the likeliest token"
    )
    command.add_argument(
        "--top-p", "--top_p", type=float, default=1.0, help="sample within this probability mass"
    )
    command.add_argument("--seed", type=int, default=0, help="of sampling")
    command.add_argument("--device", type=str, default="cpu", help="like cpu or cuda")
    command.add_argument(
        "--dtype", type=str | None, default=None, help="of the weights; the checkpoint's by default"
    )
    command.add_argument(
        "--rope", type=str | None, default=None, help="of a published checkpoint; see convert"
    )
    return command


def run(options: Any) -> int:
    silence_libraries()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all it reads is local
    checked(options)
    folder = Path(options.model)
    tokenizer = tokenizer_of(folder, options.tokenizer)
    model = model_of(folder, options)
    history: list[dict[str, str]] = []
    try:
        if options.prompt is not None:
            say(model, tokenizer, options.prompt, history, options)
            return 0
        while True:
            line = input("> " if sys.stdin.isatty() else "")
            if line.strip():
                say(model, tokenizer, line, history, options)
    except EOFError:
        return 0
    except KeyboardInterrupt:
        print()
        return 130


def checked(options: Any) -> None:
    check_positive(max_new_tokens=options.max_new_tokens)
    if options.temperature < 0:
        raise ValueError(f"temperature must be at least 0, got {options.temperature}")
    if not 0 < options.top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {options.top_p}")
    if not Path(options.model).is_dir():
        raise ValueError(f"{options.model} is no folder; generate takes a local one")


def tokenizer_of(folder: Path, given: str | None) -> Any:
    """The tokenizer that was named, or the folder's own."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    home = folder if given is None else Path(given)
    bare = home if home.is_file() else home / "tokenizer.json"
    said = (home / "tokenizer_config.json").is_file()
    if not said and not bare.is_file():
        raise ValueError(
            f"{home} has no tokenizer"
            + ("" if given else "; name a tokenizer.json with --tokenizer")
        )
    try:
        # where nothing says its class, the model's type would be a wrong guess
        return (
            AutoTokenizer.from_pretrained(home)
            if said
            else PreTrainedTokenizerFast(tokenizer_file=str(bare))
        )
    except Exception as error:  # the tokenizers library raises no class of its own
        raise ValueError(f"cannot read the tokenizer of {home} ({error})") from error


def model_of(folder: Path, options: Any) -> Any:
    import torch

    from ..convert import open_model
    from ..validation import DTYPES

    try:
        device = torch.device(options.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"cannot use the device {options.device!r} ({str(error).splitlines()[0]})"
        ) from error
    dtype = check_choice("dtype", options.dtype, DTYPES) if options.dtype else "auto"
    return open_model(folder, dtype, options.rope).to(device).eval()


def say(
    model: Any, tokenizer: Any, prompt: str, history: list[dict[str, str]], options: Any
) -> None:
    """Print the continuation as it comes; in a conversation, remember both."""
    import torch
    from transformers import GenerationConfig, TextStreamer

    if tokenizer.chat_template:
        history.append({"role": "user", "content": prompt})
        inputs = tokenizer.apply_chat_template(
            history, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    ids = inputs["input_ids"].long().to(model.device)
    if ids.numel() == 0:
        raise ValueError("the prompt has no tokens")
    if ids.max() >= model.config.vocab_size:
        raise ValueError(
            f"the tokenizer gives the token {ids.max()}, but the model has {model.config.vocab_size}: it is another's"
        )
    sampling = {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
    settings = GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        do_sample=options.temperature > 0,
        eos_token_id=ends(model, tokenizer),
        pad_token_id=0,  # nothing is padded: one prompt at a time
        **(sampling if options.temperature > 0 else {}),
    )
    torch.manual_seed(options.seed)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=streamer
    )
    if tokenizer.chat_template:
        answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        history.append({"role": "assistant", "content": answer})


def ends(model: Any, tokenizer: Any) -> list[int] | None:
    """The tokens that end a text: the tokenizer's, as published configs carry defaults that are none of its."""
    found = model.generation_config.eos_token_id
    models = found if isinstance(found, list) else [found]
    both = (
        [tokenizer.eos_token_id, *models] if tokenizer.chat_template else [tokenizer.eos_token_id]
    )
    known = sorted(
        {token for token in both if token is not None}
        or {token for token in models if token is not None}
    )
    return known or None
