"""An op with its kernel, as tests and benchmarks call it: on what tensors, and the bytes it says it must move.

case = carries(4)
rows, weights = case.make(N=1024, D=512, dtype=torch.float32)
outs = case.run(references(), rows, weights)
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crosslayer import ops
from crosslayer.norms import NormSpec

# one number by itself, normed, is its sign but for eps: where that is small its gradient is lost in rounding
EPS = 1e-1
BATCH = 2  # tokens are laid out [BATCH, N // BATCH], or [1, N] where N is odd


class Case(NamedTuple):
    module: str  # of crosslayer.kernels
    run: Callable[
        [Any, list[Tensor], list[Tensor]], tuple[Tensor, ...]
    ]  # given the ops, the kernels' or torch's
    rows: Callable[[int], list[tuple[int, ...]]]  # D -> shapes after [B T], in the streams' dtype
    weights: Callable[
        [int], list[tuple[int, ...]]
    ]  # D -> shapes in float32; a leading 0 stands for B T
    moves: Callable[
        [Any, int, int, int], tuple[int, int]
    ]  # module, N, D, bytes an element -> forward, backward
    tame: Callable[[list[Tensor]], list[Tensor]] = list  # N(0, 1) -> weights as a model has them

    def make(self, N: int, D: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """Random tensors in float64, already rounded to the dtypes the kernel is given."""
        lead = (BATCH, N // BATCH) if N % BATCH == 0 else (1, N)
        rows = [torch.randn(*lead, *shape, dtype=torch.float64) for shape in self.rows(D)]
        shapes = [(*lead, *shape[1:]) if shape[:1] == (0,) else shape for shape in self.weights(D)]
        weights = self.tame([torch.randn(shape, dtype=torch.float64) for shape in shapes])
        return [x.to(dtype).double() for x in rows], [w.float().double() for w in weights]


def query(w: Tensor) -> Tensor:
    """Scores of about 1 with what is normed."""
    return w * w.shape[-1] ** -0.5


def mixes(L: int, C: int, static: bool, normed: int = 0, parameters: int = 0) -> Case:
    """And the norms of the first so many, of 1 or 2 parameters; of mixtures the last alone is read beside them then."""

    def run(op: Any, X: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
        each = [following(weights[1 + i * parameters :][:parameters]) for i in range(normed)]
        S = op.mix(tuple(X), weights[0], tuple((c, norm) for c, norm in enumerate(each) if norm))
        return S[C - 1 :] if normed else S

    return Case(
        "mix",
        run,
        lambda D: [(D,)] * L,
        lambda D: [(C, L) if static else (0, C, L), *[(D,)] * (normed * parameters)],
        lambda kernels, N, D, size: kernels.moves(
            N, D, L, C, size, static, normed, parameters, normed and 1 + normed
        ),
    )


def gates(n: int, scored: bool, parameters: int = 0) -> Case:
    """And, with 1 or 2 parameters, the norm that follows."""
    own = 2 + scored

    def run(op: Any, rows: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
        beta, pool, score = (*weights[:own], None)[:3]
        S, h, q = op.gate_pool(
            tuple(rows[:n]), rows[n], beta, pool, score, EPS, following(weights[own:])
        )
        return *S, h, *([] if q is None else [q])

    return Case(
        "gate",
        run,
        lambda D: [(D,)] * (n + 1),
        lambda D: [(0, n), *[(D,)] * (1 + scored + parameters)],
        lambda kernels, N, D, size: kernels.moves(N, D, n, size, scored, parameters),
        lambda weights: [weights[0].sigmoid(), *map(query, weights[1:own]), *weights[own:]],
    )


def attends(L: int, S: int | None = None, parameters: int = 0) -> Case:
    """One query, and with 1 or 2 parameters the norm that follows; or S of them ahead."""

    def run(op: Any, X: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
        if S is not None:
            return op.attend_ahead(tuple(X), *weights)
        return (op.attend(tuple(X), weights[0], norm=following(weights[1:])),)

    return Case(
        "attend",
        run,
        lambda D: [(D,)] * L,
        lambda D: [(D,) if S is None else (S, D), *[(D,)] * parameters],
        lambda kernels, N, D, size: kernels.moves(N, D, L, S or 1, size, parameters),
        lambda weights: [query(weights[0]), *weights[1:]],
    )


def merges(parameters: int = 0) -> Case:
    """And, with 1 or 2 parameters, the norm that follows."""

    def run(op: Any, rows: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
        lse, q, *norm = weights
        return (op.attend_merge(rows[0], lse[..., 0], rows[1], q, norm=following(norm)),)

    return Case(
        "merge",
        run,
        lambda D: [(D,)] * 2,
        lambda D: [(0, 1), (D,), *[(D,)] * parameters],
        lambda kernels, N, D, size: kernels.moves(N, D, size, parameters),
        lambda weights: [weights[0], query(weights[1]), *weights[2:]],
    )


def carries(n: int, static: bool = False, parameters: int = 0) -> Case:
    """And, with 1 or 2 parameters, the norm that follows."""
    lead = () if static else (0,)
    return Case(
        "streams",
        lambda op, rows, weights: op.carry(*rows, *weights[:2], following(weights[2:])),
        lambda D: [(n, D)],
        lambda D: [(*lead, n), (*lead, n, n), *[(D,)] * parameters],
        lambda kernels, N, D, size: kernels.moves(N, D, n, size, parameters),
    )


def probes(n: int, K: int, joint: bool = False, centred: bool = False, pending: int = 1) -> Case:
    """With a write of so many rows pending: n, or one for all streams, or none as at the first site."""

    def run(op: Any, rows: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
        write: tuple[Any, Any] = (rows[1], weights[0]) if pending else (None, None)
        return op.probe(rows[0], *write, weights[-1], EPS, centred)

    return Case(
        "probe",
        run,
        lambda D: [(n, D), *[(pending, D)] * (pending > 0)],
        lambda D: [*[(0, n)] * (pending > 0), (n * D if joint else D, K)],
        lambda kernels, N, D, size: kernels.moves(N, D, n, K, joint, size, pending),
    )


def sinkhorns(n: int, rounds: int) -> Case:
    return Case(
        "sinkhorn",
        lambda op, _, logits: (op.sinkhorn(logits[0], rounds),),
        lambda D: [],
        lambda D: [(0, n, n)],
        lambda kernels, N, D, size: kernels.moves(N, n),
    )


def norms(parameters: int) -> Case:
    return Case(
        "norm",
        lambda op, rows, weights: op.add_norm(*rows, following(weights)),
        lambda D: [(D,)] * 2,
        lambda D: [(D,)] * parameters,
        lambda kernels, N, D, size: kernels.moves(N, D, size, parameters),
    )


def following(parameters: list[Tensor]) -> NormSpec | None:
    """The norm that follows: an RMSNorm's weight, a LayerNorm's weight and bias, or none."""
    if not parameters:
        return None
    bias = parameters[1] if len(parameters) > 1 else None
    return NormSpec(parameters[0], bias, EPS, centred=bias is not None)


class Op(NamedTuple):
    """What is measured of an op: a row of `OPS`."""

    case: Callable[[int], Case]  # given the number of streams or sources
    counts: bool = True  # whether there is such a number


OPS = {
    "add_norm": Op(lambda n: norms(1), counts=False),
    "add_layer_norm": Op(lambda n: norms(2), counts=False),
    "mix": Op(lambda n: mixes(n, 4, False)),
    "mix static": Op(lambda n: mixes(n, 1, True)),
    "mix normed": Op(lambda n: mixes(n, 4, False, 3, 1)),
    "mix static normed": Op(lambda n: mixes(n, 1, True, 1, 1)),
    "attend": Op(attends),
    "attend_ahead": Op(lambda n: attends(n, 4)),
    "attend_merge": Op(lambda n: merges(), counts=False),
    "probe": Op(lambda n: probes(n, n + 2, centred=True)),
    "probe jointly": Op(lambda n: probes(n, n * n + 2 * n, joint=True)),
    "carry": Op(carries),
    "gate_pool": Op(lambda n: gates(n, True)),
    "sinkhorn": Op(lambda n: sinkhorns(n, 20)),
}


def references() -> SimpleNamespace:
    """The ops as torch's own functions; what one calls inside goes where `dispatch.DEVICES` sends it."""
    return SimpleNamespace(
        **{
            name: getattr(getattr(ops, name), "reference", getattr(ops, name))
            for name in ops.__all__
        }
    )


def kernels() -> SimpleNamespace:
    """All kernels' functions, under the names `ops` has them."""
    from crosslayer import kernels

    modules = [getattr(kernels, name) for name in kernels.__all__]
    return SimpleNamespace(
        **{name: getattr(m, name) for m in modules for name in ops.__all__ if hasattr(m, name)}
    )
