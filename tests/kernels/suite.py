"""Every kernel against its reference, under triton's interpreter or on a GPU.

    TRITON_INTERPRET=1 pytest -n 0 tests/kernels/suite.py
    pytest -n 0 tests/kernels/suite.py      # on CUDA

`test_kernels.py` runs this file in the interpreter.
"""

import copy
import itertools
import os
import statistics
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import crosslayer
from benchmarks.cases import attention_case, gate_case, kernel_ops, mix_case
from crosslayer import ops
from crosslayer.fused_norms import FusedNormConnection
from crosslayer.kernels import launch
from crosslayer.norms import NormSpec
from crosslayer.ops import dispatch
from crosslayer.testing.tiny_model import perturb_weights
from tests.kernels.accuracy import assert_accurate
from tests.kernels.cases import CASES, PATHS
from tests.kernels.interpreter import (
    add_in_trees,
    count_traffic,
    patch_once,
    round_to_nearest,
    stay_within,
)
from tests.support import chain

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The kernels that connections launch, without "_forward" and "_backward".
LAUNCHED = {
    "denseformer": {"depth_mix"},
    "mudd": {"depth_mix", "write_norm_project"},
    "attnres": {"depth_attention"},
    "mgr(streams=2)": {"depth_attention", "gate_pool"},
    "hyper(streams=2)": {"hyper_connection"},
    "hyper(streams=5)": {"write_norm_project", "width_connection"},
    "hyper(streams=3, dynamic=False)": {"width_connection"},
    "frac": {"hyper_connection"},
    "mhc(streams=2, iterations=3)": {"write_norm_project", "width_connection", "sinkhorn"},
    "mhc(streams=2, single_pass=True, iterations=2)": {
        "write_norm_project",  # of the first site
        "single_pass_connection",
        "sum_weight_gradient",
        "sinkhorn",
    },
    "mhc_lite(streams=2)": {"write_norm_project", "width_connection"},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Tokens x D: draws. Few numbers are drawn often, as one near 0 is ill-conditioned when normed; and
# few tokens, as all numbers of a token share its coefficients.
SHAPES = {"5x1": 12, "4x7": 16, "3x63": 8, "1x63": 16}
# The interpreter takes seconds a case. There a shape has one dtype and half of the draws, and the
# cases beside PATHS have half of the shapes. On a GPU all have every shape and dtype.
INTERPRETED_DTYPES = {"5x1": "fp32", "4x7": "fp16", "3x63": "bf16", "1x63": "fp32"}


def is_run(name: str, shape: str, dtype: str) -> bool:
    """Whether this case is run with this shape and dtype."""
    if not CASES[name].row_shapes(1):
        return dtype == "fp32"  # coefficients are float32 whatever the streams' dtype is
    if not INTERPRETED:
        return True
    return dtype == INTERPRETED_DTYPES[shape] and (name in PATHS or dtype != "fp32")


CELLS = [cell for cell in itertools.product(CASES, SHAPES, DTYPES) if is_run(*cell)]

all_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
all_paths = pytest.mark.parametrize("case", [CASES[name] for name in PATHS], ids=PATHS)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Uninitialised memory holds NaN, and two programs share a gradient."""
    monkeypatch.setattr(dispatch, "kernel_devices", ())
    if INTERPRETED:
        monkeypatch.setattr(launch, "program_count", lambda tokens, *_, **__: min(tokens, 2))
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    with ExitStack() as stack:
        if INTERPRETED:
            stack.enter_context(round_to_nearest())
            stack.enter_context(add_in_trees())
            stack.enter_context(patch_once())
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def launched(monkeypatch):
    """The names of the triton kernels launched since the test began."""
    names = []
    launch_kernel = launch.launch_kernel

    def record(kernel, *args, **kwargs):
        names.append(kernel.__name__)
        launch_kernel(kernel, *args, **kwargs)

    monkeypatch.setattr(launch, "launch_kernel", record)
    return names


def switch_kernels_on(monkeypatch):
    """`use_kernels(True)`, on the CPU too."""
    monkeypatch.setattr(dispatch, "kernel_devices", (DEVICE,))


@pytest.mark.parametrize(("name", "shape", "dtype"), CELLS)
def test_accuracy(name, shape, dtype):
    case = CASES[name]
    if dtype == "fp16" and name == "single-pass-3-rms":
        pytest.skip("the reference runs: x is rounded after its norm, not before")
    N, D = map(int, shape.split("x"))
    draws = SHAPES[shape] // 2 if INTERPRETED else SHAPES[shape]
    assert_accurate(case, N, D, DTYPES[dtype], DEVICE, draws)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize(("tokens", "processors"), [(301, 1), (20_000, None)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@all_paths
def test_accuracy_where_a_program_has_many_tokens(case, dtype, tokens, processors, monkeypatch):
    """Programs walk through tokens and the pieces of a row, and add up gradients of parameters."""
    if processors is not None:
        monkeypatch.setattr(launch, "processor_count", lambda like: processors)
    assert_accurate(case, tokens, min(300, case.widest), DTYPES[dtype], DEVICE)


@all_paths
@pytest.mark.parametrize("dtype", ["bf16"] if INTERPRETED else DTYPES)
def test_accuracy_of_rows_of_several_blocks(case, dtype):
    if dtype != "fp32" and not case.row_shapes(1):
        pytest.skip("coefficients are float32 whatever the streams' dtype is")
    assert_accurate(case, 8, 1000, DTYPES[dtype], DEVICE)


@all_paths
def test_accuracy_of_a_long_row(case):
    if case.widest < 7186:
        pytest.skip("the reference runs: such a row does not fit in a program")
    if INTERPRETED and case.module in ("project", "single_pass"):
        pytest.skip("slow, and its blocks are short: 1000 numbers are several")
    assert_accurate(case, 3, 7186, torch.bfloat16, DEVICE, 5)


@pytest.mark.parametrize(
    "case",
    [attention_case(9), mix_case(9, 2, False, 1, 1), gate_case(9, True)],
    ids=["attention", "mix", "gate"],
)
def test_accuracy_of_sources_read_twice(case, monkeypatch):
    """The backward does not keep 9 sources in registers, nor streams where rows are long."""
    monkeypatch.setattr(launch, "fits_in_registers", lambda *_, **__: False)
    assert_accurate(case, 3, 63, torch.bfloat16, DEVICE, 5)


def test_accuracy_of_a_mixture_longer_than_a_program():
    """One norm would fit in registers, but each program has a piece of the row."""
    D = launch.MAX_ROW_BLOCK * 3 // 2
    assert_accurate(mix_case(2, 1, True, 1, 1), 2, D, torch.bfloat16, DEVICE)


@pytest.mark.parametrize("name", ["depth_mix", "depth_attention"])
def test_a_source_without_gradient_is_passed_on_as_it_is(name):
    frozen, x = torch.randn(2, 1, 3, 7, device=DEVICE)
    weights = torch.randn(1, 2) if name == "depth_mix" else torch.randn(7)
    _, passed = getattr(kernel_ops(), name)((frozen, x.requires_grad_()), weights.to(DEVICE))
    assert passed[0] is frozen and passed[1].grad_fn is not None


def test_norms_of_two_kinds_are_applied_after_the_kernel(launched):
    X = tuple(torch.randn(2, 1, 3, 7, device=DEVICE))
    weight, bias = torch.rand(2, 7, device=DEVICE)
    kinds = (
        NormSpec(weight, None, 1e-6, centred=False),
        NormSpec(weight, None, 1e-1, centred=False),
        NormSpec(weight, bias, 1e-6, centred=True),
    )
    w = torch.randn(3, 2, device=DEVICE)
    outputs = tuple(enumerate(kinds))
    mixed, _ = kernel_ops().depth_mix(X, w, outputs)
    assert launched == ["depth_mix_forward"]
    for out, expected in zip(mixed, ops.depth_mix(X, w, outputs)[0], strict=True):
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("project-2-each", "bf16"),
        ("project-4-each-apart", "fp32"),
        ("project-4-joint-centred", "fp32"),
        ("single-pass-4", "bf16"),
    ],
)
def test_accuracy_of_rows_that_programs_share(name, dtype, monkeypatch, launched):
    """As where tokens are decoded. 3 programs do not divide the pieces of a row."""
    monkeypatch.setattr(launch, "split_count", lambda programs, pieces, like: min(3, pieces))
    assert_accurate(CASES[name], 2, 300, DTYPES[dtype], DEVICE, 4)
    assert "join_splits" in launched


@pytest.mark.parametrize(
    "name", ["project-2-each", "project-3-joint", "single-pass-2", "sinkhorn-4"]
)
def test_accuracy_of_several_tiles_of_tokens(name):
    assert_accurate(CASES[name], 70, 7, torch.float32, DEVICE)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("name", ["depth_attention", "gate_pool"])
def test_scores_that_overflow_an_exponential(name, sign):
    X = tuple(torch.rand(2, 1, 3, 7, device=DEVICE))
    query = torch.full((7,), 100.0 * sign, device=DEVICE)
    gate = (X[0], torch.rand(1, 3, 2, device=DEVICE)) if name == "gate_pool" else ()
    outs = getattr(kernel_ops(), name)(X, *gate, query)
    for out, expected in zip(outs, getattr(ops, name)(X, *gate, query), strict=True):
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_a_closed_gate_keeps_a_stream_and_an_open_one_replaces_it():
    s, y = 1e4 * torch.randn(1, 3, 7, device=DEVICE), torch.randn(1, 3, 7, device=DEVICE)
    beta = torch.tensor([0.0, 1.0], device=DEVICE).expand(1, 3, 2)
    (closed, opened), _, _ = kernel_ops().gate_pool((s, s), y, beta, torch.randn(7, device=DEVICE))
    assert torch.equal(closed, s) and torch.equal(opened, y)


@pytest.mark.parametrize(
    "name", ["gate-3", "streams-2", "project-2-each", "hyper-2-rms", "single-pass-2", "norm-rms"]
)
def test_numbers_that_all_tokens_share(name):
    """A kernel takes them without the axes of tokens, as the definition does."""
    case = CASES[name]
    rows, weights = (
        [t.float().to(DEVICE) for t in group] for group in case.make_tensors(4, 7, torch.float32)
    )
    group = rows[1:] if name == "norm-rms" else [w for w in weights if w.ndim > 2]
    shared = {id(t): t[0, 0] for t in group}
    assert shared

    def run(expand):
        new = {key: t.expand(2, 2, *t.shape) if expand else t for key, t in shared.items()}
        return case.run(kernel_ops(), *([new.get(id(t), t) for t in g] for g in (rows, weights)))

    for out, expected in zip(run(False), run(True), strict=True):
        assert torch.equal(out, expected)


# The fakes of these ops branch on a pending write, which the first site has none of.
@pytest.mark.parametrize("name", [*PATHS, "project-2-first", "hyper-2-first"])
def test_library_op(name, monkeypatch):
    """torch's checks of every op, its fake and its gradient; a compiled caller is one graph."""
    case = CASES[name]
    rows, weights = case.make_tensors(4, 7, torch.float32)
    leaves = [t.to(DEVICE, torch.float32).requires_grad_() for t in (*rows, *weights)]
    op = kernel_ops()

    def call(*leaves):
        return [out * 2 for out in case.run(op, leaves[: len(rows)], leaves[len(rows) :])]

    called = {}

    class RecordOps(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "crosslayer":
                called[func] = args
            return func(*args, **(kwargs or {}))

    expected = call(*leaves)
    with RecordOps():
        sum(out.sum() for out in call(*leaves)).backward()
    assert called
    for func, args in called.items():
        args = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), args)
        # The others are called by a Function, or in a backward.
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "AutogradCPU"):
            args = torch.utils._pytree.tree_map_only(
                torch.Tensor, lambda t: t.requires_grad_(), args
            )
        torch.library.opcheck(func, args)

    # `ops` choose the kernel as they are traced.
    switch_kernels_on(monkeypatch)
    op = ops
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    outs = compiled(*leaves)
    for out, e in zip(outs, expected, strict=True):
        assert torch.equal(out, e)
    gradients = torch.autograd.grad(sum(out.sum() for out in outs), leaves)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert torch.equal(leaf.grad, gradient)


