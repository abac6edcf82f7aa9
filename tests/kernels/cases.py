"""What each kernel is tried on: how the op is called, the shapes of its tensors, and the bytes it says it must move."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

BATCH = 2  # tokens are laid out [BATCH, N // BATCH], or [1, N] where N is odd


class Case(NamedTuple):
    module: str  # of crosslayer.kernels
    run: Callable[[Any, list[Tensor], list[Tensor]], tuple[Tensor, ...]]  # given the ops, the kernels' or torch's
    rows: Callable[[int], list[tuple[int, ...]]]  # D -> shapes after [B T], in the streams' dtype
    weights: Callable[[int], list[tuple[int, ...]]]  # D -> shapes in float32; a leading 0 stands for B T
    moves: Callable[[Any, int, int, int], tuple[int, int]]  # module, N, D, bytes an element -> forward, backward

    def make(self, N: int, D: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """Random tensors in float64, already rounded to the dtypes the kernel is given."""
        lead = (BATCH, N // BATCH) if N % BATCH == 0 else (1, N)
        rows = [torch.randn(*lead, *shape, dtype=torch.float64) for shape in self.rows(D)]
        shapes = [(*lead, *shape[1:]) if shape[:1] == (0,) else shape for shape in self.weights(D)]
        weights = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        return [x.to(dtype).double() for x in rows], [w.float().double() for w in weights]


def mixes(L: int, C: int, static: bool) -> Case:
    return Case(
        "mix",
        lambda op, X, w: op.mix(tuple(X), w[0]),
        lambda D: [(D,)] * L,
        lambda D: [(C, L) if static else (0, C, L)],
        lambda kernels, N, D, size: kernels.moves(N, D, L, C, size, static),
    )


def gates(n: int, scored: bool) -> Case:
    def run(op: Any, rows: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
        beta, *queries = weights
        S, h, q = op.gate_pool(tuple(rows[:n]), rows[n], beta.sigmoid(), *(w * w.numel() ** -0.5 for w in queries))
        return *S, h, *([] if q is None else [q])

    return Case(
        "gate",
        run,
        lambda D: [(D,)] * (n + 1),
        lambda D: [(0, n), *[(D,)] * (1 + scored)],
        lambda kernels, N, D, size: kernels.moves(N, D, n, size, scored),
    )


def attends(L: int, S: int | None = None) -> Case:
    """One query, or S of them ahead."""

    def run(op: Any, X: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
        Q = weights[0] * weights[0].shape[-1] ** -0.5
        return (op.attend(tuple(X), Q),) if S is None else op.attend_ahead(tuple(X), Q)

    return Case(
        "attend",
        run,
        lambda D: [(D,)] * L,
        lambda D: [(D,) if S is None else (S, D)],
        lambda kernels, N, D, size: kernels.moves(N, D, L, S or 1, size),
    )


def merges() -> Case:
    return Case(
        "merge",
        lambda op, rows, weights: (
            op.attend_merge(rows[0], weights[0][..., 0], rows[1], weights[1] * len(weights[1]) ** -0.5),
        ),
        lambda D: [(D,)] * 2,
        lambda D: [(0, 1), (D,)],
        lambda kernels, N, D, size: kernels.moves(N, D, size),
    )


def carries(n: int, static: bool = False) -> Case:
    lead = () if static else (0,)
    return Case(
        "streams",
        lambda op, rows, weights: op.carry(*rows, *weights),
        lambda D: [(n, D)],
        lambda D: [(*lead, n), (*lead, n, n)],
        lambda kernels, N, D, size: kernels.moves(N, D, n, size),
    )


def probes(n: int, K: int, joint: bool = False, centred: bool = False, spread: bool = False) -> Case:
    return Case(
        "probe",
        # one number by itself, normed, is its sign but for eps: its gradient is lost in rounding where eps is small
        lambda op, rows, weights: op.probe(*rows, *weights, 1e-2, centred),
        lambda D: [(n, D), (n if spread else 1, D)],
        lambda D: [(0, n), (n * D if joint else D, K)],
        lambda kernels, N, D, size: kernels.moves(N, D, n, K, joint, size, n if spread else 1),
    )


def probes_first(n: int, K: int) -> Case:
    """Nothing is pending at the first site."""
    return Case(
        "probe",
        lambda op, rows, weights: op.probe(rows[0], None, None, weights[0]),
        lambda D: [(n, D)],
        lambda D: [(n * D, K)],
        lambda kernels, N, D, size: kernels.moves(N, D, n, K, True, size, 0),
    )


def sinkhorns(n: int, rounds: int) -> Case:
    return Case(
        "sinkhorn",
        lambda op, _, logits: (op.sinkhorn(logits[0], rounds),),
        lambda D: [],
        lambda D: [(0, n, n)],
        lambda kernels, N, D, size: kernels.moves(N, n),
    )


def norms(centred: bool) -> Case:
    return Case(
        "norm",
        lambda op, rows, weights: (op.add_layer_norm if centred else op.add_norm)(*rows, *weights),
        lambda D: [(D,)] * 2,
        lambda D: [(D,)] * (1 + centred),
        lambda kernels, N, D, size: kernels.moves(N, D, size, centred),
    )


CASES = {
    "mix-1-of-1": mixes(1, 1, False),
    "mix-4-of-2": mixes(2, 4, False),
    "mix-4-of-5": mixes(5, 4, False),
    "mix-1-of-5-static": mixes(5, 1, True),
    "mix-4-of-2-static": mixes(2, 4, True),
    "gate-1": gates(1, True),
    "gate-3": gates(3, True),
    "gate-4-last": gates(4, False),
    "gate-8": gates(8, True),
    "attend-1": attends(1),
    "attend-2": attends(2),
    "attend-5": attends(5),
    "attend-5-ahead-3": attends(5, 3),
    "merge": merges(),
    "streams-2": carries(2),
    "streams-3-static": carries(3, static=True),
    "streams-4": carries(4),
    "streams-8": carries(8),
    "probe-2-each": probes(2, 4, centred=True),
    "probe-3-each": probes(3, 5),
    "probe-4-each-spread": probes(4, 6, spread=True),
    "probe-3-all": probes(3, 15, joint=True),
    "probe-4-all-centred": probes(4, 24, joint=True, centred=True),
    "probe-2-first": probes_first(2, 8),
    "probe-6-all": probes(6, 48, joint=True),
    "probe-16-each": probes(16, 18, centred=True),
    "sinkhorn-2": sinkhorns(2, 3),
    "sinkhorn-3": sinkhorns(3, 6),
    "sinkhorn-4": sinkhorns(4, 20),
    "sinkhorn-16": sinkhorns(16, 1),
    "norm-rms": norms(False),
    "norm-layer": norms(True),
}

# what a plain run leaves to the slow one: more sources, ways and streams of what it has tried
SLOW = {
    "mix-4-of-5",
    "mix-4-of-2-static",
    "gate-4-last",
    "gate-8",
    "attend-5-ahead-3",
    "streams-8",
    "sinkhorn-3",
    "probe-4-each-spread",
    "probe-4-all-centred",
}
