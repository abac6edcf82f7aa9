"""`crosslayer generate`: continue a prompt, token by token."""

import sys
from typing import Any

from ..validation import check_non_negative, check_positive, check_seed, has_surrogate
from .console import silence_libraries
from .options import add_model, add_model_options, choose_device, make_parser, parse_model_dtype

_LOWEST_TEMPERATURE = 1e-6  # what is divided by a lower one may overflow


def parser() -> Any:
    command = make_parser(
        "Continue a prompt with a language model. Without a prompt, continue each line of standard "
        "input that is not blank."
    )
    add_model(command)
    add = command.add_argument
    add("prompt", type=str, nargs="?", default=None, help="the text to continue")
    add("--max-new-tokens", type=int, default=128, help="maximum number of generated tokens")
    add("--temperature", type=float, default=0.0, help="of the sampling; 0: the likeliest token")
    add("--top-p", type=float, default=1.0, help="of the sampling: the probability mass")
    add("--seed", type=int, default=0, help="seed of the sampling")
    add_model_options(command)
    add(
        "--rope",
        type=str,
        default=None,
        help="--rope of crosslayer convert, for a published checkpoint",
    )
    return command


def run(options: Any) -> int:
    silence_libraries()
    from ..convert.pretrained import check_tokenizer, open_model, open_tokenizer
    from ..evaluate.language_models import check_logits

    check_positive(max_new_tokens=options.max_new_tokens)
    check_non_negative(temperature=options.temperature)
    if 0 < options.temperature < _LOWEST_TEMPERATURE:
        raise ValueError(
            f"temperature must be 0 or at least {_LOWEST_TEMPERATURE}, got {options.temperature}"
        )
    check_seed(options.seed)
    if not 0 < options.top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {options.top_p}")
    if options.top_p < 1 and not options.temperature:
        raise ValueError("top_p needs a temperature: without one, no token is drawn at random")
    device = choose_device(options.device)
    dtype = parse_model_dtype(options.dtype)
    tokenizer = open_tokenizer(options.tokenizer or options.model)
    model = open_model(options.model, dtype, options.rope).to(device).eval()
    check_tokenizer(tokenizer, model)
    check_logits(model)
    prompts = sys.stdin if options.prompt is None else [options.prompt]
    for prompt in prompts:
        if options.prompt is not None or prompt.strip():
            _print_continuation(model, tokenizer, prompt.removesuffix("\n"), options)
    return 0


def _print_continuation(model: Any, tokenizer: Any, prompt: str, options: Any) -> None:
    """Print the continuation while it is generated."""
    import torch
    from transformers import GenerationConfig, TextStreamer

    from ..evaluate.language_models import encode_without_end, end_tokens, find_first_token

    if has_surrogate(prompt):
        raise ValueError("the prompt is not UTF-8 text")
    tokens = encode_without_end(tokenizer, prompt)
    if not tokens:  # the model begins a text
        first = find_first_token(tokenizer, model)
        if first is None:
            raise ValueError("the prompt has no tokens, and no token is known that begins a text")
        tokens = [first]
    ids = torch.tensor([tokens]).to(model.device)
    new_tokens = _tokens_that_fit(model, ids.shape[1], options.max_new_tokens)
    settings: dict[str, Any] = {"do_sample": False}
    if options.temperature > 0:
        settings = {
            "do_sample": True,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": 0,
        }
    # The tokenizer's end takes precedence: a published config may have a default of its class.
    # What else the folder's generation_config.json asks for would be added to these options.
    model.generation_config = GenerationConfig(
        max_new_tokens=new_tokens,
        eos_token_id=end_tokens(tokenizer, model) or None,
        pad_token_id=0,  # One prompt at a time needs no padding, but transformers warns without it.
        **settings,
    )
    torch.manual_seed(options.seed)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        trust_remote_code=False,
    )


def _tokens_that_fit(model: Any, prompt_tokens: int, new_tokens: int) -> int:
    """The number of new tokens, or as many as the model's context has room for, with a warning."""
    from ..evaluate.language_models import context_limit

    context = context_limit(model)
    if context is None or prompt_tokens + new_tokens <= context:
        return new_tokens
    if prompt_tokens >= context:
        raise ValueError(
            f"the prompt has {prompt_tokens} tokens, but the model's context of {context} must "
            "have room for a new one"
        )
    room = context - prompt_tokens
    print(f"crosslayer: at most {room} new tokens fit the context of {context}", file=sys.stderr)
    return room
