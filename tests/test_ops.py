"""Identities of the ops, and the switch between references and kernels."""

import sys
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map

import crosslayer
from crosslayer.norms import NormSpec, apply_norm, inverse_rms, rms_norm
from crosslayer.ops import (
    add_norm,
    attention,
    depth_attention,
    depth_mix,
    dispatch,
    gate_pool,
    hyper_connection,
    single_pass_connection,
    sinkhorn,
    width_connection,
    write_norm_project,
)
from crosslayer.ops.hyper import CoefficientMap
from crosslayer.ops.mix import add_weighted_sum
from crosslayer.ops.products import (
    mix_streams,
    project_back,
    project_manual_grad,
    row_dots,
    stream_gram,
)
from crosslayer.ops.streams import depth_connection
from tests.support import chain
from tests.support.one_rank import one_rank_mesh


def test_sinkhorn_normalises_columns_and_differentiates_every_round():
    logits = torch.randn(3, 4, 4, dtype=torch.float64, requires_grad=True)
    M = sinkhorn(logits, 20)
    torch.testing.assert_close(M.sum(-2), torch.ones(3, 4, dtype=torch.float64), rtol=0, atol=2e-6)
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 3, 1e-2), (logits,))


@pytest.mark.parametrize("eps", [0.0, 1e-40])  # the second is no normal number
def test_sinkhorn_without_eps_when_logits_spread_past_float32(eps):
    """exp of the spread is 0 in float32, but not in float64."""
    logits = 200 * torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(0))
    cotangent = torch.randn(5, 4, 4)
    wide, exact = logits.requires_grad_(), logits.detach().double().requires_grad_()
    M = sinkhorn(wide, 3, eps)
    M_exact = exact.softmax(-1)
    for axis in (-2, -1, -2, -1, -2):
        M_exact = M_exact / M_exact.sum(axis, keepdim=True)
    torch.testing.assert_close(M, M_exact.float(), rtol=1e-3, atol=1e-6)
    (gradient,) = torch.autograd.grad(M, wide, cotangent)
    (gradient_exact,) = torch.autograd.grad(M_exact, exact, cotangent.double())
    torch.testing.assert_close(gradient, gradient_exact.float(), rtol=1e-3, atol=1e-5)


def test_depth_mix_checks_the_number_of_weights():
    with pytest.raises(ValueError, match="2 sources but weights for 3"):
        depth_mix((torch.ones(1, 1, 2),) * 2, torch.ones(1, 3))


def test_a_norm_of_several_mixtures_is_an_error():
    H, W = torch.ones(1, 1, 2, 3), torch.ones(3, 5)
    of_streams = CoefficientMap(W, W[0], W[0], W[:2], "tanh", 1e-6, False)
    norm = NormSpec(torch.ones(3), None, 1e-6, False)
    with pytest.raises(ValueError, match="norm of x with 2 mixtures: only a single mixture has"):
        hyper_connection(H, None, None, of_streams, inputs=2, norm=norm)


def test_scores_are_those_of_few_elements_however_many_there_are(monkeypatch):
    X, Q = torch.randn(3, 2, 4, 5).unbind(), torch.randn(2, 5)
    of_few = attention.score_sources(X, Q, 0.1)
    monkeypatch.setattr(attention, "_FEW_ELEMENTS", 0)
    torch.testing.assert_close(attention.score_sources(X, Q, 0.1), of_few)


def test_a_large_gradient_is_rounded_once():
    """1 is half a unit of its last digit."""
    gradient, ones = torch.full((1, 1, 1), 2.0**24), [torch.ones(1, 1, 1)] * 4
    assert add_weighted_sum(gradient, ones, torch.ones(4)) == 2**24 + 4


@pytest.mark.parametrize("product", [row_dots, stream_gram])
def test_products_of_half_precision_are_summed_in_float32(product):
    a, b = torch.randn(2, 2, 3, 100).bfloat16()
    torch.testing.assert_close(product(a, b), product(a.float(), b.float()))


