"""Every kernel against its reference: under triton's interpreter (`test_kernels.py` runs this file so), or on a GPU.

TRITON_INTERPRET=1 pytest -n 0 tests/kernels/suite.py          pytest -n 0 tests/kernels/suite.py   on CUDA
"""

import copy
import os
import statistics
from contextlib import nullcontext
from functools import partial
from importlib import import_module

import pytest
import torch
from torch import nn

import crosslayer
from crosslayer import ops
from crosslayer.kernels import launch
from crosslayer.ops import dispatch
from tests.hf.backbones import build
from tests.kernels.accuracy import hold, kernels
from tests.kernels.cases import CASES, SLOW
from tests.kernels.interpreter import counted, rounding
from tests.support import chain
from tests.support.tiny import shake

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# of connections: the kernels they launch
ARMS = {
    "denseformer": {"mix"},
    "mudd": {"mix"},
    "attnres": {"attend"},
    "mgr(streams=2)": {"attend", "gate"},
    "hyper(streams=2)": {"probe", "carry"},
    "hyper(streams=3, dynamic=False)": {"carry"},
    "frac": {"probe"},
    "mhc(streams=2, iterations=3)": {"probe", "carry", "sinkhorn"},
    "mhc(streams=2, single_pass=True, iterations=2)": {"probe", "carry", "sinkhorn"},
    "mhc_lite(streams=2)": {"probe", "carry"},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPES = ((5, 1), (4, 7), (3, 63), (1, 63), (2, 1000))  # tokens, D

each = pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, c in CASES.items()
    ],
)
# of each kernel, or path through one, a case
one_of_each = (
    "mix-1-of-5-static",
    "mix-4-of-2",
    "mix-4-of-3-rms",
    "gate-3",
    "gate-4-last",
    "gate-2-rms",
    "attend-2",
    "attend-2-layer",
    "streams-2",
    "streams-4-layer",
    "sinkhorn-4",
    "probe-2-each",
)
one_of_each = (*one_of_each, "probe-3-all", "norm-rms", "norm-layer", "merge")


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Memory that nothing has been written to holds NaN, `ops` are the references, and programs share a gradient: two,
    as each reads the weights, which the ledger's few tokens must outweigh."""
    monkeypatch.setattr(dispatch, "DEVICES", ())
    if INTERPRETED:
        monkeypatch.setattr(launch, "programs", lambda N, like: min(N, 2))
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    with rounding() if INTERPRETED else nullcontext():
        yield
    torch.use_deterministic_algorithms(False)


@each
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_accuracy(case, dtype):
    if dtype != torch.float32 and not case.rows(1):
        pytest.skip("coefficients are float32 whatever the streams' dtype is")
    for N, D in SHAPES:
        # of few numbers many, as one that is near 0 is ill-conditioned when normed
        hold(case, N, D, dtype, DEVICE, draws=1 if D > 63 else (16 if D == 63 else 64) // N)


@pytest.mark.parametrize("name", one_of_each)
def test_accuracy_of_a_long_row(name):
    hold(CASES[name], 3, 7186, torch.bfloat16, DEVICE)


@pytest.mark.parametrize("name", one_of_each)
def test_op(name, monkeypatch):
    """torch's own checks of every op called, with fakes and under autograd; and no graph break in a compiled caller."""
    case = CASES[name]
    rows, weights = case.make(4, 7, torch.float32)
    leaves = [t.to(DEVICE, torch.float32).requires_grad_() for t in (*rows, *weights)]
    op = kernels()

    def call(*leaves):
        return [out * 2 for out in case.run(op, leaves[: len(rows)], leaves[len(rows) :])]

    called = {}

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "crosslayer":
                called[func] = args
            return func(*args, **(kwargs or {}))

    expected = call(*leaves)
    with Recorder():
        sum(out.sum() for out in call(*leaves)).backward()
    assert called
    for func, args in called.items():
        args = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), args)
        if not func.__name__.endswith("backward.default"):
            args = torch.utils._pytree.tree_map_only(
                torch.Tensor, lambda t: t.requires_grad_(), args
            )
        torch.library.opcheck(func, args)

    # `ops` choose the kernel as they are traced
    monkeypatch.setattr(dispatch, "DEVICES", (DEVICE,))
    op = ops
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    outs = compiled(*leaves)
    for out, e in zip(outs, expected, strict=True):
        torch.testing.assert_close(out, e, rtol=0, atol=0)
    for leaf, e in zip(
        leaves, torch.autograd.grad(sum(o.sum() for o in outs), leaves), strict=True
    ):
        torch.testing.assert_close(leaf.grad, e, rtol=0, atol=0)


