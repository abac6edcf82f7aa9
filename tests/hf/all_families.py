"""Every causal language model of transformers, small and random, connected: docs/families.md.

python -m tests.hf.all_families            # writes the table, in about two minutes
python -m tests.hf.all_families llama      # prints the rows of some families
"""

import copy
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import crosslayer
from tests.support.tiny import shake

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
LAYERS = 4
MAX_PARAMETERS = 2e7
ROUNDING = 1e-4  # the largest difference of a logit that is rounding, in units of the largest logit
METHODS = ("prenorm", "mudd")
# Config keys by transformers' common names, and families' own names for sizes.
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "sliding_window": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 4,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "lru_width": 32, "rotary_dim": 4,
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
    "mamba_expand": 2, "mamba_d_ssm": 64, "ssm_state_size": 8, "mamba_num_heads": 8,
    "mamba_head_dim": 8, "n_groups": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
    "attn_layer_indices": [1], "expand": 2, "num_heads": 8, "state_size": 8,
    "n_embd": 32, "n_head": 4, "n_inner": 64, "d_model": 32, "n_heads": 4,
    "ffn_hidden_size": 64, "ffn_dim": 64, "word_embed_proj_dim": 32,
    "decoder_layers": LAYERS, "encoder_layers": LAYERS, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64,
    "residual_multiplier": 0.22, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8,
}  # fmt: skip
# Keys that a config refuses or that its model does not run with: tried without them, in this order.
DROPPED = (
    (), ("layer_types",), ("head_dim",), ("head_dim", "layer_types"), ("num_key_value_heads",),
    ("q_lora_rank",), ("head_dim", "q_lora_rank"), ("v_head_dim",), ("num_heads",),
)  # fmt: skip


class Result(NamedTuple):
    family: str
    status: str  # "exact", "to rounding", "refused", "fails" or "untried"
    note: str  # the difference, or the reason


def shrink_config(cls: Any) -> dict[str, Any]:
    """Arguments of a config class for a small model."""
    default = cls()
    names = getattr(cls, "attribute_map", {})
    settings = {}
    for key, size in {**SIZES, "num_hidden_layers": LAYERS}.items():
        name = names.get(key, key)
        if hasattr(default, name):
            settings[name] = size
    for key, value in vars(default).items():
        if isinstance(value, transformers.PreTrainedConfig):
            settings[key] = {**value.to_dict(), **shrink_config(type(value))}
        is_of_layers = isinstance(value, list) and key not in settings
        if is_of_layers and len(value) == default.get_text_config().num_hidden_layers:
            kinds = list(dict.fromkeys(value))
            settings[key] = (kinds + value[-1:] * LAYERS)[:LAYERS]
    return settings


def build_model(family: str, ids: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """A small random model of a family, and its logits.

    Raises:
        Exception: of any class, where the shrunk config is none of the family's.
    """
    config_class = CONFIG_MAPPING[family]
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    model_class = getattr(transformers, names if isinstance(names, str) else names[0])
    settings = shrink_config(config_class)
    problem: Exception | None = None
    for dropped in DROPPED:
        try:
            kept = {key: value for key, value in settings.items() if key not in dropped}
            config = config_class(**copy.deepcopy(kept))
            with torch.device("meta"):
                parameters = model_class(copy.deepcopy(config)).num_parameters()
            if parameters > MAX_PARAMETERS:
                raise ValueError(f"the shrunk model has {parameters:,} parameters")
            torch.manual_seed(0)
            model = shake(model_class(config).eval(), 0.05)
            logits = read_logits(model, ids)
            if not torch.isfinite(logits).all():
                raise ValueError("the shrunk model's logits are not finite")
            return model, logits
        except Exception as error:  # of any class, from a family's own code
            problem = problem or error
    raise problem  # type: ignore[misc]


@torch.no_grad()
def read_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False, return_dict=True).logits


def check_family(family: str) -> Result:
    """Connect a small model of a family with each method, and compare its logits."""
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(3))
    try:
        plain, expected = build_model(family, ids)
    except Exception as error:  # of any class, from a family's own code
        return Result(family, "untried", _one_line(error))
    largest = 0.0
    for method in METHODS:
        try:
            model = crosslayer.connect(copy.deepcopy(plain), method)
        except ValueError as error:
            reason = str(error).split(". In your own model")[0].split("\n")[0]
            return Result(family, "refused", reason.split(": ", 1)[-1])
        except Exception as error:  # what may not be
            return Result(family, "fails", f"connect {method}: {_one_line(error)}")
        try:
            logits = read_logits(model, ids)
        except Exception as error:
            return Result(family, "fails", f"{method}: {_one_line(error)}")
        difference = (logits - expected).abs().max() / expected.abs().max()
        largest = max(largest, difference.item())
    if largest == 0:
        return Result(family, "exact", "")
    return Result(family, "to rounding" if largest < ROUNDING else "fails", f"{largest:.1e}")


def _one_line(error: Exception) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:120]}"


def format_page(results: list[Result]) -> str:
    """The page of the documentation."""
    counts = Counter(result.status for result in results)
    total = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    lines = [
        "# Families",
        "",
        f"Causal language models of transformers {transformers.__version__}, small and random:",
        "its logits before and after `connect` with `prenorm` and `mudd`.",
        "This page is written by `python -m tests.hf.all_families`.",
        "",
        f"{len(results)} families: {total}.",
        "",
        "- **exact**: bitwise the same logits.",
        "- **to rounding**: the largest difference of a logit, in units of the largest logit.",
        "- **refused**: `connect` raises this error and leaves the model unchanged.",
        "- **untried**: the generic small config is none of the family's. Nothing is known.",
        "",
        "| family | connected | |",
        "| --- | --- | --- |",
    ]
    for result in results:
        note = result.note.replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {result.family} | {result.status} | {note} |")
    return "\n".join(lines) + "\n"


def main(families: list[str]) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    results = []
    for family in families or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        results.append(check_family(family))
        print(*results[-1], sep="\t", flush=True)
    if not families:
        PAGE.write_text(format_page(results))


if __name__ == "__main__":
    main(sys.argv[1:])
