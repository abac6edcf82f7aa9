"""Connections alone: a chain of them around sub-layers that only copy.

A sub-layer is opaque to the compiler in both passes. A real one is opaque to the connections too,
and without this the compiler would fuse over depth. Norms are left out, because every method has
the same.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import crosslayer
from benchmarks.paired import time_with_prenorm
from benchmarks.peers import DEPTHS
from benchmarks.results import Row
from benchmarks.settings import BenchmarkSettings
from benchmarks.timing import PASSES, Calls, NotMeasured, forward_and_backward

COLUMNS = (
    *("connection", "layers", "tokens", "D", "dtype", "variant"),
    *("forward ms", "forward half IQR ms", "forward / PreNorm"),
    *("forward+backward ms", "forward+backward half IQR ms", "forward+backward / PreNorm"),
    "rounds",
)


@torch.library.custom_op("crosslayer::sublayer", mutates_args=())
def copy_sublayer(inputs: Sequence[Tensor]) -> Tensor:
    """A copy of the first input. The gradient of every input is a copy of the output's."""
    return inputs[0].clone()


@torch.library.custom_op("crosslayer::sublayer_backward", mutates_args=())
def copy_sublayer_backward(dy: Tensor, ports: int) -> list[Tensor]:
    return [dy.clone() for _ in range(ports)]


def _save_port_count(ctx: Any, inputs: tuple[Sequence[Tensor]], output: Tensor) -> None:
    ctx.ports = len(inputs[0])


copy_sublayer.register_fake(lambda inputs: torch.empty_like(inputs[0]))
copy_sublayer_backward.register_fake(lambda dy, ports: [torch.empty_like(dy)] * ports)
copy_sublayer.register_autograd(
    lambda ctx, dy: copy_sublayer_backward(dy, ctx.ports), setup_context=_save_port_count
)


class ConnectionChain(nn.Module):
    """All sites of a model, around sub-layers that copy: [B T D] -> [B T D].

    Args:
        spec: of the connections.
        dim: the width D.
        layers: each has two sub-layers.
        norm: makes the norm of an input, given the width.
    """

    def __init__(
        self, spec: str, dim: int, layers: int, norm: Callable[[int], nn.Module] = nn.Identity
    ):
        super().__init__()
        make_connection = crosslayer.make(spec)
        self.sites: Any = nn.ModuleList(
            make_connection(site, dim, lambda port: norm(dim)) for site in crosslayer.plan(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        state = self.sites[0].init(x)
        for site in self.sites[:-1]:
            inputs, state = site(state)
            state = site.write(state, copy_sublayer(inputs))
        return self.sites[-1].readout(state)


def measure(settings: BenchmarkSettings) -> Iterator[Row]:
    """The rows of the benchmark."""
    names = list(settings.specs)
    if "peers" in settings.variants:
        names += DEPTHS
    compiled_part = "reads" if settings.compile == "layers" else "row"
    for pair in time_with_prenorm(settings, build_calls, names, compiled_part):
        row: Row = pair.row | {"tokens": f"{settings.batch} x {settings.context}"}
        for call in PASSES:
            row[f"{call} ms"] = pair.timings.median_ms(call)
            row[f"{call} half IQR ms"] = pair.timings.half_iqr_ms(call)
            row[f"{call} / PreNorm"] = pair.timings.paired_ratio(pair.prenorm, call)
        yield row


def build_calls(name: str, D: int, settings: BenchmarkSettings, variant: str) -> Calls:
    """Args: name: a connection's spec, or a key of `DEPTHS`."""
    with torch.device(settings.torch_device):
        if name in DEPTHS:
            model = DEPTHS[name](D, 2 * settings.layers, copy_sublayer).to(settings.torch_dtype)
        else:
            model = ConnectionChain(name, D, settings.layers)
        shape = (settings.batch, settings.context, D)
        x = torch.randn(shape, dtype=settings.torch_dtype, requires_grad=True)
    if variant == "compiled" and settings.compile == "model":
        model.compile(fullgraph=True)
    elif variant == "compiled":
        if not hasattr(model, "sites"):
            raise NotMeasured(f"{name} has no reads that could be compiled one by one")
        for site in model.sites:
            site.compile(fullgraph=True)
    return forward_and_backward(lambda *_: (model(x),), [x, *model.parameters()])