@each
def test_dispatch(case, monkeypatch):
    """`ops` call the kernel where the tensors are its kind, and the reference where they are float64 or elsewhere."""
    ran = []
    module = import_module(f"crosslayer.kernels.{case.module}")
    launch = module.launch.launch
    monkeypatch.setattr(
        module.launch, "launch", lambda *args, **rest: (ran.append(1), launch(*args, **rest))
    )
    rows, weights = ([t.to(DEVICE) for t in group] for group in case.make(2, 7, torch.bfloat16))
    given = [x.bfloat16() for x in rows], [w.float() for w in weights]
    case.run(ops, *given)
    assert not ran
    monkeypatch.setattr(dispatch, "DEVICES", (DEVICE,))
    case.run(ops, rows, weights)
    assert not ran
    outs = case.run(ops, *given)
    assert ran
    for out, e in zip(outs, case.run(kernels(), *given), strict=True):
        assert torch.equal(out, e)


@pytest.mark.parametrize("arm", ARMS)
def test_a_row_of_connections(arm, monkeypatch):
    """As connections call the ops: kernels where there are any, and no further from the truth than the references."""
    launched = []
    monkeypatch.setattr(launch, "launch", lambda *args, launch=launch.launch, **rest: (
        launched.append(args[0].__name__), launch(*args, **rest)
    ))  # fmt: skip

    def evaluated(sites, *given):
        x, dout = (t.clone() for t in given)
        out = chain.run(sites, x.requires_grad_())
        leaves = [x, *(p for p in sites.parameters() if p.requires_grad)]
        return [
            out,
            *torch.autograd.grad(out, leaves, dout, materialize_grads=True, allow_unused=True),
        ]

    def off(found, truth):
        return sum(
            (a - t).norm() / t.norm().clamp_min(1e-3) for a, t in zip(found, truth, strict=True)
        ).item()

    ratios = []
    for seed in range(5):
        torch.manual_seed(seed)
        sites = shake(nn.ModuleList(chain.row(arm, layers=2))).to(DEVICE)
        x, dout = (chain.randn(1, 3, chain.D).to(DEVICE) for _ in range(2))
        truth = evaluated(copy.deepcopy(sites).double(), x.double(), dout.double())
        reference = off(evaluated(sites, x, dout), truth)
        assert seed or not launched
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "DEVICES", (DEVICE,))
            ratios.append(off(evaluated(sites, x, dout), truth) / reference)
    assert statistics.median(ratios) <= 2, (
        ratios
    )  # depth amplifies the rounding of some draws many times
    assert {name.partition("_")[0] for name in launched} == ARMS[arm]


NORMS = {"rms": partial(nn.RMSNorm, eps=1e-6), "layer": nn.LayerNorm}
# at every site
FUSED = (
    *(arm for arm in ARMS if arm != "frac"),
    "prenorm",
    "attnres(block_size=3)",
    "mhc(streams=2, residual='identity')",
    "mudd(ways='v kq r')",
)
PARTLY = ("mudd(normed=True)", "mudd(ways='k v r', dilation=2)")


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("arm", [*FUSED, *PARTLY, "prenorm-parallel", "mudd-parallel"])
def test_norms_taken_along(arm, kind, monkeypatch):
    """Kernels run the norms instead of the modules, and give what those give."""
    arm, parallel, _ = arm.partition("-parallel")
    torch.manual_seed(0)
    make, norm, called, taken = crosslayer.make(arm), NORMS[kind](chain.D), [], []
    plan = crosslayer.plan(2, bool(parallel))
    sites = shake(
        nn.ModuleList(make(site, chain.D, lambda port: copy.deepcopy(norm)) for site in plan)
    ).to(DEVICE)
    x, dout = (chain.randn(1, 3, chain.D).to(DEVICE) for _ in range(2))
    module, forward = type(norm), type(norm).forward
    monkeypatch.setattr(
        module, "forward", lambda self, x: (called.append(self), forward(self, x))[1]
    )

    def evaluated():
        taken.clear()
        leaf = x.clone().requires_grad_()
        state = sites[0].init(leaf)
        for k, site in enumerate(sites):
            taken.append(bool(site.following(state)))
            called.clear()
            inputs, state = site.read(state)
            assert len(called) == (0 if taken[-1] else len(site.ports))
            state = site.write(state, sum(chain.sublayer(k + i, x) for i, x in enumerate(inputs)))
        leaves = [leaf, *sites.parameters()]
        out = inputs[0]
        return [
            out,
            *torch.autograd.grad(out, leaves, dout, materialize_grads=True, allow_unused=True),
        ]

    expected = evaluated()
    assert not any(taken)
    monkeypatch.setattr(dispatch, "DEVICES", (DEVICE,))
    found = evaluated()
    assert all(taken) if arm in FUSED and not parallel else any(taken)
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-4 * e.abs().max().clamp_min(1e-2).item())


