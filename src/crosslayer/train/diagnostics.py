"""What the connections of a model do on a batch: how large what they hand on is, how far their gates are open, and how
much of each sub-layer's output arrives at the head.

Nothing is measured, and nothing costs anything, but in the steps that ask for it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..connection import Connection, State, autocast_disabled, find_connections
from ..hf.connect import find_backbone

TOKENS = 256  # of the first example: enough for a mean


def connection_diagnostics(model: nn.Module, run: Callable[[], Any]) -> dict[str, float]:
    """Scalars by name and site, from one forward pass that `run` makes.

    stream  root mean square of what the site's sub-layer reads, before its norm
    gate    mean of what weighs the pending write, where a method has it
    gain    how much a change of y_k, the output of sub-layer k (0: the embedding), moves what the head reads, through
            the connections alone, in a random direction: 1 everywhere in PreNorm. That of y_0 is the composite gain.
    """
    sites, outputs = find_connections(model), {}
    body, family = find_backbone(model)

    def keep(connection: Connection, arguments: tuple[State], _: Any) -> None:
        outputs[connection.site.index] = arguments[0].y

    def begin(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        outputs[0] = arguments[0]  # the embedding

    hooks = [site.register_forward_hook(keep) for site in sites[1:]]
    hooks.append(getattr(body, family.layers)[0].register_forward_pre_hook(begin))
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    with whole(model if any(site.norms_its_stream for site in sites) else nn.ModuleList(sites)):
        return replayed(sites, [outputs[k][:1, :TOKENS] for k in range(len(sites))])


@contextmanager
def whole(modules: nn.Module) -> Iterator[None]:
    """What FSDP has sharded is there as a whole."""
    sharded = [module for module in modules.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
    yield
    for module in sharded:
        module.reshard()


def replayed(sites: list[Connection], outputs: list[Tensor]) -> dict[str, float]:
    """The same pass once more without the sub-layers, whose outputs y_0 .. y_S are held."""
    found: dict[str, float] = {}
    outputs = [y.clone().requires_grad_() for y in outputs]
    state = sites[0].init(outputs[0])
    with torch.enable_grad(), autocast_disabled(state):
        for k, site in enumerate(sites):
            (hidden, *_), after = site.mix_inputs(state)
            found[f"stream/{k}"] = hidden.detach().float().square().mean().sqrt().item()
            if site.is_readout:
                break
            state = (
                site.read(state)[1] if site.norms_its_stream else after
            )  # the norms of the others touch inputs alone
            for weight in (getattr(state, name) for name in site.gate_fields):
                if weight is not None:
                    found[f"gate/{k}"] = weight.detach().float().mean().item()
            state = site.write(state, outputs[k + 1])
        generator = torch.Generator(hidden.device).manual_seed(0)
        direction = torch.randn(hidden.shape, generator=generator, device=hidden.device)
        gradients = torch.autograd.grad(
            (hidden.float() * direction).sum(), outputs, allow_unused=True
        )
    for k, gradient in enumerate(gradients):
        found[f"gain/{k}"] = (
            0.0 if gradient is None else (gradient.float().norm() / direction.norm()).item()
        )
    return found