def affine_norm(x, centred):
    weight, bias = torch.linspace(0, 1, 200).view(2, 100)
    return apply_norm(x, NormSpec(weight, bias if centred else None, 1e-6, centred))


@pytest.mark.parametrize(
    ("norm", "dtype"),
    [
        (rms_norm, torch.float32),
        (partial(inverse_rms, eps=1e-6), torch.float32),
        (partial(affine_norm, centred=False), torch.bfloat16),
        (partial(affine_norm, centred=True), torch.bfloat16),
    ],
)
def test_norms_of_half_precision_are_computed_in_float32(norm, dtype):
    x = torch.randn(2, 3, 100).bfloat16()
    torch.testing.assert_close(norm(x), norm(x.float()).to(dtype), rtol=0, atol=0)


def width_of_many(H, pre, res):
    return width_connection(H, pre, res, NormSpec(torch.ones(100), None, 1e-6, False))


def single_pass_of_many(H, pre, res):
    norm = NormSpec(torch.ones(100), None, 1e-6, False)
    W = torch.linspace(-1, 1, 800).view(400, 2)
    y, post = H[..., 0, :], torch.zeros_like(pre)
    return single_pass_connection(H, y, post, res, pre, W, norm=norm)


@pytest.mark.parametrize("op", [width_of_many, single_pass_of_many])
def test_normed_sums_of_float16_streams_are_those_of_float32(op):
    """The sum of four streams is beyond float16; each of them, and the norm, is within."""
    H = (4e4 + 1e4 * torch.rand(2, 3, 4, 100)).half()
    pre, res = torch.ones(2, 3, 4), torch.eye(4).expand(2, 3, 4, 4)
    of_half = op(H, pre, res)
    assert of_half[0].dtype == of_half[1].dtype == torch.float16
    for half, full in zip(of_half, op(H.float(), pre, res), strict=True):
        torch.testing.assert_close(half.float(), full, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("beta", [None, torch.ones(2)])
def test_a_write_wider_than_the_streams_does_not_widen_them(beta):
    H = torch.ones(1, 3, 2, 4, dtype=torch.bfloat16)
    assert depth_connection(H, torch.ones(1, 3, 1, 4), beta).dtype == H.dtype


@pytest.mark.parametrize("streams", [4, 5, 17])
def test_products_equal_sums(streams):
    """What a compiler gets, on both sides of the number of products that become sums."""
    H, Y = torch.randn(2, 3, streams, 7), torch.randn(2, 3, 1, 7)
    w, W = torch.randn(2, 3, streams, streams), torch.randn(7, streams)
    g = torch.randn(2, 3, streams)

    def products(H, Y, w, W, g):
        return (
            project_manual_grad(H, W),
            project_back(g, W),
            mix_streams(H, w),
            mix_streams(H, w[0, 0]),
            stream_gram(H, H),
            row_dots(Y, H),
            row_dots(H, H),
        )

    tensors = [t.double() for t in (H, Y, w, W, g)]
    compiled = torch.compile(products, backend="eager", fullgraph=True)(*tensors)
    for a, b in zip(compiled, products(*tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "spec", ["denseformer", "mudd", "attnres", "attnres(block_size=4)", "mgr(streams=8)"]
)
def test_a_step_adds_at_most_one_whole_tensor_a_source(spec):
    """Autograd added the gradients of a source's readers one by one: 1,176 times for `attnres`."""
    sites = chain.row(spec, layers=24)
    x = torch.randn(1, 2, chain.D, dtype=torch.bfloat16, requires_grad=True)
    state = sites[0].init(x)
    for site in sites[:-1]:
        (h, *_), state = site.read(state)
        state = site.write(state, h.tanh())
    loss = sites[-1].readout(state).sum()
    additions = 0

    class CountAdditions(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal additions
            if func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor):
                additions += all(isinstance(t, torch.Tensor) and t.shape == x.shape for t in args)
            return func(*args, **(kwargs or {}))

    with CountAdditions():
        loss.backward()
    assert additions <= len(sites)


def test_sources_passed_on_have_the_gradients_of_all_their_readers():
    frozen, x, q, w = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(4), torch.randn(1, 2)
    frozen, x, q, w = (t.double() for t in (frozen, x, q, w))
    leaves = [t.requires_grad_() for t in (x, q, w)]

    def read_three_times(passes_on):
        y = x * 2
        X = (frozen, y)
        outs = []
        for read in (
            lambda X: depth_mix(X, w),
            lambda X: depth_attention(X, q),
            lambda X: depth_mix(X, w),
        ):
            out, passed = read(X)
            X = passed if passes_on else X
            outs.append(out if isinstance(out, torch.Tensor) else out[0])
        return sum((out * out).sum() for out in outs) + X[1].sum(), y, X

    expected, _, _ = read_three_times(passes_on=False)
    gradients = torch.autograd.grad(expected, leaves)
    loss, y, X = read_three_times(passes_on=True)
    assert X[0] is frozen
    seen = []
    y.register_hook(seen.append)
    for _ in range(2):  # the graph keeps nothing of the first backward pass
        for a, b in zip(
            torch.autograd.grad(loss, leaves, retain_graph=True), gradients, strict=True
        ):
            torch.testing.assert_close(a, b)
        (dw,) = torch.autograd.grad(loss, w, retain_graph=True)
        torch.testing.assert_close(dw, gradients[2])
    assert len(seen) == 2
    for gradient in seen:
        torch.testing.assert_close(2 * gradient, gradients[0])


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        (lambda x, q: depth_attention(x.unbind(-2), q)[0], [100]),
        (lambda x, w: depth_mix(x.unbind(-2), w)[0][0], [1, 4]),
        (lambda x, q: gate_pool(x.unbind(-2), x[..., 0, :], torch.zeros(2, 3, 4), q)[1], [100]),
        (lambda x, pre: width_connection(x, pre, torch.eye(4))[0], [4]),
        (lambda x, W: write_norm_project(x, None, None, W)[1], [100, 2]),
    ],
    ids=["attention", "mix", "gate", "width", "project"],
)
def test_gradients_of_coefficients_are_computed_in_float32(op, shape):
    x, weights = torch.randn(2, 3, 4, 100).bfloat16(), torch.randn(shape, requires_grad=True)
    cotangent = torch.randn_like(op(x, weights)).bfloat16()
    gradients = []
    for stream in (x, x.float()):
        out = op(stream, weights)
        gradients += torch.autograd.grad(out, weights, cotangent.to(out.dtype))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2])