@all_paths
def test_gradients_of_outputs_in_any_layout(case):
    rows, weights = case.make_tensors(4, 7, torch.float32)
    leaves = [t.to(DEVICE, torch.float32).requires_grad_() for t in (*rows, *weights)]
    outs = case.run(kernel_ops(), leaves[: len(rows)], leaves[len(rows) :])
    gradients = [torch.randn_like(out) for out in outs]
    transposed = [g.mT.contiguous().mT for g in gradients]
    expected = torch.autograd.grad(outs, leaves, gradients, retain_graph=True)
    for actual, e in zip(torch.autograd.grad(outs, leaves, transposed), expected, strict=True):
        assert torch.equal(actual, e)


def test_a_write_of_lower_precision_is_added_in_the_kernel(launched):
    """Under autocast y is bfloat16 where the stream h is float32."""
    weights = torch.rand(7, device=DEVICE)
    norm = NormSpec(weights, None, 1e-6, centred=False)
    h, y = torch.randn(2, 2, 3, 7, device=DEVICE)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [h.clone().requires_grad_(), y.bfloat16().to(dtype).requires_grad_()]
        outs = kernel_ops().add_norm(*leaves, norm)
        gradients = torch.autograd.grad(outs[0].sum() + outs[1].square().sum(), leaves)
        assert [g.dtype for g in gradients] == [torch.float32, dtype]
        results.append((*outs, gradients[0], gradients[1].bfloat16()))
    assert launched == ["add_norm_forward", "add_norm_backward"] * 2
    for mixed, equal in zip(*results, strict=True):
        assert torch.equal(mixed, equal)


