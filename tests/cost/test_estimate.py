"""What an arm costs: as the papers count it, and as a real model on the CPU is measured."""

import copy
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

import crosslayer
from crosslayer.cli.main import main
from crosslayer.cost import estimate
from crosslayer.cost.estimate import (
    GPUS,
    build_on_meta,
    estimate_cost,
    estimate_costs,
    flop_counter,
    measure_cost,
)
from crosslayer.hf.config import make_config
from tests.support.tiny import ARMS

BODIES = ("llama", "gpt_neox-parallel", "gpt_neox-sequential")


def case(arm: str, *values):
    return pytest.param(arm, *values, id="-".join(map(str, (arm, *values))))


def row(arm: str, layers: int, dim: int, parallel: bool = False) -> list[crosslayer.Connection]:
    """A model's connections alone, weightless norms."""
    with torch.device("meta"):
        return [
            crosslayer.make(arm)(site, dim, lambda port: nn.Identity())
            for site in crosslayer.plan(layers, parallel)
        ]


def own(arm: str, layers: int, dim: int) -> int:
    return sum(p.numel() for site in row(arm, layers, dim) for p in site.parameters())


def small(body: str, **sizes):
    family, _, kind = body.partition("-")
    config = make_config(family, **{"layers": 3, "dim": 32, "heads": 4, "vocab": 97, **sizes})
    if kind:
        config.use_parallel_residual = kind == "parallel"
    return config


def real(arm: str, config, dtype: torch.dtype = torch.float32) -> nn.Module:
    return crosslayer.connect(
        AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype), arm
    )


TABLE_1 = [
    (24, 2048, 0.22, 0.38),
    (42, 1536, 0.49, 0.80),
    (32, 2560, 0.23, 0.40),
    (32, 4096, 0.14, 0.26),
]


