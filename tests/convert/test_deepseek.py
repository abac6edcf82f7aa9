"""DeepSeek-V4's and V4.1's mHC tensors: bitwise round trips, and the streams they make."""

import pytest
import torch
from torch import nn

from crosslayer.convert import deepseek, fill_connections, read_connections
from crosslayer.testing.tiny_model import equal_tensors
from tests.support.chain import LAYERS, D, randn, row, run, sublayer


def mhc_tensors(
    names: str = "released",
    prefix: str = "",
    head: bool = True,
    n: int = 4,
    residual: bool = True,
) -> dict[str, torch.Tensor]:
    """The tensors of `LAYERS` layers under their published names, and unrelated ones."""
    site = {"released": "layers.{l}.hc_{s}_", "transformers": "layers.{l}.{s}_hc."}[names]
    end = {"released": "hc_head_", "transformers": "hc_head.hc_"}[names]
    found = {"model.embed_tokens.weight": randn(3, D), "mtp.0.hc_attn_fn": randn(24, 4 * D)}
    for l in range(LAYERS):
        found[f"{prefix}layers.{l}.attn_norm.weight"] = randn(D)
        for s in ("attn", "ffn"):
            at, m = prefix + site.format(l=l, s=s), n * n * residual + 2 * n
            found |= {f"{at}fn": randn(m, n * D), f"{at}base": randn(m)}
            found[f"{at}scale"] = randn(2 + residual)
    at = prefix + end
    return found | (
        {f"{at}fn": randn(n, n * D), f"{at}base": randn(n), f"{at}scale": randn(1)} if head else {}
    )


def only_hc(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: t for n, t in tensors.items() if "hc" in n and not n.startswith("mtp")}


@pytest.mark.parametrize(("names", "prefix"), [("released", ""), ("transformers", "model.")])
@pytest.mark.parametrize(
    ("spec", "head"),
    [
        ("mhc", True),
        ("mhc(single_pass=True)", False),
        ("mhc(readout='mean', norm_eps=1e-5)", False),
        ("mhc(residual='identity')", True),
    ],
)
def test_deepseek(names, prefix, spec, head):
    theirs = mhc_tensors(names, prefix, head, residual="identity" not in spec)
    ours = deepseek.load_connections(theirs, spec)
    sites = row(spec)
    fill_connections(sites, ours)
    assert equal_tensors(deepseek.save_connections(ours, names, prefix), only_hc(theirs))
    assert equal_tensors(
        deepseek.save_connections(ours._replace(sites=read_connections(sites)), names, prefix),
        only_hc(theirs),
    )


def test_deepseek_v4_of_transformers():
    """Their modules' parameters make their streams and readout."""
    module = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    from types import SimpleNamespace

    config = SimpleNamespace(
        hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6, hidden_size=D
    )
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Module() for _ in range(LAYERS))
    for layer in model.layers:
        layer.attn_hc, layer.ffn_hc = (module.DeepseekV4HyperConnection(config) for _ in range(2))
    model.hc_head = module.DeepseekV4HyperHead(config)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    ours = deepseek.load_connections(model.state_dict())
    sites = row(ours.spec)
    fill_connections(sites, ours)
    assert equal_tensors(deepseek.save_connections(ours, "transformers"), dict(model.state_dict()))
    x = torch.randn(2, 3, D)
    H = x[:, :, None].expand(2, 3, 4, D)
    for k, mixer in enumerate(m for layer in model.layers for m in (layer.attn_hc, layer.ffn_hc)):
        post, comb, h = mixer(H.contiguous())
        H = post[..., None] * sublayer(k, h)[:, :, None] + torch.einsum("btij,btid->btjd", comb, H)
    torch.testing.assert_close(run(sites, x), model.hc_head(H), rtol=1e-4, atol=1e-4)


