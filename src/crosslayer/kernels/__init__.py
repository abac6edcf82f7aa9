"""Triton kernels: `kernels/X.py` stands in for `ops/X.py`, function by function, on a GPU.

The torch reference in `ops` is the definition; `ops.dispatch` calls what is here where a tensor is on CUDA. Each op
is a `torch.library` op with a fake and an autograd formula, so that a compiled model has no graph break, and declares
with `moves` the bytes its forward and its backward must move at the least. An op whose output a norm follows takes it
along (`Following`), where the whole of a row is in one program. All arithmetic is float32, every address
is 64-bit, and nothing is atomic: where a gradient is summed over tokens, each program keeps its part and torch adds
the parts in a fixed order. Nothing imports this package, or triton, until a kernel is asked for.
"""

from ..ops.dispatch import register_kernel
from . import attend, gate, merge, mix, norm, probe, sinkhorn, streams

for kernel in (
    attend.depth_attention, attend.attend_ahead, gate.gate_pool, merge.attend_merge, mix.depth_mix, norm.add_norm,
    probe.write_norm_project, sinkhorn.sinkhorn, streams.width_connection,
):  # fmt: skip
    register_kernel(kernel.__name__, kernel)

__all__ = ["attend", "gate", "merge", "mix", "norm", "probe", "sinkhorn", "streams"]
