"""How many kernels a model's forward and backward pass compile, and how long triton takes.

triton compiles for a Hopper GPU and needs none. A kernel is compiled once for each bucket of
sources, and for any number of tokens.
"""

from collections.abc import Iterator
from unittest import mock

import torch
from torch import nn

from benchmarks.chain import ConnectionChain
from benchmarks.compilation import Launch, compile_binary, recorded_launches, without_cache
from benchmarks.results import Row
from benchmarks.settings import BenchmarkSettings
from crosslayer.ops import dispatch

COLUMNS = ("connection", "layers", "D", "dtype", "compiled kernels", "compile seconds")


def measure(settings: BenchmarkSettings) -> Iterator[Row]:
    """The rows of the benchmark. triton's cache is not read."""
    for spec in settings.specs:
        for D in settings.dims:
            chain = ConnectionChain(spec, D, settings.layers, norm=nn.RMSNorm)
            chain.to(settings.torch_dtype)
            shape = (settings.batch, settings.context, D)
            launches = model_launches(chain, [shape], settings.torch_dtype)[0]
            with without_cache():
                kernels = [compile_binary([launch]) for launch in launches]
            yield {
                "connection": spec,
                "layers": settings.layers,
                "D": D,
                "dtype": settings.dtype,
                "compiled kernels": len(kernels),
                "compile seconds": sum(kernel.seconds for kernel in kernels),
            }


def model_launches(
    chain: ConnectionChain, shapes: list[tuple[int, int, int]], dtype: torch.dtype
) -> list[list[Launch]]:
    """One launch of each binary that is needed so far, after each batch [batch, tokens, D]."""
    so_far = []
    with (
        recorded_launches() as launches,
        mock.patch.object(dispatch, "kernel_devices", ("cpu",)),
    ):
        for shape in shapes:
            x = torch.randn(shape, dtype=dtype, requires_grad=True)
            chain(x).sum().backward()
            so_far.append([same[0] for same in launches.values()])
    return so_far
