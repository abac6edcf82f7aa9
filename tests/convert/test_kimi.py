"""Kimi-K3's attention residuals: bitwise round trips, and a decoder of serving code."""

import pytest
import torch

from crosslayer.convert import fill_connections, kimi, read_connections
from crosslayer.testing.tiny_model import equal_tensors
from tests.support.chain import LAYERS, D, randn, row, run, sublayer


def kimi_tensors(prefix: str = "") -> dict[str, torch.Tensor]:
    pools = [f"layers.{l}.{s}_res" for l in range(LAYERS) for s in ("self_attention", "mlp")]
    found = {"lm_head.weight": randn(3, D), f"{prefix}layers.0.input_layernorm.weight": randn(D)}
    for pool in (*pools, "output_attn_res"):
        found |= {
            f"{prefix}{pool}_proj.weight": randn(1, D),
            f"{prefix}{pool}_norm.weight": 1 + randn(D),
        }
    return found


@pytest.mark.parametrize(
    ("prefix", "block", "dtype", "eps"),
    [
        ("", 1, torch.float32, 1e-5),
        ("language_model.model.", 2, torch.float32, 1e-4),
        ("", 3, torch.bfloat16, 1e-5),
    ],
)
def test_kimi(prefix, block, dtype, eps):
    theirs = {name: t.to(dtype) for name, t in kimi_tensors(prefix).items()}
    pools = {name: t for name, t in theirs.items() if "_res_" in name}
    ours = kimi.load_connections(theirs, block, eps)
    assert str(ours.spec) == f"attnres(block_size={2 * block}, eps={eps})"
    assert equal_tensors(kimi.save_connections(ours, prefix), pools), (
        "with the unused pair of layer 0"
    )
    sites = row(ours.spec)
    fill_connections(sites, ours)
    x = torch.randn(2, 3, D, dtype=torch.float64) * 3e-3
    expected, other = (serving_loop(theirs, prefix, block, x, e) for e in (eps, 1e-6))
    if dtype == torch.float32:
        assert equal_tensors(
            kimi.save_connections(ours._replace(sites=read_connections(sites)), prefix), pools
        )
    found = run([site.double() for site in sites], x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    assert (other / expected - 1).abs().median() > 0.01, "eps must show"


def serving_loop(theirs, prefix, block, x, eps):
    """The decoder of serving code: snapshots of the running sum where a block begins."""

    def pool(name, values):
        w, g = (
            theirs[f"{prefix}{name}_{part}.weight"].double().view(-1) for part in ("proj", "norm")
        )
        keys = [v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * g for v in values]
        p = torch.stack([key @ w for key in keys], -1).softmax(-1)
        return sum(p[..., i, None] * v for i, v in enumerate(values))

    prefix_sum = x
    blocks = []
    for l in range(LAYERS):
        h = pool(f"layers.{l}.self_attention_res", [*blocks, prefix_sum]) if blocks else prefix_sum
        if l % block == 0:
            blocks, prefix_sum = [*blocks, prefix_sum], 0
        prefix_sum = prefix_sum + sublayer(2 * l, h)
        h = pool(f"layers.{l}.mlp_res", [*blocks, prefix_sum])
        prefix_sum = prefix_sum + sublayer(2 * l + 1, h)
    return pool("output_attn_res", [*blocks, prefix_sum])


def test_tensors_that_do_not_fit():
    for tensor in (randn(D), randn(3, D)):
        with pytest.raises(ValueError, match=r"mlp_res_proj.weight' has the shape .*, expected"):
            kimi.load_connections(kimi_tensors() | {"layers.1.mlp_res_proj.weight": tensor}, 1)
    with pytest.raises(ValueError, match=r"the tensors are of 2 models, which have 'ema\."):
        kimi.load_connections(kimi_tensors("ema.") | kimi_tensors("model."), 1)
    for name in ("layers.2.self_attention_res_norm.weight", "layers.2.mlp_res_proj.weight"):
        theirs = kimi_tensors()
        del theirs[name]
        with pytest.raises(ValueError, match=f"a tensor is missing: '{name}'"):
            kimi.load_connections(theirs, 1)
    with pytest.raises(
        ValueError,
        match=r"no attention-residual tensors; expected 'layers\.0\.mlp_res_proj\.weight'",
    ):
        kimi.load_connections({"norm.weight": randn(D)}, 1)
    with pytest.raises(
        ValueError, match="attn_res_block_size must be a whole number of at least 1, got 0"
    ):
        kimi.load_connections(kimi_tensors(), 0)
    theirs = kimi_tensors() | {"layers.1000000000000.mlp_res_proj.weight": randn(1, D)}
    with pytest.raises(ValueError, match="have layer 1000000000000 and lack layer 3"):
        kimi.load_connections(theirs, 1)
    for spec in ("attnres", "attnres(block_size=3)", "mhc"):
        with pytest.raises(
            ValueError, match="expected an attnres whose block_size is a multiple of 2"
        ):
            kimi.save_connections(kimi.load_connections(kimi_tensors(), 1)._replace(spec=spec))
