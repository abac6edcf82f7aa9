"""How Python reaches a kernel: operations of torch, and what is cached of a launch."""

import importlib
import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

triton = pytest.importorskip("triton")

from crosslayer.kernels import launch  # noqa: E402
from crosslayer.kernels.fused_norm import add_affine_partial_sums  # noqa: E402
from crosslayer.kernels.hyper import fits_program  # noqa: E402
from crosslayer.kernels.library_op import LibraryOp  # noqa: E402
from crosslayer.norms import NormSpec  # noqa: E402
from crosslayer.ops import dispatch  # noqa: E402
from crosslayer.testing.tiny_model import perturb_weights  # noqa: E402


@LibraryOp
def _test_scale_rows(
    rows: Sequence[Tensor], scale: Tensor | None, factor: float
) -> tuple[list[Tensor], Tensor]:
    """What the ops have among them: lists, None, numbers, several outputs."""
    scale = rows[0].new_ones(()) if scale is None else scale
    scaled = [factor * scale * x for x in rows]
    return scaled, torch.stack(scaled).sum(0)


@_test_scale_rows.register_fake
def _(rows):
    return [x.new_empty(x.shape) for x in rows], rows[0].new_empty(rows[0].shape)


def _save(ctx, inputs, output):
    rows, scale, ctx.factor = inputs
    ctx.save_for_backward(scale, *rows)


def _backward(ctx, dscaled, dsum):
    scale, *rows = ctx.saved_tensors
    dscaled = [ctx.factor * (d + dsum) for d in dscaled]
    if scale is None:
        return dscaled, None, None
    dscale = sum((d * x).sum() for d, x in zip(dscaled, rows, strict=True))
    return [scale * d for d in dscaled], dscale, None


_test_scale_rows.register_autograd(_backward, _save)
scale_rows = torch.ops.crosslayer.test_scale_rows


def rows_and_scale(requires_grad: bool) -> tuple[list[Tensor], Tensor]:
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in ((2, 3), (2, 3), ())]
    *rows, scale = [x.requires_grad_(requires_grad) for x in tensors]
    return rows, scale


def test_library_op_differentiates_lists():
    rows, scale = rows_and_scale(requires_grad=True)

    def call(*tensors):
        scaled, total = scale_rows(tensors[:2], tensors[2] if len(tensors) > 2 else None, 0.5)
        assert isinstance(scaled, list) and len(scaled) == 2
        return *scaled, total

    assert torch.autograd.gradcheck(call, (*rows, scale))
    assert torch.autograd.gradcheck(call, tuple(rows))
    torch.testing.assert_close(call(*rows)[2], 0.5 * (rows[0] + rows[1]))


def test_library_op_without_gradients():
    rows, scale = rows_and_scale(requires_grad=True)
    with torch.no_grad():
        scaled, total = scale_rows(rows, scale, 2.0)
    assert not total.requires_grad and not any(x.requires_grad for x in scaled)
    with torch.inference_mode():
        assert torch.equal(scale_rows(rows, scale, 2.0)[1], total)


@LibraryOp
def _test_repeat_rows(x: Tensor, factor: float, count: int = 2) -> Tensor:
    return torch.cat([factor * x] * count)


@_test_repeat_rows.register_fake
def _(count, x):
    return x.new_empty(count * len(x), x.shape[1])


def test_a_fake_gets_the_arguments_that_it_names():
    x = torch.empty(3, 4, device="meta")
    repeat_rows = torch.ops.crosslayer.test_repeat_rows
    assert repeat_rows(x, 0.5, 5).shape == (15, 4)
    assert repeat_rows(x, count=5, factor=0.5).shape == (15, 4)
    assert repeat_rows(x, 0.5).shape == repeat_rows(x, 0.5, 2).shape == (6, 4)
    with pytest.raises(AssertionError, match="no such arguments"):
        _test_repeat_rows.register_fake(lambda rows: rows)


@pytest.mark.slow
@pytest.mark.parametrize("requires_grad", [False, True])
def test_library_op_passes_torchs_checks(requires_grad):
    torch.library.opcheck(scale_rows.default, (*rows_and_scale(requires_grad), 0.5))


