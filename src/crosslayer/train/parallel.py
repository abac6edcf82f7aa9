"""Where a run runs: the processes torchrun started, the way they share a model, and what is compiled or recomputed."""

import os
from collections.abc import Iterable
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from ..class_swap import swap_class
from ..connection import Connection, State, find_connections
from ..hf.connect import find_backbone
from ..recompute import enable_recompute
from .settings import Engine


def launch_fabric(engine: Engine, loggers: Any = ()) -> Fabric:
    """Fabric on this process, or on all that torchrun or `fabric run` started."""
    ranks, here = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if ranks == 1:
        strategy: Any = "auto"
    elif engine.strategy == "ddp":
        strategy = "ddp"
    else:
        policy = torch.bfloat16 if engine.precision == "bf16-mixed" else None
        strategy = ModelParallelStrategy(
            lambda model, mesh: shard_model(model, mesh["data_parallel"], policy), ranks, 1
        )
    # a body in half precision is built so, with its buffers as they are: Fabric would cast them too
    precision: Any = "32-true" if engine.precision == "bf16-true" else engine.precision
    fabric = Fabric(
        devices=here,
        num_nodes=ranks // here,
        strategy=strategy,
        precision=precision,
        loggers=list(loggers),
    )
    if "LT_CLI_USED" not in os.environ:  # `fabric run` has launched it
        fabric.launch()
    return fabric


def shutdown_distributed() -> None:
    """The ranks part, none while another still talks to it."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def shard_model(model: nn.Module, mesh: Any, half: torch.dtype | None) -> nn.Module:
    """FSDP2, layer by layer. A group of parameters has one dtype: what a layer's connections own is a float32 one."""
    body, family = find_backbone(model)
    narrow, wide = (
        MixedPrecisionPolicy(d, torch.float32, cast_forward_inputs=False) for d in (half, None)
    )

    def apart(connections: Iterable[Connection], policy: MixedPrecisionPolicy) -> None:
        norms = [norm for connection in connections for norm in connection.norms]
        for part, its_policy in ((norms, policy), (connections, wide)):
            group = [
                module for module in part if any(p is not None for p in module._parameters.values())
            ]
            if group:
                fully_shard(group, mesh=mesh, mp_policy=its_policy)

    for layer in getattr(body, family.layers):
        apart(layer.connections, narrow)
        fully_shard(layer, mesh=mesh, mp_policy=narrow)
    # embedding, final norm, readout and head are as wide as in one process, and so is the stream
    apart([getattr(body, family.final).connection], wide)
    fully_shard(model, mesh=mesh, mp_policy=wide)
    return model


def setup_model(fabric: Fabric, model: Any, engine: Engine) -> nn.Module:
    """The model as it is called: recomputed, compiled and shared as the options say. Its parameters are `model`'s."""
    return fabric.setup_module(prepare_model(model, engine))


def prepare_model(model: Any, engine: Engine) -> Any:
    """The model recomputed and compiled, in this process alone."""
    if engine.recompute == "reads":
        for connection in find_connections(model):
            swap_class(connection, Recomputed)
    elif engine.recompute == "layers":
        checkpoint_layers(model)
    elif engine.recompute != "none":
        enable_recompute(find_connections(model), engine.recompute)
    if engine.compile != "none":
        torch.compiler.reset()  # of the arm before, which counts against the number of graphs a function may have
        body, family = find_backbone(model)
        layers = getattr(body, family.layers)
        # a dense method's layers each have a graph of their own, as each is given another number of tensors
        torch._dynamo.config.recompile_limit = max(
            torch._dynamo.config.recompile_limit, 2 * len(layers)
        )
        for layer in layers if engine.compile == "layers" else ():
            layer.compile()
    return torch.compile(model) if engine.compile == "model" else model


def checkpoint_layers(model: Any) -> None:
    for name in (
        "activation_checkpointing_enable",
        "gradient_checkpointing_enable",
    ):  # transformers' new name and old
        if hasattr(model, name):
            return getattr(model, name)({"use_reentrant": False})
    model.enable_gradient_checkpointing()  # diffusers'


class Recomputed:
    """A connection whose read keeps its state alone for the backward pass, and mixes and norms once more there."""

    def forward(self, state: State) -> Any:
        return checkpoint(super().forward, state, use_reentrant=False, preserve_rng_state=False)  # type: ignore[misc]