def test_a_write_of_higher_precision_widens_the_stream(launched):
    """In the kernel h' would be rounded to the dtype of h."""
    h, y = torch.randn(2, 2, 3, 7, device=DEVICE)
    norm = NormSpec(torch.rand(7, device=DEVICE), None, 1e-6, centred=False)
    outs = kernel_ops().add_norm(h.bfloat16(), y, norm)
    for out, expected in zip(outs, ops.add_norm(h.bfloat16(), y, norm), strict=True):
        assert torch.equal(out, expected) and out.dtype == torch.float32
    assert not launched


@all_paths
def test_parameters_of_lower_precision(case):
    """A kernel reads them as float32; their gradients have their dtype."""
    if not case.row_shapes(1):
        pytest.skip("the coefficients have the dtype of the logits")
    rows, weights = case.make_tensors(2, 7, torch.float32)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [t.to(DEVICE, torch.float32).requires_grad_() for t in rows]
        leaves += [t.bfloat16().to(DEVICE, dtype).requires_grad_() for t in weights]
        outs = case.run(kernel_ops(), leaves[: len(rows)], leaves[len(rows) :])
        gradients = torch.autograd.grad(sum(out.sin().sum() for out in outs), leaves)
        assert [g.dtype for g in gradients] == [leaf.dtype for leaf in leaves]
        results.append((*outs, *gradients))
    for low, high in zip(*results, strict=True):
        assert torch.equal(low, high.to(low.dtype))


