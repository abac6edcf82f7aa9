"""A kernel's outputs and gradients, held against float64 and against the torch reference in the same dtype."""

import torch
from torch import Tensor

from benchmarks.cases import kernels
from crosslayer import ops
from tests.kernels.cases import Case


def evaluate(
    op: object, case: Case, rows: list[Tensor], weights: list[Tensor], seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of an op and the gradients of all its tensors, given the same random gradients of the outputs."""
    leaves = [t.clone().requires_grad_() for t in (*rows, *weights)]
    outs = case.run(op, leaves[: len(rows)], leaves[len(rows) :])
    source = torch.Generator(outs[0].device).manual_seed(seed)
    douts = [
        torch.randn(o.shape, dtype=torch.float64, device=o.device, generator=source).to(o.dtype)
        for o in outs
    ]
    return list(outs), list(
        torch.autograd.grad(outs, leaves, [d.bfloat16().to(d.dtype) for d in douts])
    )


def hold(case: Case, N: int, D: int, dtype: torch.dtype, device: str, draws: int = 1) -> None:
    """Every error at most twice the reference's own, and one unit in the last place.

    Errors are root mean squares over a tensor and several draws: in a few numbers a reference can be exact by chance.
    """
    squares: dict[
        str, Tensor
    ] = {}  # summed: of the kernel's error, of the reference's, of the truth
    for _ in range(draws):
        rows, weights = ([t.to(device) for t in group] for group in case.make(N, D, dtype))
        given = [x.to(dtype) for x in rows], [w.float() for w in weights]
        truth, reference = evaluate(ops, case, rows, weights), evaluate(ops, case, *given)
        kernel = evaluate(kernels(), case, *given)
        for what, exact, expected, got in zip(
            ("output", "gradient"), truth, reference, kernel, strict=True
        ):
            for i, (e, r, k) in enumerate(zip(exact, expected, got, strict=True)):
                assert k.shape == r.shape and k.dtype == r.dtype, f"{what} {i}"
                ulp = torch.finfo(k.dtype).eps * e
                new = torch.stack([x.double().square().sum() for x in (k - e, r - e, ulp)])
                squares[f"{what} {i}"] = squares.get(f"{what} {i}", 0) + new
    for what, (kernels_own, references, ulp) in squares.items():
        ratio = (kernels_own.sqrt() / (2 * references.sqrt() + ulp.sqrt()).clamp_min(1e-30)).item()
        assert ratio <= 1, f"{what}: error is {ratio:.2f} of what is allowed"
