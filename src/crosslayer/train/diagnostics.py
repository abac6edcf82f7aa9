"""Diagnostics of connections: scale of the stream, openness of gates, gain of each sub-layer.

They cost nothing but in the steps that measure them.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..connection import Connection, State, autocast_disabled, find_connections
from ..fsdp import sharded_modules, unsharded_modules
from ..hf.attach import find_backbone

_MAX_TOKENS = 256  # of the first example: enough for a mean


def connection_diagnostics(model: nn.Module, run: Callable[[], Any]) -> dict[str, float]:
    """Scalars by name and site k, from one forward pass.

    stream/k    root mean square of what the sub-layer of site k reads, before its norm
    gate/k      mean of the field that the method declares as its `gate_field`
    gain/k      how much a change of y_k, the output of sub-layer k (0: the embedding), changes what
                the output head reads, in a random direction and through the connections alone. 1
                for every k in pre-norm; that of y_0 is the composite gain.

    Args:
        model: connected.
        run: makes a forward pass of the model, whatever wraps it.
    """
    sites = find_connections(model)
    outputs: dict[int, Tensor] = {}

    def store_write(connection: Connection, arguments: tuple[State], _: Any) -> None:
        outputs[connection.site.index] = arguments[0].y

    def store_embedding(layer: Any, arguments: tuple[Tensor, ...]) -> None:
        norm = layer.wiring.embedding_norm
        outputs[0] = layer.get_submodule(norm)(arguments[0]) if norm else arguments[0]

    backbone, wiring = find_backbone(model)
    first_layer = wiring.find_layers(backbone)[0]
    with ExitStack() as hooks:
        for site in sites[1:]:
            hooks.enter_context(site.register_forward_hook(store_write))
        hooks.enter_context(first_layer.register_forward_pre_hook(store_embedding))
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            run()

    # a method that norms its stream may use norms of the host, so all of the model is needed
    needed = model if any(site.norms_its_stream for site in sites) else nn.ModuleList(sites)
    with unsharded_modules(sharded_modules(needed)):
        return _replay_connections(sites, [outputs[k][:1, :_MAX_TOKENS] for k in range(len(sites))])


def _replay_connections(sites: list[Connection], outputs: list[Tensor]) -> dict[str, float]:
    """The same pass without sub-layers: their outputs y_0 … y_S are given, so that gradients pass
    connections alone.
    """
    metrics: dict[str, float] = {}
    outputs = [y.clone().requires_grad_() for y in outputs]
    state = sites[0].init(outputs[0])
    with torch.enable_grad(), autocast_disabled(state):
        for k, site in enumerate(sites):
            (hidden, *_), mixed_state = site.mix_inputs(state)
            metrics[f"stream/{k}"] = hidden.detach().float().square().mean().sqrt().item()
            if site.is_readout:
                break
            # most methods' norms apply to the inputs alone and need not run
            state = site.read(state)[1] if site.norms_its_stream else mixed_state
            gate = getattr(state, site.gate_field, None)
            if gate is not None:
                metrics[f"gate/{k}"] = gate.detach().float().mean().item()
            state = site.write(state, outputs[k + 1])

        generator = torch.Generator(hidden.device).manual_seed(0)
        direction = torch.randn(hidden.shape, generator=generator, device=hidden.device)
        gradients = torch.autograd.grad(
            (hidden.float() * direction).sum(), outputs, allow_unused=True
        )
    for k, gradient in enumerate(gradients):
        if gradient is None:
            metrics[f"gain/{k}"] = 0.0
        else:
            metrics[f"gain/{k}"] = (gradient.float().norm() / direction.norm()).item()
    return metrics