@all_paths
def test_second_derivatives(case):
    """A product with the Hessian, from a kernel's backward that is differentiated again."""
    rows, weights = case.make_tensors(2, 7, torch.float32)
    leaves = [t.to(DEVICE) for t in (*rows, *weights)]

    def product(op, dtype):
        inputs = [t.to(dtype).requires_grad_() for t in leaves]
        outs = case.run(op, inputs[: len(rows)], inputs[len(rows) :])
        loss = sum(out.sin().sum() for out in outs)
        gradients = torch.autograd.grad(loss, inputs, create_graph=True)
        squares = sum(gradient.square().sum() for gradient in gradients)
        return torch.autograd.grad(squares, inputs)

    pairs = zip(product(kernel_ops(), torch.float32), product(ops, torch.float64), strict=True)
    for actual, exact in pairs:
        assert (actual - exact).norm() <= 1e-4 * exact.norm().clamp_min(1)


@all_paths
def test_gradients_under_checkpointing(case):
    """A checkpoint lets a backward read what it has saved once."""
    rows, weights = case.make_tensors(2, 7, torch.float32)
    leaves = [t.to(DEVICE, torch.float32).requires_grad_() for t in (*rows, *weights)]

    def call(*tensors):
        return case.run(kernel_ops(), list(tensors[: len(rows)]), list(tensors[len(rows) :]))

    expected, actual = (
        torch.autograd.grad(sum(out.sin().sum() for out in outs), leaves)
        for outs in (call(*leaves), checkpoint(call, *leaves, use_reentrant=False))
    )
    for gradient, e in zip(actual, expected, strict=True):
        assert torch.equal(gradient, e)


