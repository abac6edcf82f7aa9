"""FLOPs of a forward pass: torch's counter, and formulas of what it does not know.

A multiplication or an addition is one FLOP, in matrix products and in weighted sums alike (MUDD,
Eq. 15; HC, Table 8), and in the element-wise products and sums that a model's code writes out: in a
norm like Llama's, in rotary embeddings, in a gated MLP. The subtraction of a norm's mean, softmax,
and other functions of norms and activations are left out. Causal attention counts half of T², or
TW − W²/2 with a window of W tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

aten = torch.ops.aten


def flop_counter() -> FlopCounterMode:
    """torch's FLOP counter, extended by the element-wise operations of weighted sums and by the
    products of experts.
    """
    formulas = dict(_FLOP_FORMULAS)
    # transformers' own, where torch's product has no kernel
    experts = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if experts is not None:
        formulas[experts] = _grouped_product_flops
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _flops_per_element(flops: int) -> Callable[..., int]:
    """The formula of an operation that takes `flops` FLOPs for each element of its output."""

    def formula(*shapes: Any, out_shape: torch.Size, **_: Any) -> int:
        return flops * out_shape.numel()

    return formula


def _subtraction_flops(a: torch.Size, b: Any, *_: Any, out_shape: torch.Size, **__: Any) -> int:
    """A subtraction, but none where a norm centres a row: it subtracts a single value."""
    if isinstance(b, torch.Size) and b[-1:] == (1,) and out_shape[-1:] != (1,):
        return 0
    return out_shape.numel()


def _matrix_vector_flops(matrix: torch.Size, vector: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def _grouped_product_flops(tokens: torch.Size, weights: torch.Size, *_: Any, **__: Any) -> int:
    """Of [M K] tokens in groups, each with the weights of its expert in [E K N]."""
    return 2 * tokens.numel() * weights[-1]


def _attention_flops(causal_index: int) -> Callable[..., int]:
    """The formula of a fused attention; `is_causal` is argument `causal_index` after q, k, v."""

    def formula(query: torch.Size, key: torch.Size, value: torch.Size, *rest: Any, **_: Any) -> int:
        is_causal = len(rest) > causal_index and rest[causal_index]
        return sdpa_flop_count(query, key, value) // (2 if is_causal else 1)

    return formula


def _windowed_attention_flops(
    query: torch.Size,
    key: torch.Size,
    value: torch.Size,
    *_: Any,
    window_size: int | None = None,
    **__: Any,
) -> int:
    """Of causal attention over [B T H D], in which a token reads at most `window_size` tokens."""
    B, T, H, D = query
    window = min(window_size or T, T)
    twice_the_pairs = 2 * T * window - window**2
    return B * H * twice_the_pairs * (D + value[-1])


_FLOP_FORMULAS = {
    aten.add: _flops_per_element(1),
    aten.add_: _flops_per_element(1),
    aten.mul: _flops_per_element(1),
    aten.mul_: _flops_per_element(1),
    aten.addcmul: _flops_per_element(2),
    aten.addcmul_: _flops_per_element(2),
    aten.lerp: _flops_per_element(3),
    aten.sub: _subtraction_flops,
    aten.mv: _matrix_vector_flops,
    aten._grouped_mm: _grouped_product_flops,
    aten._efficient_attention_forward: _windowed_attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops(1),
    aten._scaled_dot_product_flash_attention: _attention_flops(1),
    aten._scaled_dot_product_efficient_attention: _attention_flops(3),
    aten._scaled_dot_product_cudnn_attention: _attention_flops(3),
}
