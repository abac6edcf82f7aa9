"""Identities of the ops, and the switch between references and kernels."""

import sys

import pytest
import torch
from torch.distributed.tensor import Replicate, distribute_tensor

import crosslayer
from crosslayer.ops import (
    add_norm,
    depth_attention,
    depth_mix,
    dispatch,
    gate_pool,
    sinkhorn,
    width_connection,
    write_norm_project,
)
from crosslayer.ops.products import (
    mix_streams,
    project_back,
    project_manual_grad,
    row_dots,
    stream_gram,
)
from tests.support import chain
from tests.support.one_rank import one_rank_mesh


def test_sinkhorn_normalises_columns_and_differentiates_every_round():
    logits = torch.randn(3, 4, 4, dtype=torch.float64, requires_grad=True)
    M = sinkhorn(logits, 20)
    torch.testing.assert_close(M.sum(-2), torch.ones(3, 4, dtype=torch.float64), rtol=0, atol=2e-6)
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 3, 1e-2), (logits,))


def test_sinkhorn_without_eps_when_logits_spread_past_float32():
    """exp of the spread is 0 in float32, but not in float64."""
    logits = 200 * torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(0))
    cotangent = torch.randn(5, 4, 4)
    wide, exact = logits.requires_grad_(), logits.detach().double().requires_grad_()
    M = sinkhorn(wide, 3, 0.0)
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
    assert not kernels_are_on()


def test_importing_the_kernels_registers_one_for_every_op():
    pytest.importorskip("triton")
    import crosslayer.kernels

    ops = crosslayer.ops
    with_reference = {name for name in ops.__all__ if hasattr(getattr(ops, name), "reference")}
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