@all_cases
def test_dispatch(case, monkeypatch, launched):
    """`ops` run the kernel where kernels are on and the dtype is theirs, else the reference."""
    rows, weights = (
        [t.to(DEVICE) for t in group] for group in case.make_tensors(2, 7, torch.bfloat16)
    )
    rounded = [x.bfloat16() for x in rows], [w.float() for w in weights]
    case.run(ops, *rounded)
    assert not launched
    switch_kernels_on(monkeypatch)
    case.run(ops, rows, weights)  # float64
    assert not launched
    outs = case.run(ops, *rounded)
    assert launched
    for out, e in zip(outs, case.run(kernel_ops(), *rounded), strict=True):
        assert torch.equal(out, e)


def test_reference_runs_where_the_kernel_does_not_support_the_sizes(monkeypatch, launched):
    """`register_kernel(..., supports=...)`: W has more columns than a program holds."""
    H, W = torch.randn(1, 3, 8, 5, device=DEVICE), torch.randn(40, 160, device=DEVICE)
    expected = ops.write_norm_project(H, None, None, W)
    switch_kernels_on(monkeypatch)
    for out, e in zip(ops.write_norm_project(H, None, None, W), expected, strict=True):
        assert torch.equal(out, e)
    assert not launched


@pytest.mark.parametrize(("D", "is_launched"), [(1024, True), (1040, False)])
def test_a_sum_that_is_normed_does_not_overflow(D, is_launched, monkeypatch, launched):
    """In float16 the kernel would round the sum of a long row before it is normed."""
    H = torch.full((1, 1, 16, D), 3e4, dtype=torch.float16, device=DEVICE)
    weights = torch.ones(D, device=DEVICE), torch.ones(16, device=DEVICE)
    norm = NormSpec(weights[0], None, 1e-6, centred=False)
    switch_kernels_on(monkeypatch)
    x, _ = ops.width_connection(H, weights[1], torch.eye(16, device=DEVICE), norm)
    assert torch.equal(x, torch.ones_like(x))
    assert bool(launched) == is_launched


@pytest.mark.parametrize("spec", LAUNCHED)
def test_connections(spec, monkeypatch, launched):
    """Connections run these kernels, and are no further from float64 than with the references."""

    def output_and_gradients(sites, x, dout):
        x, dout = x.clone().requires_grad_(), dout.clone()
        out = chain.run(sites, x)
        leaves = [x, *(p for p in sites.parameters() if p.requires_grad)]
        gradients = torch.autograd.grad(
            out, leaves, dout, materialize_grads=True, allow_unused=True
        )
        return [out, *gradients]

    def distance(tensors, exact):
        return sum(
            (t - e).norm() / e.norm().clamp_min(1e-3) for t, e in zip(tensors, exact, strict=True)
        ).item()

    ratios = []
    for seed in range(5):
        torch.manual_seed(seed)
        sites = perturb_weights(nn.ModuleList(chain.row(spec, layers=2))).to(DEVICE)
        x, dout = (chain.randn(1, 3, chain.D).to(DEVICE) for _ in range(2))
        exact = output_and_gradients(copy.deepcopy(sites).double(), x.double(), dout.double())
        reference = distance(output_and_gradients(sites, x, dout), exact)
        assert seed or not launched
        with monkeypatch.context() as patch:
            switch_kernels_on(patch)
            ratios.append(distance(output_and_gradients(sites, x, dout), exact) / reference)
    # The median, because depth amplifies the rounding of some draws many times.
    assert statistics.median(ratios) <= 2, ratios
    ops_launched = {name.removesuffix("_forward").removesuffix("_backward") for name in launched}
    assert ops_launched == LAUNCHED[spec]