def test_gradients_of_a_write_with_weight_1(rows):
    shapes = ([1, 2, 2, 3], [1, 2, rows, 3], [3, 4])
    H, Y, W = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    assert torch.autograd.gradcheck(
        lambda H, Y, W: write_norm_project(H, Y, None, W), (H, Y, W), fast_mode=True
    )


def test_a_mixture_that_nothing_reads_has_no_gradient():
    x, w = torch.randn(2, 3, 4), torch.randn(2, 1, requires_grad=True)
    (first, _), _ = depth_mix((x,), w)
    (dw,) = torch.autograd.grad(first.sum(), w)
    torch.testing.assert_close(dw, torch.stack([x.sum(), torch.tensor(0.0)])[:, None])


@pytest.mark.parametrize(
    "op",
    [
        lambda x: depth_attention((x, 2 * x), x[0, 0], 0.1)[0],
        lambda x: gate_pool((x, 2 * x), x, x[..., :2], x[0, 0], x[0, 0], 0.1)[1:],
        lambda x: sinkhorn(x, 2, 0.1),
        lambda x: write_norm_project(x, None, None, x[0], 0.1)[1],
        lambda x: write_norm_project(x, None, None, x[0], 0.1, centred=True)[1],
        lambda x: single_pass_connection(
            x, x[..., 0, :], x[..., 0], x, x[..., 1], x.reshape(16, 2), 0.1
        ),
    ],
)
def test_the_definition_of_an_op_has_its_eps(op):
    """It is what torch.func sees, and what gives second derivatives."""
    x = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    expected = tree_map(lambda y: y[None], op(x))
    torch.testing.assert_close(torch.func.vmap(op)(x[None]), expected)
    plain, differentiable = (
        torch.autograd.grad(sum(y.sin().sum() for y in tree_leaves(op(x))), x, create_graph=again)
        for again in (False, True)
    )
    torch.testing.assert_close(plain, differentiable)