def test_deepseek_v41_from_its_description():
    """The pre of one sub-layer mixes the next one's input; the first reads stream 0."""
    theirs = mhc_tensors(head=False)
    sites = row("mhc(single_pass=True)")
    fill_connections(sites, deepseek.load_connections(theirs, "mhc(single_pass=True)"))
    x = torch.randn(2, 3, D)
    H, pre = x[:, :, None].expand(2, 3, 4, D), torch.tensor([1.0, 0, 0, 0]).expand(2, 3, 4)
    for k in range(2 * LAYERS):
        at = f"layers.{k // 2}.hc_{'ffn' if k % 2 else 'attn'}_"
        fn, base, scale = (theirs[at + p] for p in ("fn", "base", "scale"))
        v = H.flatten(-2)
        z = v @ fn.T * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)
        z = z * scale.repeat_interleave(torch.tensor([4, 4, 16])) + base
        R = z[..., 8:].unflatten(-1, (4, 4)).softmax(-1) + 1e-6
        R = R / (R.sum(-2, keepdim=True) + 1e-6)
        for _ in range(19):
            R = R / (R.sum(-1, keepdim=True) + 1e-6)
            R = R / (R.sum(-2, keepdim=True) + 1e-6)
        y = sublayer(k, torch.einsum("bts,btsd->btd", pre, H))
        H = (2 * z[..., 4:8].sigmoid())[..., None] * y[:, :, None] + torch.einsum(
            "btsu,btsd->btud", R, H
        )
        pre = z[..., :4].sigmoid() + 1e-6
    torch.testing.assert_close(
        run(sites, x), torch.einsum("bts,btsd->btd", pre, H), rtol=1e-4, atol=1e-4
    )


def test_tensors_that_do_not_fit():
    with pytest.raises(
        ValueError,
        match=r"have no head, which 'mhc' needs; DeepSeek-V4.1's spec is 'mhc\(single_pass",
    ):
        deepseek.load_connections(mhc_tensors(head=False))
    with pytest.raises(
        ValueError,
        match="have a head and 'mhc\\(single_pass=True\\)' has none; DeepSeek-V4's spec is 'mhc'",
    ):
        deepseek.load_connections(mhc_tensors(prefix="model."), "mhc(single_pass=True)")
    with pytest.raises(
        ValueError,
        match=r"'layers.0.hc_attn_fn' has the shape \(8, 24\), expected \(24, 4·D\) for 'mhc'",
    ):
        deepseek.load_connections(mhc_tensors(n=2))
    for fn in (randn(24, 4 * D - 1), randn(24, 4, D)):
        with pytest.raises(ValueError, match=r"'layers.2.hc_ffn_fn' has the shape .*, expected"):
            deepseek.load_connections(mhc_tensors() | {"layers.2.hc_ffn_fn": fn})
    for name, tensor in (
        ("layers.1.hc_attn_base", randn(5)),
        ("layers.1.hc_ffn_scale", randn(7)),
        ("layers.1.hc_ffn_fn", randn(24, 8 * D)),
        ("hc_head_fn", randn(4, D)),
    ):
        with pytest.raises(ValueError, match=f"'{name}' has the shape .*, expected"):
            deepseek.load_connections(mhc_tensors() | {name: tensor})
    with pytest.raises(ValueError, match=r"of 2 models, which have 'ema\.layers\.0\.hc_attn_fn'"):
        deepseek.load_connections(mhc_tensors(prefix="ema.") | mhc_tensors(prefix="model."))
    theirs = mhc_tensors()
    del theirs["layers.1.hc_ffn_base"]
    with pytest.raises(ValueError, match=r"a tensor is missing: 'layers\.1\.hc_ffn_base'"):
        deepseek.load_connections(theirs)
    with pytest.raises(ValueError, match=r"no mHC tensors; expected 'layers\.0\.hc_attn_fn' or"):
        deepseek.load_connections({"norm.weight": randn(D)})
    with pytest.raises(ValueError, match="these tensors belong to mhc, got the connection 'hyper'"):
        deepseek.load_connections(mhc_tensors(), "hyper")
    with pytest.raises(ValueError, match="streams must be a whole number of at least 1, got 0"):
        deepseek.load_connections(mhc_tensors(), "mhc(streams=0)")
    with pytest.raises(ValueError, match="names must be one of released, transformers, got 'hf'"):
        deepseek.save_connections(deepseek.load_connections(mhc_tensors()), "hf")


def test_a_spec_from_a_config():
    config = {
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "hidden_size": 7,
    }
    assert str(deepseek.spec_from_config(config)) == "mhc"
    single_pass = deepseek.spec_from_config(config, single_pass=True)
    assert str(single_pass) == "mhc(single_pass=True)"
    assert (
        str(deepseek.spec_from_config(config | {"hc_mult": 2, "rms_norm_eps": 1e-5}))
        == "mhc(streams=2, norm_eps=1e-05)"
    )
    assert str(deepseek.spec_from_config({"hc_mult": 2})) == "mhc(streams=2)"
    others = {"hc_sinkhorn_iters": 10, "hc_eps": 1e-4}
    assert deepseek.spec_from_config(config | others).options == {"iterations": 10, "eps": 1e-4}
    with pytest.raises(
        ValueError, match=r"config\.json: hc_mult must be a whole number, got 'four'"
    ):
        deepseek.spec_from_config(config | {"hc_mult": "four"})