NORMS = {"rms": partial(nn.RMSNorm, eps=1e-6), "layer": nn.LayerNorm}
# Connections that fuse the norms of every site ...
FUSED = (
    *(spec for spec in LAUNCHED if spec != "frac"),
    "prenorm",
    "attnres(block_size=3)",
    "mhc(streams=2, residual='identity')",
    "mudd(ways='v kq r')",
)
# ... or only of some.
PARTLY_FUSED = (
    "mudd(normed=True)",
    "mudd(ways='k v r', dilation=2)",
    "prenorm-parallel",
    "mudd-parallel",
)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("spec", [*FUSED, *PARTLY_FUSED])
def test_fused_norms(spec, kind, monkeypatch):
    """Kernels apply the norms instead of the modules, and give the same result."""
    name, _, parallel = spec.partition("-")
    torch.manual_seed(0)
    make = crosslayer.make(name)
    norm = NORMS[kind](chain.D)
    plan = crosslayer.plan(2, bool(parallel))
    sites = nn.ModuleList(make(site, chain.D, lambda port: copy.deepcopy(norm)) for site in plan)
    sites = perturb_weights(sites).to(DEVICE)
    x, dout = (chain.randn(1, 3, chain.D).to(DEVICE) for _ in range(2))
    called = []
    fused = []

    # A hook of all modules: a norm with a hook of its own, or another forward, is not fused.
    def record_norm(module, inputs):
        if isinstance(module, type(norm)):
            called.append(module)

    def output_and_gradients():
        fused.clear()
        leaf = x.clone().requires_grad_()
        state = sites[0].init(leaf)
        for k, site in enumerate(sites):
            can_fuse = isinstance(site, FusedNormConnection) and bool(site.fused_norm_specs())
            fused.append(can_fuse and dispatch.uses_kernel(leaf))
            called.clear()
            inputs, state = site.read(state)
            assert len(called) == (0 if fused[-1] else len(site.ports))
            state = site.write(state, sum(chain.sublayer(k + i, x) for i, x in enumerate(inputs)))
        leaves = [leaf, *sites.parameters()]
        gradients = torch.autograd.grad(
            inputs[0], leaves, dout, materialize_grads=True, allow_unused=True
        )
        return [inputs[0], *gradients]

    with nn.modules.module.register_module_forward_pre_hook(record_norm):
        expected = output_and_gradients()
        assert not any(fused)
        switch_kernels_on(monkeypatch)
        actual = output_and_gradients()
    assert all(fused) if spec in FUSED else any(fused)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-4 * e.abs().max().clamp_min(1e-2).item())