def test_library_op_is_one_node_of_a_compiled_graph():
    rows, scale = rows_and_scale(requires_grad=True)
    nodes = []

    def count_nodes(module, inputs):
        nodes.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return module

    def call(*rows):
        return scale_rows(rows, scale, 3.0)[1]

    compiled = torch.compile(call, fullgraph=True, backend=count_nodes)
    (gradient,) = torch.autograd.grad(compiled(*rows).sum(), scale)
    (expected,) = torch.autograd.grad(call(*rows).sum(), scale)
    assert torch.equal(gradient, expected)
    assert nodes.count(scale_rows) + nodes.count(scale_rows.default) == 1


def test_library_op_is_not_compiled_where_a_graph_breaks():
    """Its function launches a kernel, which a compiler must not look into."""
    compiled_frames = []

    def record(module, inputs):
        compiled_frames.append(module)
        return module

    rows, scale = rows_and_scale(requires_grad=True)
    frame = torch._dynamo.optimize(record)(lambda: call_op(rows, scale))

    @torch.compiler.disable(recursive=False)
    def call_op(rows, scale):
        return scale_rows(rows, scale, 3.0)

    frame()
    assert not compiled_frames


class FakeKernel:
    """Records the launches of a triton function, and what was compiled for them."""

    __name__ = "fake_kernel"

    def __init__(self):
        self.compiled_for = []
        self.launched = []

    def __getitem__(self, grid):
        def compile_and_launch(*args, num_warps, num_stages, enable_fp_fusion, **constants):
            self.compiled_for.append((args, constants, num_warps))  # maxnreg is in `constants`
            return FakeCompiled(self)

        return compile_and_launch


class FakeCompiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launched.append((grid, args))


def test_a_kernel_is_compiled_once_for_arguments_of_the_same_types():
    kernel = FakeKernel()
    x, y = torch.zeros(4, 16), torch.zeros(4, 16)
    for first, rows, eps in ((x, [x, None], 1e-6), (y, [x, None], 1e-5)):
        launch.launch_kernel(kernel, (4,), first, rows, 7, eps, n=2, num_warps=4)
    assert [args for args, _, _ in kernel.compiled_for] == [(x, (x, None), 7, 1e-6)]
    assert kernel.launched == [((4, 1, 1), (y.data_ptr(), (x.data_ptr(), None), 7, 1e-5, 2))]
    others = [
        ((x.bfloat16(), [x, None], 7, 1e-6), {"n": 2, "num_warps": 4}),
        ((x.view(-1)[1:], [x, None], 7, 1e-6), {"n": 2, "num_warps": 4}),
        ((x, [x], 7, 1e-6), {"n": 2, "num_warps": 4}),
        ((x, [x, x], 7, 1e-6), {"n": 2, "num_warps": 4}),
        ((x, [x, None], 16, 1e-6), {"n": 2, "num_warps": 4}),
        ((x, [x, None], 7, 1e-6), {"n": 3, "num_warps": 4}),
        ((x, [x, None], 7, 1e-6), {"n": 2, "num_warps": 8}),
        ((x, [x, None], 7, 1e-6), {"n": 2, "num_warps": 4, "max_registers": 128}),
    ]
    for args, options in others:
        launch.launch_kernel(kernel, (4,), *args, **options)
    assert len(kernel.compiled_for) == 1 + len(others) and len(kernel.launched) == 1
    launch.launch_kernel(kernel, (0,), x, [x, None], 7, 1e-6, n=2, num_warps=4)
    assert len(kernel.launched) == 1
    other = FakeKernel()
    launch.launch_kernel(other, (4,), x, [x, None], 7, 1e-6, n=2, num_warps=4)
    assert len(other.compiled_for) == 1 and len(kernel.launched) == 1


def test_tensors_on_several_devices_are_refused():
    kernel = FakeKernel()
    with pytest.raises(ValueError, match="fake_kernel: tensors on cpu and meta, expected one"):
        launch.launch_kernel(
            kernel, (4,), torch.zeros(4), [torch.zeros(4, device="meta")], num_warps=4
        )
    assert not kernel.compiled_for