@pytest.mark.parametrize(("layers", "dim", "parameters", "flops"), TABLE_1)
def test_mudd_table_1(layers, dim, parameters, flops):
    """Of the Transformer++ of appendix C, 12LD² parameters and 2LDT(12D + T) FLOPs."""
    T, eta = 4096, (layers + 3) / dim
    # the table's numbers are its formulas', to within a unit of their last digit
    assert 100 * eta / 6 == pytest.approx(parameters, abs=0.01)
    assert 100 * eta / (3 + T / dim / 4) == pytest.approx(flops, abs=0.02)

    cost = estimate_cost("mudd", make_config(layers=layers, dim=dim, heads=dim // 128), 1, T)
    K = [4 * (l + 1) for l in range(1, layers)] + [
        layers + 1
    ]  # the last block has one way, which the paper leaves out
    weights = sum(
        p.numel() for s in row("mudd", layers, dim) for n, p in s.named_parameters() if n != "a"
    )
    assert weights == sum(dim * k + k * k for k in K)  # equation 13
    assert weights / (12 * layers * dim**2) == pytest.approx(eta / 6, rel=0.05)
    extra = cost.model.flops - cost.body.flops
    assert extra == pytest.approx(
        T * sum(4 * dim * k + 2 * k * k for k in K), rel=0.025
    )  # equation 15
    assert extra / (2 * layers * dim * T * (12 * dim + T)) == pytest.approx(
        eta / (3 + T / dim / 4), rel=0.05
    )
    body = cost.body.flops - 2 * T * dim * 32000  # without the head
    assert body == pytest.approx(2 * layers * dim * T * (12 * dim + T), rel=0.01)


@pytest.mark.parametrize(("arm", "layers", "dim", "parameters"), [
    case("mudd(round64=True, expand_last=True)", 32, 2560, 8_775_709),
    case("mudd(round64=True, expand_last=True)", 24, 2048, 4_583_493),
    case("hyper(stats='unweighted')", 16, 2048, 394_048),  # HC, Table 7: OLMo-1B-DHC×4
    case("hyper(stats='unweighted', streams=2)", 16, 2048, 262_464),
    case("hyper(stats='unweighted')", 32, 4096, 1_574_528),  # appendix B's formula at OLMo-7B
    case("hyper(stats='rmsnorm')", 16, 2048, 394_048 + 32 * 2048),
    case("hyper", 16, 2048, 394_048 + 32 * 2 * 2048),  # LayerNorm's weight and bias
    case("hyper(dynamic=False)", 16, 2048, 768),
    case("hyper(dynamic=False, streams=2)", 16, 2048, 256),
    case("denseformer", 12, 768, 90),  # L(L + 3)/2
    case("denseformer", 48, 768, 1224),
    case("denseformer(dilation=4)", 12, 768, 27),
    case("denseformer(dilation=4, period=5)", 12, 768, 5),
    case("denseformer(dilation=2, period=3)", 12, 768, 18),
    case("attnres", 12, 768, 24 * 2 * 768),
    case("mgr", 12, 768, 24 * 768 + 21 * (768 + 5)),  # 21 gated sub-layers
    case("skip_gain", 12, 768, 24),
])  # fmt: skip
def test_parameters_as_published(arm, layers, dim, parameters):
    assert own(arm, layers, dim) == parameters


OLMO = LlamaConfig(
    vocab_size=50304, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=16,
    tie_word_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize(("arm", "added", "total"), [
    case("prenorm", 0, 2.3536),
    case("hyper(dynamic=False, streams=2)", 0.0010, 2.3545),
    case("hyper(dynamic=False)", 0.0031, 2.3566),
    case("hyper(streams=2)", 0.0020, 2.3554),
    case("hyper", 0.0062, 2.3583),
    case("hyper(stats='unweighted')", 0.0062, 2.3583),
])  # fmt: skip
def test_hyper_connections_table_8(arm, added, total):
    """FLOPs a token of OLMo-1B, in units of 1e9; the paper leaves attention's T² out, so sequences of one token.

    `added` is the paper's but for DHC×4, which it has at 0.0049 without a derivation. The listing's matrices give
    2Dn(n + 2) for the coefficients, 2Dn(n + 1) for the mixtures and 2Dn for the write: 0.0063, less PreNorm's sums.
    """
    tokens = 64  # for the norm's weights are multiplied into the projection's once a step
    cost = estimate_cost(arm, OLMO, tokens, 1)
    assert (
        cost.body.parameters == 1_176_764_416 + 33 * 2048
    )  # Table 7, and Llama's norms, which OLMo's have not
    assert cost.model.flops / tokens / 1e9 == pytest.approx(total, rel=0.01)
    assert (cost.model.flops - cost.body.flops) / tokens / 1e9 == pytest.approx(added, abs=0.6e-4)


def test_memory_under_checkpointing():
    """Dense methods keep one more tensor a layer, as in MUDD's Table 6 (there the gradient of each hidden state)."""
    layers, tensors = 12, {}
    for arm in ("prenorm", "denseformer", "mudd"):
        model: Any = build_on_meta(
            arm, make_config(layers=layers, dim=1024, heads=8, vocab=97), 1024, torch.bfloat16
        ).train()
        # reentrant: what it keeps passes the hooks
        enable = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": True, "preserve_rng_state": False})
        model.enable_input_require_grads()
        ids = torch.zeros(2, 1025, dtype=torch.long, device="meta")
        tensors[arm] = estimate.activation_bytes(model, ids) / (2 * 2 * 1024 * 1024)
    # two a layer where the table has one: a pending write is apart from the stream it is to enter
    assert 2 * layers < tensors["prenorm"] < 2 * layers + 4
    assert tensors["denseformer"] - tensors["prenorm"] == pytest.approx(layers, rel=0.01)
    assert (
        layers + 3 < tensors["mudd"] - tensors["prenorm"] < layers + 5
    )  # the readout's own, which has no checkpoint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("arm", ARMS)
def test_as_a_real_model(arm, body, dtype):
    """Parameters, FLOPs and what autograd keeps are those of the model on the CPU."""
    config = small(body)
    model, paper = (
        real(arm, config, dtype),
        measure_cost(build_on_meta(arm, config, 16, dtype), 2, 16),
    )
    plain = AutoModelForCausalLM.from_config(config)
    assert paper.parameters == sum(p.numel() for p in model.parameters())
    assert paper.own == paper.parameters - sum(p.numel() for p in plain.parameters())
    ids = torch.randint(97, (2, 17))
    with flop_counter() as count:
        estimate.language_model_loss(model, ids)
    # torch's choice of attention has the positions checked for packed sequences, a few additions a sequence
    assert 0 <= count.get_total_flops() - paper.flops <= 3 * ids.numel()
    assert paper.activations == pytest.approx(saved(model, ids), rel=0.05)


def saved(model: nn.Module, ids: torch.Tensor) -> int:
    """By address, the graph held."""
    weights, kept = {p.data_ptr() for p in model.parameters()}, {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = estimate.language_model_loss(model, ids)
    total = sum(size for address, size in kept.items() if address not in weights)
    del loss
    return total


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_flops_are_the_counters_own(family):
    """torch's unextended counter on an eager body finds the same within 1 %: norms and rotations are little."""
    config = small(family, layers=2, dim=256)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as count:
        model(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=False)
    assert measure_cost(
        build_on_meta("prenorm", config, 8, torch.float32), 1, 8
    ).flops == pytest.approx(count.get_total_flops(), rel=0.01)


def test_nothing_is_built_and_nothing_changed():
    config = make_config(layers=24, dim=16384, heads=64)
    before = config.to_dict()
    cost = estimate_cost("mudd", config, 16, 4096)
    assert cost.model.parameters > 60e9 and config.to_dict() == before
    connected = crosslayer.connect(AutoModelForCausalLM.from_config(small("llama")), "hyper").config
    assert estimate_cost("mgr", connected, 1, 8) == estimate_cost("mgr", small("llama"), 1, 8)


def test_costs_grow_as_they_should():
    one, two = (
        estimate_cost("hyper(stats='unweighted')", small("llama"), batch, 16).model
        for batch in (1, 2)
    )
    # a handful of products belongs to no token: the rotation's angles
    assert (
        two.flops == pytest.approx(2 * one.flops, rel=1e-3)
        and two.moved == 2 * one.moved
        and two.parameters == one.parameters
    )
    assert two.activations == pytest.approx(2 * one.activations, rel=0.02)
    wide, half = (
        estimate_cost("prenorm", small("llama"), 1, 16, d).model
        for d in (torch.float32, torch.bfloat16)
    )
    assert wide.moved == 2 * half.moved and wide.activations > half.activations


def traffic(arm: str, layers: int, parallel: bool = False) -> list[float]:
    return [site.memory_traffic() for site in row(arm, layers, 8, parallel)]


def test_a_stream_that_is_what_the_layers_read():
    assert traffic("postnorm", 12) == [2] + [3] * 23 + [3]
    assert traffic("resi_dual", 12) == [2] + [5] * 23 + [4]


@pytest.mark.parametrize("arm", ["prenorm", "skip_gain"])
def test_a_single_stream(arm):
    assert traffic(arm, 12) == [2] + [4] * 23 + [3]
    # a parallel block reads two normed inputs
    assert traffic(arm, 3, parallel=True) == [3, 5, 5, 3]


@pytest.mark.parametrize(("n", "boundary"), [(2, 6), (4, 10), (8, 18)])
def test_n_streams(n, boundary):
    assert traffic(f"hyper(streams={n})", 12) == [1 + n + 1] + [boundary] * 23 + [n + 2]
    gated = 24 - n
    # site k has k + 1 streams until there are n, and appending one moves nothing
    assert traffic(f"mgr(streams={n})", 12) == [k + 2 for k in range(n)] + [boundary] * gated + [
        n + 2
    ]
    assert (
        boundary == 2 * n + 2 < 3 * n + n + 1
    )  # the MGR paper's own kernel, section 4.4, and its output


def test_dense_sources():
    assert traffic("denseformer", 4) == [2, 4, 3, 4, 4, 4, 5, 4, 6]  # i + 2 at depth i
    assert traffic("denseformer(dilation=2, period=2)", 4) == [2, 4, 4, 4, 3, 4, 4, 4, 4]
    assert traffic("mudd", 4) == [
        2,
        4,
        6,
        4,
        7,
        4,
        8,
        4,
        6,
    ]  # l + 5 after block l, l + 2 in the last
    assert traffic("mudd", 4, parallel=True) == [3, 6, 7, 8, 6]
    assert traffic("mudd(ways='qkvr')", 3) == [2, 4, 3, 4, 4, 4, 5]
    assert traffic("attnres", 3) == [2, 3, 4, 5, 6, 7, 8]  # k + 1 at sub-layer k
    assert traffic("attnres(block_size=4)", 4) == [2, 3, 3, 3, 3, 4, 4, 4, 4]
    layers = 24
    # the sums over depth, in closed form
    assert (
        sum(traffic("mudd", layers))
        == 2 + 4 * layers + sum(l + 5 for l in range(1, layers)) + layers + 2
    )
    assert sum(traffic("attnres", layers)) == sum(k + 1 for k in range(1, 2 * layers + 2))


def test_the_floor_in_seconds():
    plain, hyper = estimate_costs(
        ["prenorm", "hyper"], make_config(layers=12, dim=1024, heads=8), 8, 1024
    )
    token = 1024 * 2 * 8 * 1024  # bytes of D elements, all tokens
    assert plain.model.moved == token * 2 * (2 + 23 * 4 + 3)  # backward moves as much
    assert hyper.model.moved == token * ((6 + 23 * 10 + 6) + (9 + 23 * 15 + 9))  # 3n + 3 inside
    H100 = GPUS["H100"]
    assert hyper.floor(H100) == hyper.model.moved / 3350e9
    busy = 3 * hyper.body.flops / 989e12
    assert hyper.slowdown(H100) == pytest.approx((hyper.floor(H100) - plain.floor(H100)) / busy)
    assert (
        plain.slowdown(H100) == plain.extra_flops == plain.extra_parameters == 0
        and plain.memory == 1
    )
    assert (
        hyper.floor(GPUS["A100"])
        > hyper.floor(H100)
        > hyper.floor(GPUS["H200"])
        > hyper.floor(GPUS["B200"])
    )


SIZES = ["--layers=2", "--dim=32", "--heads=2", "--batch=2", "--context=16", "--vocab=97"]


def test_the_command(capsys):
    assert (
        main(
            [
                "cost",
                *SIZES,
                "--arms",
                "prenorm",
                "mudd(dilation=2, ways='k v r')",
                "hyper,mgr",
                "--gpu=A100",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    for shown in (
        "prenorm",
        "mudd(dilation=2, ways='k v r')",
        "hyper",
        "mgr",
        "1.00×",
        "A100 SXM",
        "2,039 GB/s",
    ):
        assert shown in printed
    cost = estimate_cost("hyper", make_config(layers=2, dim=32, heads=2, vocab=97), 2, 16)
    assert f"{cost.model.parameters:,}" in printed and f"{sum(cost.model.traffic):g}" in printed
    assert f"{1e3 * cost.floor(GPUS['A100']):.2f}" in printed and math.isfinite(
        cost.slowdown(GPUS["A100"])
    )


@pytest.mark.parametrize(("extra", "message"), [
    (["--arms", "mud"], "unknown connection 'mud' (did you mean 'mudd'?)"),
    (["--arms", "mudd("], "cannot read the connection 'mudd('"),
    (["--gpu=H10"], "unknown GPU 'H10' (did you mean 'H100'?); known: A100, H100, H200, B200"),
    (["--layer=3"], "unknown option --layer (did you mean '--layers'?); see crosslayer cost --help"),
    (["--batch=0"], "batch must be a whole number of at least 1, got 0"),
    (["--dim=17"], "dim must be a multiple of twice the heads, got dim 17 and 2 heads"),
    (["--family=qwen"], "unknown family 'qwen' (did you mean 'qwen3'?); known: llama, mistral"),
])  # fmt: skip
def test_bad_input_is_one_line(extra, message, capsys):
    assert main(["cost", *SIZES, *extra]) == 1
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_import_is_light():
    code = "import sys, crosslayer.costs; print({'transformers', 'lightning', 'rich'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "set()\n"
    )
