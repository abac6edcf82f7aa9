"""Connections against numbers from reference implementations, which agree in float64 to 1e-9.

Outputs and every gradient of DenseFormer, hyper-connections, static frac-connections, mHC,
mHC-lite, attention residuals and MGR; outputs of MUDD and pre-norm. The gradients of MUDD are
compared with the authors' code in tests/convert/test_muddformer.py.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import crosslayer
from crosslayer import Site
from crosslayer.connections._dense import History
from crosslayer.connections.mgr import competitive_gate, independent_gate
from crosslayer.ops import depth_attention, depth_scores, gate_streams
from crosslayer.sites import plan_layers

GOLDEN = Path(__file__).parent.parent / "golden"


def close(ours: Tensor, golden: Tensor) -> None:
    assert ours.dtype == golden.dtype == torch.float64
    torch.testing.assert_close(ours.reshape(golden.shape), golden, rtol=1e-9, atol=1e-9)


def built(spec: str, sites: list[Site], dim: int) -> list[crosslayer.Connection]:
    """Connections without norms, as the golden runs have none."""
    make = crosslayer.make(spec)
    return [make(site, dim, lambda port: nn.Identity()).double() for site in sites]


# The names of a site's parameters in the golden files, by the connection's name.
HYPER_NAMES = (
    "static_alpha",
    "static_beta",
    "dynamic_alpha_fn",
    "dynamic_alpha_scale",
    "dynamic_beta_fn",
    "dynamic_beta_scale",
    "norm_weight",
    "norm_bias",
)


def hyper_names(site: Site) -> dict[str, str]:
    return {n: f"hc{site.index}.{n.replace('norm_', 'layer_norm.')}" for n in HYPER_NAMES}


def frac_names(site: Site) -> dict[str, str]:
    return {n: f"fc{site.index}.{n}" for n in ("static_alpha", "static_beta")}


def attnres_names(site: Site) -> dict[str, str]:
    prefix = f"sublayer{site.index}" if site.index < site.depth else "final"
    return {"query": f"{prefix}.query", "key_norm": f"{prefix}.key_norm_weight"}


def mgr_names(site: Site) -> dict[str, str]:
    k = site.index
    return {"w2": f"mgr{k}.w2", "w1": f"mgr{k + 1}.w1", "b": f"mgr{k + 1}.b1"}


def mhc_names(site: Site) -> dict[str, str]:
    prefix = f"hc{site.index}" if site.index < site.depth else "head"
    return {name: f"{prefix}.{name}" for name in ("fn", "base", "scale")}


def mhc_lite_names(site: Site) -> dict[str, str]:
    plain = ("static_alpha", "static_beta", "dynamic_alpha_fn", "dynamic_beta_fn")
    scales = ("pre_branch_scale", "residual_scale", "h_post_scale")
    return {
        **{name: f"hc{site.index}.{name}" for name in (*plain, *scales)},
        "gamma": f"hc{site.index}.norm.gamma",
    }


NAMES = {
    "attnres": attnres_names,
    "frac": frac_names,
    "hyper": hyper_names,
    "mgr": mgr_names,
    "mhc": mhc_names,
    "mhc_lite": mhc_lite_names,
}

CASES = {
    "frac_static_m2_3sublayers": "frac(dynamic=False)",
    "mhc_deepseek_v4_n4_with_head_3sublayers": "mhc",
    "mhc_lite_n4_3sublayers": "mhc_lite",
    "hc_static_n2_3sublayers": "hyper(streams=2, dynamic=False)",
    "hc_dynamic_n4_tanh_layernorm_3sublayers": "hyper",
    "attnres_full_8sublayers": "attnres",
    "attnres_block4_8sublayers": "attnres(block_size=4)",
    "mgr_competitive_n4_10sublayers": "mgr",
}


@pytest.mark.parametrize("case", CASES, ids=[f"{spec}-{case}" for case, spec in CASES.items()])
def test_a_row_of_linear_sublayers(case):
    spec, file = CASES[case], load_file(GOLDEN / f"{case}.safetensors")
    depth = json.loads((GOLDEN / f"{case}.json").read_text())["config"]["sub_layers"]
    sites = built(
        spec,
        plan_layers([[("mlp",)]] * depth),
        file["input/x"].shape[-1],
    )
    golden = {
        k.removeprefix("param/"): v.double().requires_grad_()
        for k, v in file.items()
        if k.startswith("param/")
    }
    used = set()
    for site in sites:
        for ours, theirs in NAMES[crosslayer.make(spec).name](site.site).items():
            if getattr(site, ours, None) is not None:
                used.add(theirs)
                getattr(site, ours).data.copy_(
                    golden[theirs].detach().reshape(getattr(site, ours).shape)
                )
    first = 1 if "layer1.weight" in golden and "layer0.weight" not in golden else 0

    x = file["input/x"].double().requires_grad_()
    state = sites[0].init(x)
    for k, site in enumerate(sites[:-1]):
        (h,), state = site.read(state)
        y = F.linear(h, golden[f"layer{k + first}.weight"], golden[f"layer{k + first}.bias"])
        state = site.write(state, y)
        step = f"f64/intermediate/sublayer{k + first}"
        for name, ours in {
            "branch_input": h,
            "input_h": h,
            "branch_output": y,
            "output_y": y,
        }.items():
            if f"{step}.{name}" in file:
                close(ours, file[f"{step}.{name}"])
    (out,), state = sites[-1].read(state)
    close(out, file["f64/output/out"])
    loss = (out * file["input/loss_weight"]).sum()
    if "f64/output/streams" in file:
        streams = state.H if hasattr(state, "H") else torch.stack(state.S, -2)
        close(streams, file["f64/output/streams"])
        loss = loss + (streams * file["input/loss_weight_streams"]).sum()
    close(loss, file["f64/loss"])

    loss.backward()
    close(x.grad, file["f64/grad/input/x"])
    for name, p in golden.items():
        if name.startswith("layer"):
            close(p.grad, file[f"f64/grad/param/{name}"])
    for site in sites:
        for ours, theirs in NAMES[crosslayer.make(spec).name](site.site).items():
            if getattr(site, ours, None) is not None:
                close(getattr(site, ours).grad, file[f"f64/grad/param/{theirs}"])
    unused = {name for name in golden if not name.startswith("layer")} - used
    assert all(file[f"f64/grad/param/{name}"].abs().max() == 0 for name in unused), (
        f"not loaded: {unused}"
    )


GATES = {"competitive": competitive_gate, "independent": independent_gate}


@pytest.mark.parametrize("gating", GATES)
def test_mgr_op(gating):
    file = load_file(GOLDEN / f"mgr_op_{gating}_n4.safetensors")
    leaf = {
        k: file[k].double().requires_grad_()
        for k in file
        if k.startswith(("param/", "input/")) and "loss" not in k
    }
    S, y = leaf["input/streams"].unbind(-2), leaf["input/layer_output"]
    scale = y.shape[-1] ** -0.5
    beta = GATES[gating](depth_scores(S, leaf["param/w1"] * scale), leaf["param/b1"])
    close(beta, file["f64/intermediate/beta"])
    S = gate_streams(S, y, beta)
    out, S = depth_attention(S, leaf["param/w2"] * scale)
    close(out, file["f64/output/out"])
    close(torch.stack(S, -2), file["f64/output/new_streams"])
    loss = (out * file["input/loss_weight"]).sum() + (
        torch.stack(S, -2) * file["input/loss_weight_streams"]
    ).sum()
    close(loss, file["f64/loss"])
    loss.backward()
    for name, p in leaf.items():
        close(p.grad, file[f"f64/grad/{name}"])


def test_mgr_biases_follow_equation_14():
    table = json.loads((GOLDEN / "mgr_competitive_n4_10sublayers.json").read_text())[
        "eq14_bias_init_table"
    ]
    for row, expected in table.items():
        gated, n = (int(part.split("=")[1]) for part in row.split(","))
        site = plan_layers([[("mlp",)]] * (gated + n - 1))[n]
        for gating, bias in (
            ("competitive", "b_init_eq14"),
            ("independent", "independent_bias_with_n_eq_1"),
        ):
            b = crosslayer.make(f"mgr(streams={n}, gate={gating!r})")(
                site, 4, lambda port: nn.Identity()
            ).b
            assert b[0].item() == pytest.approx(expected[bias], rel=1e-6)


@pytest.mark.parametrize(
    ("case", "spec"),
    [
        ("denseformer_dwa_k1_p1_12blocks", "denseformer"),
        ("denseformer_dwa_k4_p5_12blocks", "denseformer(dilation=4, period=5)"),
        ("denseformer_dwa_k1_p1_12blocks", "mudd(ways='qkvr', dynamic=False)"),
        (
            "denseformer_dwa_k4_p5_12blocks",
            "mudd(ways='qkvr', dynamic=False, dilation=4, period=5)",
        ),
    ],
)
def test_denseformer(case, spec):
    file = load_file(GOLDEN / f"{case}.float64.safetensors")
    sites = built(spec, crosslayer.plan(12, parallel=True), 16)
    alphas = {}
    for depth, site in enumerate(sites):
        own = dict(site.named_parameters())
        assert len(own) == (f"param.alpha.depth{depth}" in file)
        for p in own.values():
            assert torch.equal(p.detach().view(-1), file[f"init.alpha.depth{depth}"])
            p.data.copy_(file[f"param.alpha.depth{depth}"].view_as(p))
            alphas[depth] = p
    blocks = {k: file[k].requires_grad_() for k in file if k.startswith("param.block")}
    x = file["X.0"].clone().requires_grad_()
    state = sites[0].init(x)
    for i, site in enumerate(sites[:-1]):
        (h, _), state = site.read(state)
        close(h, file[f"Y.{i}"])
        # these blocks have no residual of their own, ours add one
        X = torch.tanh(
            F.linear(h, blocks[f"param.block.{i}.weight"], blocks[f"param.block.{i}.bias"])
        )
        state = site.write(state, X - h)
    out = sites[-1].readout(state)
    close(out, file["output"])
    loss = (out * file["param.cotangent"]).sum()
    close(loss, file["loss"])
    loss.backward()
    close(x.grad, file["grad.x0"])
    for name, p in blocks.items():
        close(p.grad, file[name.replace("param.", "grad.")])
    for depth, p in alphas.items():
        close(p.grad, file[f"grad.alpha.depth{depth}"])


@pytest.mark.parametrize(
    ("spec", "case"),
    [
        ("mudd", "muddformer_llama_L4_D64_noqknorm_noround_noexpand"),
        (
            "mudd(round64=True, expand_last=True)",
            "muddformer_llama_L4_D64_qknorm_round64_expandlast",
        ),
    ],
)
def test_mudd_streams(spec, case):
    """Every depth aggregation of the golden model, given its recorded block outputs."""
    file = load_file(GOLDEN / f"{case}.forward_float64_exactrope.safetensors")
    weights = load_file(GOLDEN / f"{case}.params.safetensors")
    sites = built(spec, crosslayer.plan(4), 64)
    assert sites[0].ports == ("attn",)
    for l, site in enumerate(sites[2::2], start=1):
        for p, value in (
            (site.a, weights[f"dense_bs.{l - 1}"]),
            (site.W1, weights[f"dynamic_dense.{l - 1}.w1.weight"].T),
            (site.W2, weights[f"dynamic_dense.{l - 1}.w2.weight"].T),
        ):
            assert p.shape == value.shape
            p.data.copy_(value)
        X = tuple(file[f"X.{j}"] for j in range(l))
        close(
            site.write_and_weigh(file[f"X.{l}"], None)[1].movedim(-2, 0),
            file[f"da_weights.{l - 1}"],
        )
        inputs, state = site.read(History(X, file[f"X.{l}"]))
        if l == 4:
            close(inputs[0], file["final_hidden"])
        else:
            assert site.ports == ("q", "k", "v")
            for way, x in zip("qkvr", (*inputs, state.h), strict=True):
                close(x, file[f"block_input.{l}.{way}"])


def test_prenorm_streams():
    """The residual stream of the golden Transformer++, from its recorded outputs."""
    file = load_file(
        GOLDEN / "transformerpp_baseline_dense_false_L4_D64.forward_float64_exactrope.safetensors"
    )
    sites = built("prenorm", crosslayer.plan(4), 64)
    state = sites[0].init(file["X.0"])
    for l in range(4):
        attention, mlp = sites[2 * l : 2 * l + 2]
        (x,), state = attention.read(state)
        close(x, file[f"block_input.{l}.single"])
        state = attention.write(state, file[f"attn_out.{l}"])
        (h,), state = mlp.read(state)
        state = mlp.write(state, file[f"X.{l + 1}"] - h)
    close(sites[-1].readout(state), file["final_hidden"])
