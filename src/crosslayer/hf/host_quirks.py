"""What published checkpoints compute and transformers' classes do not.

Two keys of config.json name it, and `apply_host_quirks` rebuilds it:

    crosslayer_rope      "bfloat16" or "float16": RoPE's cos and sin are rounded to it
    crosslayer_qk_norm   true: GPT-NeoX's q and k pass an RMSNorm per head before RoPE
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..class_swap import restore_class, swap_class
from ..validation import check_choice
from .families import qkv_per_head
from .qkv import FusedLinear, FusedProjection

ROPE_DTYPES = {"exact": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def apply_host_quirks(backbone: Any) -> None:
    """Make a backbone compute what its config says, after its layers are connected.

    The order matters: the norm of q and k comes after a projection with separate inputs.

    Raises:
        ValueError: a value is unknown, or the family has no such norm. The model is then unchanged.
    """
    config = backbone.config
    rope_dtype = check_choice(
        "crosslayer_rope", getattr(config, "crosslayer_rope", None) or "exact", ROPE_DTYPES
    )
    has_qk_norm = getattr(config, "crosslayer_qk_norm", False)
    if has_qk_norm and config.model_type != "gpt_neox":
        raise ValueError(
            f"crosslayer_qk_norm is for gpt_neox, got {config.model_type!r}; "
            "for llama use qwen3, which has this norm"
        )
    if rope_dtype is not None:
        backbone.rotary_emb.rope_dtype = rope_dtype
        swap_class(backbone.rotary_emb, _RoundedRope)
    if has_qk_norm:
        for layer in backbone.layers:
            _add_qk_norm(layer.attention.query_key_value, config)


def _add_qk_norm(projection: Any, config: Any) -> None:
    """Let GPT-NeoX's projection of q, k and v norm q and k."""
    head_width = config.hidden_size // config.num_attention_heads
    with torch.device(projection.weight.device):
        for name in ("q_norm", "k_norm"):
            norm = LlamaRMSNorm(head_width, config.layer_norm_eps)
            setattr(projection, name, norm.to(projection.weight.dtype))
    # A class that is swapped twice could not be pickled. _NormedProjection is a FusedProjection.
    if isinstance(projection, FusedProjection):
        restore_class(projection)
    projection.fused = qkv_per_head(config)
    swap_class(projection, _NormedProjection)


class _RoundedRope:
    """A rotary embedding that rounds its cos and sin."""

    rope_dtype: torch.dtype

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        # The host casts to the dtype of its argument. A float32 one prevents a second rounding.
        float32_argument = torch.empty(0, device=x.device)
        cos, sin = super().forward(float32_argument, position_ids)  # type: ignore[misc]
        return cos.to(self.rope_dtype).to(x.dtype), sin.to(self.rope_dtype).to(x.dtype)


class _NormedProjection(FusedLinear):
    """GPT-NeoX's projection of q, k and v, with an RMSNorm per head on q and k.

    Its outputs are in the order (head, q | k | v, channel).
    """

    q_norm: LlamaRMSNorm
    k_norm: LlamaRMSNorm

    def forward(self, x: Any) -> Tensor:
        q, k, v = super().forward(x).unflatten(-1, (self.fused.groups, 3, -1)).unbind(-2)
        return torch.stack((self.q_norm(q), self.k_norm(k), v), -2).flatten(-3)
