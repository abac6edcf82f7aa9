"""What a published checkpoint's body has and transformers' class lacks, said in config.json and rebuilt from it.

crosslayer_rope      "bfloat16" or "float16": RoPE's cos and sin are rounded to it, as the reference's table is
crosslayer_qk_norm   true: GPT-NeoX's q and k go through an RMSNorm per head before RoPE, with `layer_norm_eps`
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..class_swap import restore_class, swap_class
from ..validation import check_choice
from .families import per_head
from .qkv import FusedLinear, FusedProjection

ROPE_DTYPES = {"exact": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def apply_host_quirks(body: Any) -> None:
    """Give a base model what its config says; a ValueError, and the model as it was, where it cannot have it.

    After `connect`, so that the norm of q and k comes after a projection that takes q, k and v apart.
    """
    config = body.config
    table = check_choice(
        "crosslayer_rope", getattr(config, "crosslayer_rope", None) or "exact", ROPE_DTYPES
    )
    normed = getattr(config, "crosslayer_qk_norm", False)
    if normed and config.model_type != "gpt_neox":
        raise ValueError(
            f"crosslayer_qk_norm is for gpt_neox, got {config.model_type!r}; llama's relative is qwen3"
        )
    if table is not None:
        body.rotary_emb.table = table
        swap_class(body.rotary_emb, RoundedRope)
    for layer in body.layers if normed else ():
        projection = layer.attention.query_key_value
        heads = config.num_attention_heads
        with torch.device(projection.weight.device):
            for name in ("q_norm", "k_norm"):
                norm = LlamaRMSNorm(config.hidden_size // heads, config.layer_norm_eps)
                setattr(projection, name, norm.to(projection.weight.dtype))
        if isinstance(
            projection, FusedProjection
        ):  # one role in place of the other, as roles do not pile up
            restore_class(projection)
        projection.fused = per_head(config)
        swap_class(projection, NormedProjection)


class RoundedRope:
    """A rotary embedding whose cos and sin are rounded before use."""

    table: torch.dtype

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        # the host casts to x's dtype, which must not round a second time
        exact = super().forward(torch.empty(0, device=x.device), position_ids)  # type: ignore[misc]
        cos, sin = (part.to(self.table).to(x.dtype) for part in exact)
        return cos, sin


class NormedProjection(FusedLinear):
    """GPT-NeoX's Linear for q, k and v, rows (head, q | k | v, channel), with an RMSNorm per head on q and on k."""

    q_norm: LlamaRMSNorm
    k_norm: LlamaRMSNorm

    def forward(self, x: Any) -> Tensor:
        q, k, v = super().forward(x).unflatten(-1, (self.fused.groups, 3, -1)).unbind(-2)
        return torch.stack((self.q_norm(q), self.k_norm(k), v), -2).flatten(-3)
