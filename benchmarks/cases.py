"""Ops with inputs to call them on, as the tests and benchmarks of kernels do.

case = width_connection_case(n=4)
rows, weights = case.make_tensors(N=1024, D=512, dtype=torch.float32)
outs = case.run(ops, rows, weights)
"""

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.results import Row
from benchmarks.settings import BenchmarkSettings
from crosslayer.norms import NormSpec
from crosslayer.ops.dispatch import registered_kernels
from crosslayer.ops.hyper import BoundName, CoefficientMap

# Of the norms. Normalising a single number gives its sign, up to eps; with a small eps its gradient
# would be lost in rounding.
EPS = 1e-1
OUTPUT_EPS = 2e-1  # of the norms of outputs: another, so that a kernel cannot confuse them
BATCH = 2  # tokens are laid out as [BATCH, N // BATCH], or as [1, N] where N is odd

Shapes = Callable[[int], list[tuple[int, ...]]]  # of tensors, given D
Traffic = Callable[[int, int, int], tuple[int, int]]  # given N, D, bytes an element


class Case(NamedTuple):
    """An op with fixed options, and the shapes of its inputs.

    Args:
        module: the name of the op's file in `crosslayer.kernels`.
        run: calls the op, given `crosslayer.ops` or `kernel_ops()`, rows, weights.
        row_shapes: shapes after [B T] of the tensors in the streams' dtype.
        weight_shapes: shapes of the float32 tensors; a leading 0 stands for B T.
        traffic: bytes that forward and backward must move, given N, D, bytes an element.
        scale_weights: turns weights drawn from N(0, 1) into weights that a model could have.
        widest: the largest D of bfloat16 rows that the kernel supports.
    """

    module: str
    run: Callable[[Any, list[Tensor], list[Tensor]], tuple[Tensor, ...]]
    row_shapes: Shapes
    weight_shapes: Shapes
    traffic: Traffic
    scale_weights: Callable[[list[Tensor]], list[Tensor]] = list
    widest: int = 1 << 30

    def make_tensors(
        self, N: int, D: int, dtype: torch.dtype, held: torch.dtype = torch.float64
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Random rows and weights, rounded to the dtypes that the op takes. Weights are float64.

        Args:
            N: the number of tokens.
            D: the width.
            dtype: what the rows are rounded to.
            held: the dtype that they have in memory.
        """
        lead = (BATCH, N // BATCH) if N % BATCH == 0 else (1, N)
        rows = [torch.randn(*lead, *shape, dtype=held) for shape in self.row_shapes(D)]
        weights = []
        for shape in self.weight_shapes(D):
            if shape[:1] == (0,):
                shape = (*lead, *shape[1:])
            weights.append(torch.randn(shape, dtype=torch.float64))
        weights = self.scale_weights(weights)
        return [x.to(dtype).to(held) for x in rows], [w.float().double() for w in weights]


def mix_case(L: int, C: int, static: bool, normed: int = 0, parameters: int = 0) -> Case:
    """`depth_mix`: C mixtures of L sources, and the norms of the first `normed` of them.

    With norms only the last mixture is an output, besides the norms. The sources passed on have
    gradients, as those of a later reader.

    Args:
        L: the number of sources.
        C: the number of mixtures.
        static: all tokens share the weights.
        normed: the number of norms.
        parameters: tensors of each norm, 1 (weight) or 2 (and bias).
    """

    def run(op: Any, X: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
        outputs = [(c, None) for c in range(C - plain, C)]
        for c in range(normed):
            outputs.append((c, _norm_spec(weights[1 + c * parameters :][:parameters])))
        outs, passed = op.depth_mix(tuple(X), weights[0], tuple(outputs))
        return *outs, *passed

    def traffic(N: int, D: int, size: int) -> tuple[int, int]:
        weight_bytes = 4 * C * L * (1 if static else N)
        forward = N * D * (L + plain + normed) * size + weight_bytes + 4 * D * normed * parameters
        backward = N * D * (3 * L + plain + normed) * size + 2 * weight_bytes
        return forward, backward + normed * _norm_backward_bytes(D, parameters)

    w = (C, L) if static else (0, C, L)
    plain = 1 if normed else C
    return Case(
        "mix",
        run,
        lambda D: [(D,)] * L,
        lambda D: [w, *[(D,)] * (normed * parameters)],
        traffic,
    )


def gate_case(n: int, scored: bool, parameters: int = 0) -> Case:
    """`gate_pool` of n streams, with the next gate's scores if `scored`, and a norm."""
    queries = 1 + scored

    def run(op: Any, rows: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
        beta, pool = weights[:2]
        score = weights[2] if scored else None
        norm = _norm_spec(weights[1 + queries :])
        gated, h, q = op.gate_pool(tuple(rows[:n]), rows[n], beta, pool, score, EPS, norm)
        return (*gated, h, q) if scored else (*gated, h)

    def traffic(N: int, D: int, size: int) -> tuple[int, int]:
        gate_bytes = 4 * N * n
        query_bytes = 4 * D * queries
        forward = N * D * (2 * n + 2) * size + gate_bytes * (1 + scored) + query_bytes
        forward += 4 * D * parameters
        backward = N * D * (3 * n + 3) * size + gate_bytes * (2 + scored) + 2 * query_bytes
        return forward, backward + _norm_backward_bytes(D, parameters)

    def scale_weights(weights: list[Tensor]) -> list[Tensor]:
        beta, *vectors = weights
        scaled = [_scale_query(q) for q in vectors[:queries]]
        return [beta.sigmoid(), *scaled, *vectors[queries:]]

    return Case(
        "gate",
        run,
        lambda D: [(D,)] * (n + 1),
        lambda D: [(0, n), *[(D,)] * (queries + parameters)],
        traffic,
        scale_weights,
    )


def attention_case(L: int, parameters: int = 0) -> Case:
    """`depth_attention` over L sources, which it passes on, and a norm of 0, 1 or 2 parameters."""

    def run(op: Any, X: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
        h, passed = op.depth_attention(tuple(X), weights[0], norm=_norm_spec(weights[1:]))
        return h, *passed

    def traffic(N: int, D: int, size: int) -> tuple[int, int]:
        from crosslayer.kernels.attention import gradient_launches, saves_output

        saved_bytes = 0
        if saves_output(L):
            saved_bytes = N * D * (size if parameters else 4)
        forward = N * D * (L + 1) * size + saved_bytes + 4 * D * (1 + parameters)
        launches = len(gradient_launches(L))
        backward = N * D * (3 * L + launches) * size + launches * saved_bytes + 8 * D
        return forward, backward + _norm_backward_bytes(D, parameters)

    return Case(
        "attention",
        run,
        lambda D: [(D,)] * L,
        lambda D: [(D,)] * (1 + parameters),
        traffic,
        lambda weights: [_scale_query(weights[0]), *weights[1:]],
    )


def width_connection_case(n: int, static: bool = False, parameters: int = 0) -> Case:
    """`width_connection` of n streams, and a norm of 0, 1 or 2 parameters."""
    lead = () if static else (0,)

    def run(op: Any, rows: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
        return op.width_connection(*rows, *weights[:2], _norm_spec(weights[2:]))

    def traffic(N: int, D: int, size: int) -> tuple[int, int]:
        coefficient_bytes = 4 * N * (n + n * n)
        forward = N * D * (2 * n + 1) * size + coefficient_bytes + 4 * D * parameters
        backward = N * D * (3 * n + 1) * size + 2 * coefficient_bytes
        return forward, backward + _norm_backward_bytes(D, parameters)

    return Case(
        "streams",
        run,
        lambda D: [(n, D)],
        lambda D: [(*lead, n), (*lead, n, n), *[(D,)] * parameters],
        traffic,
    )


def project_case(
    n: int,
    K: int,
    joint: bool = False,
    centred: bool = False,
    pending: int = 1,
    weighted: bool = True,
) -> Case:
    """`write_norm_project` of n streams to K columns.

    Args:
        n: the number of streams.
        K: the number of columns.
        joint: norm and project all streams of a token as one vector.
        centred: the norm subtracts the mean.
        pending: rows of the pending write: n, 1 for all streams, or 0 as at the first site.
        weighted: the write has weights, where one is pending.
    """
    has_weights = pending > 0 and weighted

    def run(op: Any, rows: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
        Y = rows[1] if pending else None
        beta = weights[0] if has_weights else None
        return op.write_norm_project(rows[0], Y, beta, weights[-1], EPS, centred)

    def traffic(N: int, D: int, size: int) -> tuple[int, int]:
        W_rows = D * (n if joint else 1)
        weight_bytes = _weight_operand_bytes(W_rows, K, size)
        weighted_rows = pending * has_weights  # without weights, dY of one stream is dH
        beta_bytes = 4 * N * n * has_weights
        projection_bytes = 4 * (N if joint else N * n) * (K + 1)
        forward = N * D * (2 * n + pending) * size + beta_bytes + projection_bytes + weight_bytes
        backward = N * D * (3 * n + 2 * weighted_rows) * size + 2 * beta_bytes + projection_bytes
        return forward, backward + weight_bytes + 4 * K * W_rows

    return Case(
        "project",
        run,
        lambda D: [(n, D), (pending, D)] if pending else [(n, D)],
        lambda D: [*[(0, n)] * has_weights, (n * D if joint else D, K)],
        traffic,
    )


def hyper_case(
    n: int,
    bound: BoundName = "tanh",
    centred: bool = True,
    pending: int = 1,
    inputs: int = 1,
    parameters: int = 0,
) -> Case:
    """`hyper_connection` of n streams, and a norm of 0, 1 or 2 parameters.

    Args:
        n: the number of streams.
        bound: of the dynamic part of coefficients.
        centred: the norm of the streams subtracts the mean.
        pending: rows of the pending write: n, 1 for all streams, or 0 as at the first site.
        inputs: the number of mixtures that are read.
        parameters: tensors of the norm of what is read.
    """
    K = n + inputs + 1

    def run(op: Any, rows: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
        W, bias, scale, static, *rest = weights
        coefficient_map = CoefficientMap(W, bias, scale, static, bound, EPS, centred)
        Y, beta = (rows[1], rest.pop(0)) if pending else (None, None)
        return op.hyper_connection(rows[0], Y, beta, coefficient_map, inputs, _norm_spec(rest))

    def traffic(N: int, D: int, size: int) -> tuple[int, int]:
        weight_bytes = 4 * D * K
        number_bytes = 4 * N * n  # of one float32 for each stream of each token
        has_beta = pending > 0
        forward = N * D * (2 * n + pending + inputs) * size + weight_bytes + 4 * D * parameters
        backward = N * D * (3 * n + 2 * pending + inputs) * size + 2 * weight_bytes
        forward += number_bytes * (K + 2 + has_beta)
        backward += number_bytes * (4 * K + 2 + 2 * has_beta) + _norm_backward_bytes(D, parameters)
        return forward, backward

    def scale_weights(weights: list[Tensor]) -> list[Tensor]:
        W, *others = weights
        return [W * len(W) ** -0.5, *others]

    return Case(
        "hyper",
        run,
        lambda D: [(n, D), (pending, D)] if pending else [(n, D)],
        lambda D: [(D, K), (K,), (K,), (n, K), *[(0, n)] * (pending > 0), *[(D,)] * parameters],
        traffic,
        scale_weights,
        widest=2048,
    )


def single_pass_case(n: int, K: int, mixes: bool = True, parameters: int = 0) -> Case:
    """`single_pass_connection` of n streams to K columns, and a norm of 0, 1 or 2 parameters.

    Args:
        n: the number of streams.
        K: the number of columns.
        mixes: the pending mixture of streams is a matrix; else the identity.
        parameters: tensors of the norm.
    """
    coefficients = [(0, n), (0, n), (0, n, n)][: 2 + mixes]

    def run(op: Any, rows: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
        W, beta, pre = weights[:3]
        res = weights[3] if mixes else None
        norm = _norm_spec(weights[3 + mixes :])
        return op.single_pass_connection(*rows, beta, res, pre, W, EPS, norm)

    def traffic(N: int, D: int, size: int) -> tuple[int, int]:  # without the norm
        weight_bytes = _weight_operand_bytes(n * D, K, size)
        coefficient_bytes = 4 * N * (2 * n + n * n * mixes)
        projection_bytes = 4 * N * (K + 1)
        forward = N * D * (2 * n + 2) * size + coefficient_bytes + projection_bytes + weight_bytes
        backward = N * D * (4 * n + 3) * size + 2 * coefficient_bytes + 2 * projection_bytes
        return forward, backward + weight_bytes + 4 * n * D * K

    return Case(
        "single_pass",
        run,
        lambda D: [(n, D), (D,)],
        lambda D: [(n * D, K), *coefficients, *[(D,)] * parameters],
        traffic,
    )


def sinkhorn_case(n: int, rounds: int) -> Case:
    return Case(
        "sinkhorn",
        lambda op, _, weights: (op.sinkhorn(weights[0], rounds),),
        lambda D: [],
        lambda D: [(0, n, n)],
        lambda N, D, size: (8 * N * n * n, 12 * N * n * n),
    )


def norm_case(parameters: int) -> Case:
    """`add_norm`: 1 parameter for RMSNorm, 2 for LayerNorm."""

    def traffic(N: int, D: int, size: int) -> tuple[int, int]:
        row_bytes = 4 * N * D * size
        return row_bytes + 4 * D * parameters, row_bytes + _norm_backward_bytes(D, parameters)

    return Case(
        "norm",
        lambda op, rows, weights: op.add_norm(*rows, _norm_spec(weights)),
        lambda D: [(D,)] * 2,
        lambda D: [(D,)] * parameters,
        traffic,
    )


def _norm_backward_bytes(D: int, parameters: int) -> int:
    """Bytes that a norm adds to a backward: its weight is read, the gradients of weight and bias
    are written.
    """
    return 4 * D * (1 + parameters) if parameters else 0


def _weight_operand_bytes(rows: int, K: int, size: int) -> int:
    """Bytes that the use of W [rows K] moves: W and, for streams of two bytes an element, twice
    the three bfloat16 parts whose sum it is (`kernels/split_products.py`).
    """
    part_bytes = 3 * 2 * rows * 8 * math.ceil(K / 8)
    return 4 * rows * K + (2 * part_bytes if size == 2 else 0)


def _scale_query(w: Tensor) -> Tensor:
    """So that its scores with normalised rows are about 1."""
    return w * w.shape[-1] ** -0.5


def _norm_spec(parameters: list[Tensor]) -> NormSpec | None:
    """An RMSNorm of [weight], a LayerNorm of [weight, bias], or None."""
    if not parameters:
        return None
    bias = parameters[1] if len(parameters) > 1 else None
    return NormSpec(parameters[0], bias, OUTPUT_EPS, centred=bias is not None)


# The number of sources or streams that models have: MUDD of 24 layers reads 2 to 25 sources, blocks
# of attention residuals read 4 to 12.
SOURCES = (4, 12, 25)
STREAMS = (2, 4, 8)


class Op(NamedTuple):
    """A row of the benchmark of ops."""

    case: Callable[[int], Case]  # given the number of streams or sources
    counts: tuple[int, ...] = ()  # what is measured; empty where the op has no such number


OPS = {
    "add_norm": Op(lambda n: norm_case(1)),
    "add_norm layer": Op(lambda n: norm_case(2)),
    "depth_mix": Op(lambda n: mix_case(n, 4, False), SOURCES),
    "depth_mix static": Op(lambda n: mix_case(n, 1, True), SOURCES),
    "depth_mix normed": Op(lambda n: mix_case(n, 4, False, 3, 1), SOURCES),
    "depth_mix static normed": Op(lambda n: mix_case(n, 1, True, 1, 1), SOURCES),
    "depth_attention": Op(attention_case, SOURCES),
    "depth_attention normed": Op(lambda n: attention_case(n, 1), SOURCES),
    "write_norm_project": Op(lambda n: project_case(n, n + 2, centred=True), STREAMS),
    # The generator of MUDD, of n sources.
    "write_norm_project one stream": Op(lambda n: project_case(1, 4 * n, weighted=False), SOURCES),
    "write_norm_project joint": Op(lambda n: project_case(n, n * n + 2 * n, joint=True), STREAMS),
    "width_connection": Op(width_connection_case, STREAMS),
    "width_connection normed": Op(lambda n: width_connection_case(n, parameters=1), STREAMS),
    "hyper_connection": Op(hyper_case, STREAMS),
    "hyper_connection normed": Op(lambda n: hyper_case(n, parameters=1), STREAMS),
    "single_pass_connection": Op(lambda n: single_pass_case(n, n * n + 2 * n), STREAMS),
    "gate_pool": Op(lambda n: gate_case(n, True), STREAMS),
    "gate_pool normed": Op(lambda n: gate_case(n, True, 1), STREAMS),
    "sinkhorn": Op(lambda n: sinkhorn_case(n, 20), STREAMS),
}


def each_shape(settings: BenchmarkSettings) -> Iterator[tuple[Case, int, Row]]:
    """The case, the width and the first columns of every shape that is measured."""
    for name in settings.ops or OPS:
        op = OPS[name]
        for D in settings.dims:
            for n in (settings.streams or op.counts) if op.counts else [1]:
                columns = {"op": name, "n": n if op.counts else "", "D": D, "dtype": settings.dtype}
                yield op.case(n), D, columns


def kernel_ops() -> SimpleNamespace:
    """The kernels, under the names of the ops.

    Calling one with arguments it does not support raises a ValueError.
    """
    import_module("crosslayer.kernels")
    return SimpleNamespace(**{name: _checked_kernel(name) for name in registered_kernels})


def _checked_kernel(name: str) -> Callable[..., Any]:
    kernel = registered_kernels[name]

    def run(*args: Any, **kwargs: Any) -> Any:
        if not kernel.supports(*args, **kwargs):
            raise ValueError(f"{name} has no kernel for these sizes; its reference would run")
        return kernel.run(*args, **kwargs)

    return run
