"""Errors of a kernel's outputs and gradients, compared with the errors of its torch reference."""

import torch
from torch import Tensor

from benchmarks.cases import Case, kernel_ops
from crosslayer import ops


def outputs_and_gradients(
    op: object, case: Case, rows: list[Tensor], weights: list[Tensor], seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """An op's outputs and the gradients of all its inputs, for seeded gradients of the outputs."""
    leaves = [t.clone().requires_grad_() for t in (*rows, *weights)]
    outs = case.run(op, leaves[: len(rows)], leaves[len(rows) :])
    generator = torch.Generator(outs[0].device).manual_seed(seed)
    douts = []
    for out in outs:
        dout = torch.randn(out.shape, dtype=torch.float64, device=out.device, generator=generator)
        douts.append(dout.to(out.dtype).bfloat16().to(out.dtype))
    return list(outs), list(torch.autograd.grad(outs, leaves, douts))


def assert_accurate(
    case: Case, N: int, D: int, dtype: torch.dtype, device: str, draws: int = 1
) -> None:
    """Assert that every error is at most twice the reference's own plus one unit in the last place.

    Errors are root mean squares over a tensor and over `draws`, because in a few numbers a
    reference can be exact by chance.
    """
    # Summed squares: of the kernel's error, of the reference's error, of one unit in the last
    # place.
    squares: dict[str, Tensor] = {}
    for _ in range(draws):
        rows, weights = ([t.to(device) for t in group] for group in case.make_tensors(N, D, dtype))
        rounded = [x.to(dtype) for x in rows], [w.float() for w in weights]
        exact = outputs_and_gradients(ops, case, rows, weights)
        reference = outputs_and_gradients(ops, case, *rounded)
        kernel = outputs_and_gradients(kernel_ops(), case, *rounded)
        for kind, exacts, references, kernels in zip(
            ("output", "gradient"), exact, reference, kernel, strict=True
        ):
            for i, (e, r, k) in enumerate(zip(exacts, references, kernels, strict=True)):
                name = f"{kind} {i}"
                assert k.shape == r.shape and k.dtype == r.dtype, name
                ulp = torch.finfo(k.dtype).eps * e
                new = torch.stack([x.double().square().sum() for x in (k - e, r - e, ulp)])
                squares[name] = squares.get(name, 0) + new
    for name, sums in squares.items():
        kernel_error, reference_error, ulp = sums.sqrt()
        ratio = (kernel_error / (2 * reference_error + ulp).clamp_min(1e-30)).item()
        assert ratio <= 1, f"{name}: error is {ratio:.2f} of what is allowed"