@pytest.mark.slow
def test_compiled_gradients_of_every_hand_written_backward():
    """torch 2.11 gave zeros (see `separate_outputs`), with every backend."""

    def call_every_op(x, H, beta, W, query):
        (mixed,), X = depth_mix((x, 2 * x), (x @ W)[..., None, :2])
        h, X = depth_attention(X, query)
        gated, pooled, scores = gate_pool((x, h), mixed, X[1][..., :2].sigmoid(), query, query)
        H, z = write_norm_project(H, pooled[..., None, :], beta, W)
        read, H = width_connection(H, beta, sinkhorn(z[..., :2], 3))
        return [*gated, scores, X[1], H, read]

    shapes = [(2, 3, 5), (2, 3, 2, 5), (2,), (5, 3), (5,)]
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    compiled = torch.compile(call_every_op, fullgraph=True, backend="eager")
    gradients = []
    for call in (compiled, call_every_op):
        loss = sum(out.square().sum() for out in call(*leaves))
        gradients.append(torch.autograd.grad(loss, leaves))
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.slow
def test_an_op_called_twice_compiles_with_dynamic_shapes():
    """A default eps is no constant then, but an input of the graph that first meets it."""

    def attend_twice(x, q):
        h, (x, _) = depth_attention((x, 2 * x), q)
        return depth_attention((x, h), q)[0]

    x, q = torch.randn(2, 3, 4, requires_grad=True), torch.randn(4)
    compiled = torch.compile(attend_twice, fullgraph=True, dynamic=True, backend="aot_eager")
    gradients = [torch.autograd.grad(f(x, q).sum(), x)[0] for f in (compiled, attend_twice)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)


# use_kernels


@pytest.fixture
def restore_kernels(monkeypatch):
    """Restore the global that `use_kernels` changes, and start without the environment variable."""
    monkeypatch.setattr(dispatch, "kernel_devices", dispatch.kernel_devices)
    monkeypatch.delenv("CROSSLAYER_KERNELS", raising=False)


def kernels_are_on() -> bool:
    return dispatch.kernel_devices == ("cuda",)