def test_a_hooked_norm_runs_itself(monkeypatch):
    monkeypatch.setattr(dispatch, "DEVICES", (DEVICE,))
    sites = nn.ModuleList(crosslayer.make("attnres")(site, chain.D, lambda port: nn.RMSNorm(chain.D, eps=1e-6))
                          for site in crosslayer.plan(2)).to(DEVICE)  # fmt: skip
    ran = []
    sites[1].norms[0].register_forward_pre_hook(lambda *_: ran.append(1))
    chain.run(sites, chain.randn(2, 3, chain.D).to(DEVICE))
    assert ran == [1]


@pytest.mark.parametrize("arm", [*list(ARMS)[:5], "mhc(streams=2, iterations=3)"])
def test_a_whole_model(arm, monkeypatch):
    """A host's step with kernels is that without, and is one graph: with every kernel and every norm in it."""
    torch.manual_seed(0)
    model = shake(crosslayer.connect(build("llama", num_hidden_layers=2), arm)).to(DEVICE)
    tokens = torch.randint(97, (1, 4), device=DEVICE)

    def step(model):
        model.zero_grad()
        logits = model(input_ids=tokens).logits
        logits.square().mean().backward()
        return [logits, *(p.grad for p in model.parameters())]

    expected = [x.clone() for x in step(model)]
    monkeypatch.setattr(dispatch, "DEVICES", (DEVICE,))
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        for found, e in zip(step(run), expected, strict=True):
            torch.testing.assert_close(
                found, e, rtol=0, atol=1e-4 * e.abs().max().clamp_min(1e-2).item()
            )


def test_a_fresh_model_disconnects(monkeypatch):
    monkeypatch.setattr(dispatch, "DEVICES", (DEVICE,))
    crosslayer.disconnect(crosslayer.connect(build("llama").to(DEVICE), "mudd"))


def test_more_columns_than_a_program_holds():
    H, W = torch.randn(1, 3, 8, 5, device=DEVICE), torch.randn(40, 80, device=DEVICE)
    for out, e in zip(
        kernels().probe(H, None, None, W), ops.write_norm_project(H, None, None, W), strict=True
    ):
        assert torch.equal(out, e)


@each
def test_empty(case):
    given = case.make(0, 7, torch.float32)
    leaves = [t.to(DEVICE, torch.float32).requires_grad_() for group in given for t in group]
    rows = len(given[0])
    sum(out.sum() for out in case.run(kernels(), leaves[:rows], leaves[rows:])).backward()
    assert all(leaf.grad is None or not leaf.grad.any() for leaf in leaves)


@each
@pytest.mark.skipif(not INTERPRETED, reason="counts what the interpreter loads and stores")
def test_ledger(case):
    """Moves at most 1.05 of what its op says it must forward, and 1.15 of that forward and backward."""
    N, D = 64, 1000
    rows, weights = case.make(N, D, torch.bfloat16)
    leaves = [x.bfloat16().requires_grad_() for x in rows] + [
        w.float().requires_grad_() for w in weights
    ]
    forward, backward = case.moves(import_module(f"crosslayer.kernels.{case.module}"), N, D, 2)
    with counted() as moved:
        outs = case.run(kernels(), leaves[: len(rows)], leaves[len(rows) :])
        first = moved.bytes
        torch.autograd.grad(outs, leaves, [torch.ones_like(o) for o in outs])
    print(
        f"forward {first / forward:.3f}, forward and backward {moved.bytes / (forward + backward):.3f} of the floor"
    )
    assert 1 <= first / forward <= 1.05
    assert 1 <= moved.bytes / (forward + backward) <= 1.15