@pytest.mark.parametrize("spec", ["mudd", "mudd(ways='qkv r')", "mudd(ways='k q vr')"])
def test_connections_save_no_mixture_that_only_feeds_a_norm(spec, monkeypatch):
    """MUDD's q, k and v: a read saves its sources once, and nothing else of D a token."""
    switch_kernels_on(monkeypatch)
    D = 32  # more than any number of coefficients
    make = crosslayer.make(spec)
    sites = [
        make(site, D, lambda port: nn.RMSNorm(D, eps=1e-6)).to(DEVICE)
        for site in crosslayer.plan(3)
    ]
    x = chain.randn(1, 3, D).to(DEVICE).requires_grad_()
    state = sites[0].init(x)
    for k, site in enumerate(sites):
        saved = {}

        def save(t, saved=saved):
            if t.shape == x.shape:
                saved[t.untyped_storage().data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
            inputs, state = site.read(state)
        if site.a is not None:
            assert len(saved) == len(site.sources)
        state = site.write(state, sum(chain.sublayer(k + i, x) for i, x in enumerate(inputs)))
    assert len(site.sources) == 4


def test_a_norm_with_a_hook_is_called(monkeypatch):
    switch_kernels_on(monkeypatch)
    make = crosslayer.make("attnres")
    sites = nn.ModuleList(
        make(site, chain.D, lambda port: nn.RMSNorm(chain.D, eps=1e-6))
        for site in crosslayer.plan(2)
    ).to(DEVICE)
    calls = []
    sites[1].norms[0].register_forward_pre_hook(lambda *_: calls.append(1))
    chain.run(sites, chain.randn(2, 3, chain.D).to(DEVICE))
    assert calls == [1]


def build_llama(**sizes):
    """Most of this file needs no transformers, whose import takes longer than the tests."""
    from tests.hf.backbones import build

    return build("llama", **sizes).to(DEVICE)


@pytest.mark.parametrize("spec", [*list(LAUNCHED)[:5], "mhc(streams=2, iterations=3)"])
def test_whole_model(spec, monkeypatch):
    """A host's step is the same with kernels as without, and compiles to one graph."""
    torch.manual_seed(0)
    model = perturb_weights(crosslayer.connect(build_llama(num_hidden_layers=2), spec))
    tokens = torch.randint(97, (1, 4), device=DEVICE)

    def step(model):
        model.zero_grad()
        logits = model(input_ids=tokens).logits
        logits.square().mean().backward()
        return [logits, *(p.grad for p in model.parameters())]

    expected = [x.clone() for x in step(model)]
    switch_kernels_on(monkeypatch)
    for called in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        for actual, e in zip(step(called), expected, strict=True):
            tolerance = 1e-4 * e.abs().max().clamp_min(1e-2).item()
            torch.testing.assert_close(actual, e, rtol=0, atol=tolerance)


def test_disconnect_with_kernels(monkeypatch, launched):
    """`disconnect` runs the connected model once, to see that its function does not change."""
    switch_kernels_on(monkeypatch)
    crosslayer.disconnect(crosslayer.connect(build_llama(), "mudd"))
    assert launched


@all_cases
def test_empty_batch(case):
    rows, weights = case.make_tensors(0, 7, torch.float32)
    leaves = [t.to(DEVICE, torch.float32).requires_grad_() for t in (*rows, *weights)]
    outs = case.run(kernel_ops(), leaves[: len(rows)], leaves[len(rows) :])
    sum(out.sum() for out in outs).backward()
    assert all(leaf.grad is None or not leaf.grad.any() for leaf in leaves)


@all_cases
@pytest.mark.skipif(not INTERPRETED, reason="counts what the interpreter loads and stores")
def test_memory_traffic(case, monkeypatch):
    """Forward moves at most 1.05 of `Case.traffic`; forward and backward 1.15 of it."""
    # One program, because each reads the weights, and the tokens must outweigh these.
    monkeypatch.setattr(launch, "program_count", lambda *_, **__: 1)
    N, D = 8, 1000
    rows, weights = case.make_tensors(N, D, torch.bfloat16)
    rows = [x.bfloat16().requires_grad_() for x in rows]
    weights = [w.float().requires_grad_() for w in weights]
    forward, backward = case.traffic(N, D, 2)
    with count_traffic() as traffic:
        outs = case.run(kernel_ops(), rows, weights)
        forward_moved = traffic.bytes
        torch.autograd.grad(outs, [*rows, *weights], [torch.ones_like(out) for out in outs])
    forward_ratio = forward_moved / forward
    ratio = traffic.bytes / (forward + backward)
    print(f"of the bound: forward {forward_ratio:.3f}, forward and backward {ratio:.3f}")
    assert 1 <= forward_ratio <= 1.05
    assert 1 <= ratio <= 1.15


@all_cases
@pytest.mark.skipif(not INTERPRETED, reason="watches what the interpreter loads and stores")
def test_no_kernel_leaves_its_tensors(case, monkeypatch):
    """Not even to load a number that it does not use."""
    launch_kernel = launch.launch_kernel
    launches = []

    def launch_within(kernel, grid, *args, **options):
        launches.append(kernel)
        leaves = torch.utils._pytree.tree_leaves(args)
        with stay_within([x for x in leaves if isinstance(x, torch.Tensor)]):
            launch_kernel(kernel, grid, *args, **options)

    monkeypatch.setattr(launch, "launch_kernel", launch_within)
    rows, weights = case.make_tensors(3, 7, torch.bfloat16)
    leaves = [*(x.bfloat16() for x in rows), *(w.float() for w in weights)]
    leaves = [t.requires_grad_() for t in leaves]
    outs = case.run(kernel_ops(), leaves[: len(rows)], leaves[len(rows) :])
    torch.autograd.grad(outs, leaves, [torch.ones_like(out) for out in outs])
    assert launches