def test_kernels_are_off_by_default(restore_kernels):
    crosslayer.use_kernels(None)
    assert not kernels_are_on()


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False)])
def test_environment_variable_sets_the_default(value, on, restore_kernels, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("CROSSLAYER_KERNELS", value)
    crosslayer.use_kernels(None)
    assert kernels_are_on() == on


def test_environment_variable_without_triton_is_ignored(restore_kernels, monkeypatch):
    monkeypatch.setenv("CROSSLAYER_KERNELS", "1")
    monkeypatch.setattr("crosslayer.kernel_switch.find_spec", lambda name: None)
    crosslayer.use_kernels(None)
    assert not kernels_are_on()


def test_a_machine_without_triton_is_an_error(restore_kernels, monkeypatch):
    monkeypatch.setattr("crosslayer.kernel_switch.find_spec", lambda name: None)
    message = r"^triton is not installed; pip install -e '\.\[kernels\]'$"
    with pytest.raises(ModuleNotFoundError, match=message) as error:
        crosslayer.use_kernels(True)
    assert error.value.name == "triton"


def test_a_build_for_amd_is_an_error(restore_kernels, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(RuntimeError, match="the kernels need an NVIDIA GPU"):
        crosslayer.use_kernels(True)
    assert not kernels_are_on()


def test_sharded_tensors_have_no_kernel(restore_kernels, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "kernel_devices", ("cpu",))
    with one_rank_mesh() as mesh:
        x = distribute_tensor(torch.randn(2, 3, 8), mesh, [Replicate()])
        assert dispatch.uses_kernel(x.to_local()) and not dispatch.uses_kernel(x)


def test_transformed_tensors_have_no_kernel(monkeypatch):
    monkeypatch.setattr(dispatch, "kernel_devices", ("cpu",))
    used = []

    def record(x):
        used.append(dispatch.uses_kernel(x))
        return x.sum()

    x = torch.randn(2, 3)
    record(x)
    torch.func.grad(record)(x)
    with forward_ad.dual_level():
        record(x)
    assert used == [True, False, False]


def test_kernels_without_triton_are_an_error(restore_kernels, monkeypatch):
    for name in list(sys.modules):
        if name.split(".")[0] == "triton" or name.startswith("crosslayer.kernels"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ModuleNotFoundError, match="triton"):
        crosslayer.use_kernels(True)
    assert not kernels_are_on()


def test_use_kernels_as_a_function_and_as_a_context_manager(restore_kernels):
    pytest.importorskip("triton")
    crosslayer.use_kernels(True)
    assert kernels_are_on()
    with crosslayer.use_kernels(False):
        assert not kernels_are_on()
        with crosslayer.use_kernels(True):
            assert kernels_are_on()
        assert not kernels_are_on()
    assert kernels_are_on()
    with pytest.raises(ZeroDivisionError), crosslayer.use_kernels(False):
        raise ZeroDivisionError
    assert kernels_are_on()
    off = crosslayer.use_kernels(False)
    assert not kernels_are_on()
    for _ in range(2):
        crosslayer.use_kernels(True)
        with off, off:
            assert not kernels_are_on()
        assert kernels_are_on()
    off = crosslayer.use_kernels(False)
    crosslayer.use_kernels(False)
    with off:
        pass
    assert kernels_are_on(), "as when `off` was made"
    with crosslayer.use_kernels(False):
        on = crosslayer.use_kernels(True)
    with on:
        assert kernels_are_on()
    assert not kernels_are_on()


def test_importing_the_kernels_registers_one_for_every_op():
    pytest.importorskip("triton")
    import crosslayer.kernels

    ops = crosslayer.ops
    with_reference = {name for name in ops.__all__ if hasattr(getattr(ops, name), "__wrapped__")}
    assert dispatch.registered_kernels.keys() == with_reference


def test_a_kernel_runs_only_on_its_devices_and_dtypes(restore_kernels, monkeypatch):
    """With kernels on, a CPU tensor still runs the reference."""
    pytest.importorskip("triton")
    h, y = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    crosslayer.use_kernels(True)
    assert torch.equal(add_norm(h, y)[0], h + y)
    monkeypatch.setattr(dispatch, "kernel_devices", ("cpu",))
    monkeypatch.setattr(dispatch, "registered_kernels", {})
    dispatch.register_kernel("add_norm", lambda h, y: (h, h))
    assert torch.equal(add_norm(h, y)[0], h)
    assert torch.equal(add_norm(h.double(), y)[0], h.double() + y)  # no kernel for float64
    dispatch.register_kernel("add_norm", lambda h, y: (h, h), supports=lambda h, y: False)
    assert torch.equal(add_norm(h, y)[0], h + y)


@pytest.mark.slow
def test_a_connection_compiles_to_one_graph_with_kernels_off(restore_kernels):
    sites = chain.row("hyper(streams=2)", layers=1)
    x = chain.randn(2, 3, chain.D)
    expected = chain.run(sites, x)
    with crosslayer.use_kernels(False):
        compiled = torch.compile(chain.run, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(sites, x), expected)