def test_what_triton_compiles_apart_is_told_apart():
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    x = torch.zeros(64)
    values = [
        *(0, 1, 2, 15, 16, 17, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, 2**40),
        *(0.0, 1.0, None, x, x[1:], x[4:], x.bfloat16(), x.half(), x.long()),
        *((x, None), (None, x), (x, x), (x,), (), (x[1:], x)),
    ]

    def triton_type(value):
        return str(native_specialize_impl(CUDABackend, value, False, True, True))

    def our_type(value):
        _, types = launch._describe_arguments([value])
        return types

    for a, b in itertools.combinations(values, 2):
        if triton_type(a) != triton_type(b):
            assert our_type(a) != our_type(b), (a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_a_norm_have_the_dtype_of_its_parameters(dtype):
    """Their fakes promise it to a compiler, and autograd converts only what is not compiled."""
    affine = [torch.ones(7, dtype=dtype)] * 2
    gradients = add_affine_partial_sums([torch.ones(3, 7)] * 2, affine)
    assert [(g.dtype, g.shape) for g in gradients] == [(dtype, (7,))] * 2


@pytest.mark.parametrize(
    ("n", "D", "dtype", "fits"),
    [
        (4, 2048, torch.bfloat16, True),
        (4, 2049, torch.bfloat16, False),
        (4, 2048, torch.float32, False),
        (4, 1024, torch.float32, True),
        (5, 64, torch.bfloat16, False),
    ],
)
def test_streams_fit_a_program_of_hyper_connections(n, D, dtype, fits):
    H = torch.empty(1, 1, n, D, dtype=dtype, device="meta")
    assert fits_program(H, H[..., :1, :], H[..., 0], None) == fits


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(1, 1, *shape, dtype=dtype, device="meta")


NORM = NormSpec(torch.empty(0, device="meta"), None, 1e-6, centred=False)
ONE_WRITE = empty(2, 64), empty(1, 64), empty(2)  # H, Y, beta
SINGLE_PASS = empty(2, 64), empty(64), empty(2), None, empty(2)  # H, y, beta, res, pre


@pytest.mark.parametrize(
    ("op", "arguments", "supports"),
    [
        ("depth_mix", ((empty(8),) * 128, None), True),
        ("depth_mix", ((empty(8),) * 129, None), False),
        ("hyper_connection", (*ONE_WRITE, None, 1, NORM), True),
        ("hyper_connection", (*ONE_WRITE, None, 2, None), True),
        ("hyper_connection", (*ONE_WRITE, None, 2, NORM), False),
        ("hyper_connection", (empty(4, 64), None, None, None, 2), True),
        ("hyper_connection", (empty(4, 64), None, None, None, 3), False),
        ("hyper_connection", (*ONE_WRITE[:2], None, None), False),  # a write of weight 1
        ("hyper_connection", (ONE_WRITE[0], None, None, None), True),  # the first site
        ("single_pass_connection", (*SINGLE_PASS, torch.empty(128, 64), 1e-6, NORM), True),
        ("single_pass_connection", (*SINGLE_PASS, torch.empty(128, 65)), False),
        (
            "single_pass_connection",
            (empty(2, 64, dtype=torch.float16), *SINGLE_PASS[1:], torch.empty(128, 8), 1e-6, NORM),
            False,
        ),
        ("sinkhorn", (empty(4, 4, dtype=torch.float32), 20, 1e-6), True),
        ("sinkhorn", (empty(4, 4, dtype=torch.float32), 20, 0.0), False),
        ("sinkhorn", (empty(4, 4, dtype=torch.float32), 20, 1e-39), False),
        ("write_norm_project", (*ONE_WRITE, torch.empty(64, 128)), True),
        ("write_norm_project", (*ONE_WRITE, torch.empty(64, 129)), False),
        ("write_norm_project", (empty(4, 64), None, None, torch.empty(256, 128)), True),
        ("write_norm_project", (empty(16, 64), None, None, torch.empty(64, 32)), True),
        ("write_norm_project", (empty(16, 64), None, None, torch.empty(64, 33)), False),
        ("write_norm_project", (empty(17, 64), None, None, torch.empty(64, 19)), False),
        ("width_connection", (empty(16, 64), None, None), True),
        ("width_connection", (empty(17, 64), None, None), False),
        ("depth_attention", ((empty(8),) * 256, None), True),
        ("depth_attention", ((empty(8),) * 257, None), False),
        ("gate_pool", ((empty(8),) * 16, None), True),
        ("gate_pool", ((empty(8),) * 17, None), False),
        ("write_norm_project", (empty(5, 64), None, None, torch.empty(320, 65)), False),
    ],
)
def test_what_a_kernel_supports(op, arguments, supports):
    """Where it does not, the reference runs."""
    importlib.import_module("crosslayer.kernels")
    assert dispatch.registered_kernels[op].supports(*arguments) is supports


def test_weights_on_a_gpu_are_perturbed():
    """`suite.py` perturbs models there. A fake tensor knows its device, which need not exist."""
    with FakeTensorMode():
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.empty(3, device="cuda"))
        assert perturb_weights(model).weight.is_cuda
