"""Triton kernels: those of the ops in `ops/X.py` are in `kernels/X.py`. Importing registers them.

The torch references in `ops` are the definition. `ops.dispatch` calls a kernel where it is in use
and supports the arguments. Rules that hold for every kernel:

- Each op is an op of torch with a fake and a hand-written backward, so a compiled model has no
  graph break.
- All arithmetic is as exact as float32, in products on tensor cores too (`split_products`). Every
  address is 64-bit.
- No atomics: where a gradient is summed over tokens, each program writes its partial sum and torch
  adds the partial sums in a fixed order.
- Forward and backward move at most 1.15 of the bytes that they must, `Case.traffic` of benchmarks.
- A kernel asks for the rows of a token before it waits for a sum over one, and computes
  independent sums together (`row_sums`). Sources come in buckets (`sources`), and numbers of tokens
  are not specialised: the mixtures of MUDD at 24 layers compile ten kernels, not one for each site.
- The norm of an op's output is fused where a program has a whole row (`NormSpec`).

Shared by all: `library_op` (the ops of torch) and `launch` (block sizes, number of programs, the
launch). By several: `fused_norm` (a norm in a kernel), `row_sums` (sums over rows), `sources` (the
loads of sources and streams), `split_products` (float32 products on tensor cores) and `row_splits`
(rows that programs share). Nothing imports this package, or triton, before `use_kernels` does.
"""

from functools import partial

from ..ops.dispatch import register_kernel
from ..ops.sinkhorn import sums_stay_positive
from . import attention, gate, mix
from .attention import depth_attention
from .gate import gate_pool
from .hyper import fits_program, hyper_connection
from .mix import depth_mix
from .norm import add_norm
from .project import columns_fit_program, write_norm_project
from .single_pass import fits_program_and_dtype, single_pass_connection
from .sinkhorn import sinkhorn
from .sources import has_few_sources
from .streams import supports_streams_and_dtype, width_connection

register_kernel("add_norm", add_norm)
register_kernel(
    "depth_attention", depth_attention, supports=partial(has_few_sources, attention.MOST_SOURCES)
)
register_kernel("depth_mix", depth_mix, supports=partial(has_few_sources, mix.MOST_SOURCES))
register_kernel("gate_pool", gate_pool, supports=partial(has_few_sources, gate.MOST_STREAMS))
register_kernel("hyper_connection", hyper_connection, supports=fits_program)
register_kernel("single_pass_connection", single_pass_connection, supports=fits_program_and_dtype)
register_kernel("sinkhorn", sinkhorn, supports=sums_stay_positive)
register_kernel("width_connection", width_connection, supports=supports_streams_and_dtype)
register_kernel("write_norm_project", write_norm_project, supports=columns_fit_program)
