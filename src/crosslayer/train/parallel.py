"""How a model runs: processes and sharding by Fabric, compilation, recomputation."""

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from ..class_swap import swap_class
from ..compilation import reset_compiler, run_backward_without_autocast
from ..connection import Connection, State, find_connections
from ..hf.attach import find_backbone
from ..recompute import enable_recompute
from .identity import PLACES_OF_DATA, first_difference
from .settings import EngineSettings

# what torchrun sets for each of its processes, besides WORLD_SIZE
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SECONDS_TO_PROBE = 5
_SECONDS_TO_REMARK = 20


def launch_fabric(engine: EngineSettings, loggers: Iterable[Any] = ()) -> Fabric:
    """Fabric on this process, or on all processes that torchrun or `fabric run` started.

    Args:
        engine: its strategy and precision.
        loggers: Fabric's loggers.
    """
    ranks, ranks_on_node = launched_ranks()
    if ranks == 1:
        strategy: Any = "auto"
    elif engine.strategy == "ddp":
        strategy = "ddp"
    else:
        compute_dtype = torch.bfloat16 if engine.precision == "bf16-mixed" else None
        strategy = ModelParallelStrategy(
            lambda model, mesh: _shard_model(model, mesh["data_parallel"], compute_dtype), ranks, 1
        )
    # bf16-true models are built in bfloat16; Fabric would also convert buffers and the connections'
    # parameters
    precision: Any = "32-true" if engine.precision == "bf16-true" else engine.precision
    fabric = Fabric(
        devices=ranks_on_node,
        num_nodes=ranks // ranks_on_node,
        strategy=strategy,
        precision=precision,
        loggers=list(loggers),
    )
    if "LT_CLI_USED" not in os.environ:  # set by `fabric run`, which launches by itself
        with _watch_launch(ranks):
            fabric.launch()
    return fabric


def launched_ranks() -> tuple[int, int]:
    """The number of ranks that torchrun started, and of those on this node.

    Raises:
        ValueError: the environment has a part of torchrun's variables, so that a rank would wait
            for others that nobody starts.
    """
    sizes = []
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        value = os.environ.get(name, "1")
        if not re.fullmatch("[1-9][0-9]{0,5}", value):
            raise ValueError(f"the variable {name} must be a number of processes, got {value!r}")
        sizes.append(int(value))
    missing = [name for name in _RANK_VARIABLES if name not in os.environ]
    if sizes[0] > 1 and missing:
        raise ValueError(
            f"WORLD_SIZE is {sizes[0]}, but the environment lacks {', '.join(missing)}: nobody "
            "starts the other processes; start all with torchrun, which sets these variables, or "
            "unset WORLD_SIZE"
        )
    if sizes[0] % sizes[1]:
        raise ValueError(
            f"WORLD_SIZE is {sizes[0]}, expected a multiple of LOCAL_WORLD_SIZE, {sizes[1]}; start "
            "all processes with torchrun, or unset both"
        )
    return sizes[0], sizes[1]


@contextmanager
def _watch_launch(ranks: int) -> Iterator[None]:
    """Say what is waited for, if the other ranks do not come soon.

    Where torchrun is killed meanwhile, nobody answers any more, and this process ends too.
    """
    if ranks == 1:
        yield
        return
    done = threading.Event()
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    thread = threading.Thread(target=_watch_store, args=(done, ranks, address), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def _watch_store(done: threading.Event, ranks: int, address: tuple[str, int]) -> None:
    host, port = address
    torchrun_answers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    seconds = 0
    while not done.wait(_SECONDS_TO_PROBE):
        seconds += _SECONDS_TO_PROBE
        if seconds == _SECONDS_TO_REMARK:
            print(
                f"crosslayer: waiting for {ranks} processes at {host}:{port}",
                file=sys.stderr,
                flush=True,
            )
        if torchrun_answers and not _is_port_open(address) and not done.is_set():
            print(
                f"crosslayer: torchrun has ended, nobody answers at {host}:{port}",
                file=sys.stderr,
                flush=True,
            )
            os.kill(os.getpid(), signal.SIGKILL)  # the main thread waits where no handler runs


def _is_port_open(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=_SECONDS_TO_PROBE).close()
    except ConnectionRefusedError:
        return False
    except OSError:  # slow or out of reach for the moment
        return True
    return True


def shutdown_distributed() -> None:
    """Wait for all ranks, then leave the process group."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _shard_model(model: nn.Module, mesh: Any, compute_dtype: torch.dtype | None) -> nn.Module:
    """Shard a connected model with FSDP2, layer by layer.

    All parameters of an FSDP group have one dtype, so the connections' float32 parameters are
    in separate groups.

    Args:
        model: connected.
        mesh: device mesh of the data-parallel ranks.
        compute_dtype: dtype in which the layers compute; None for that of their parameters.
    """
    backbone, wiring = find_backbone(model)
    layer_policy = MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False)
    full_policy = MixedPrecisionPolicy(None, torch.float32, cast_forward_inputs=False)

    def shard_connections(
        connections: Iterable[Connection], host_norms: Iterable[nn.Module] = ()
    ) -> None:
        # Norms read the stream, which has the dtype of the parameters.
        norms = [norm for connection in connections for norm in connection.norms]
        _shard_together([*host_norms, *norms], mesh, full_policy)
        _shard_together(connections, mesh, full_policy)

    for layer in wiring.find_layers(backbone):
        last_norm = layer.wiring.last_norm
        names = [name for name in layer.wiring.input_norms if name != last_norm]
        if layer.wiring.embedding_norm:
            names.append(layer.wiring.embedding_norm)
        shard_connections(layer.connections, [layer.get_submodule(name) for name in names])
        if last_norm:  # The next layer reads through this norm.
            fully_shard(layer.get_submodule(last_norm), mesh=mesh, mp_policy=full_policy)
        fully_shard(layer, mesh=mesh, mp_policy=layer_policy)
    # embedding, final norm, readout and head compute in the dtype of their parameters, like the
    # stream
    if wiring.final is not None:
        shard_connections([backbone.get_submodule(wiring.final).connection])
    fully_shard(model, mesh=mesh, mp_policy=full_policy)
    return model


def _shard_together(modules: Iterable[nn.Module], mesh: Any, policy: MixedPrecisionPolicy) -> None:
    """One FSDP group of those modules that have parameters outside their children."""
    group = []
    for module in modules:
        if any(p is not None for p in module._parameters.values()):
            group.append(module)
    if group:
        fully_shard(group, mesh=mesh, mp_policy=policy)


def apply_recomputation(model: Any, engine: EngineSettings) -> None:
    """Recompute in the backward pass what the settings name, in place.

    Raises:
        ValueError: the connection does not support it.
    """
    if engine.recompute == "reads":
        for connection in find_connections(model):
            swap_class(connection, _CheckpointedRead)
    elif engine.recompute == "layers":
        checkpoint_layers(model)
    elif engine.recompute != "none":
        enable_recompute(find_connections(model), engine.recompute)


def run_on_rank_zero(fabric: Fabric, action: Callable[[], None]) -> None:
    """Call `action` on rank 0. Its error is raised on every rank, so that none waits for it."""
    failure: Exception | None = None
    if fabric.is_global_zero:
        try:
            action()
        except Exception as error:
            failure = error
    can_be_sent = failure is None or isinstance(failure, OSError | ValueError)
    sent = fabric.broadcast(failure if can_be_sent else RuntimeError(repr(failure)))
    if failure is not None or sent is not None:
        raise failure or sent


def let_ddp_skip_parameters(fabric: Fabric, model: nn.Module, loss: Tensor) -> None:
    """Have DDP look in each step for parameters without a gradient, where this loss leaves some.

    Families have them: an indexer whose output selects and is not differentiated, parts for images.
    DDP would wait for their gradients; without such parameters looking for them is of no use. Call
    it before Fabric sets up the model.

    Args:
        fabric: launched.
        model: on Fabric's device, without gradients.
        loss: of the model on some batch, of this rank.
    """
    loss.backward()
    lacking = [p for p in model.parameters() if p.requires_grad and p.grad is None]
    model.zero_grad()
    on_ranks: Any = fabric.all_reduce(torch.tensor(float(len(lacking)), device=fabric.device))
    fabric.strategy._ddp_kwargs["find_unused_parameters"] = on_ranks.item() > 0


def gather_from_ranks(fabric: Fabric, value: Any) -> list[Any]:
    """The value of every rank, on every rank."""
    if fabric.world_size == 1:
        return [value]
    of_ranks: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(of_ranks, value)
    return of_ranks


def check_same_on_ranks(fabric: Fabric, identity: dict[str, Any]) -> None:
    """Raise a ValueError on every rank where one would train another run than rank 0.

    Args:
        fabric: launched.
        identity: of this rank's run.
    """
    of_ranks = gather_from_ranks(fabric, identity)
    for rank, other in enumerate(of_ranks):
        difference = first_difference(of_ranks[0], other, PLACES_OF_DATA)
        if difference:
            raise ValueError(
                f"rank {rank}: rank 0 has another run, {difference}; all ranks need the same data "
                "and options"
            )


def prepare_model(model: Any, engine: EngineSettings) -> Any:
    """`model` with recomputation and compilation, without Fabric."""
    apply_recomputation(model, engine)
    if engine.compile == "none":
        return model
    backbone, wiring = find_backbone(model)
    layers = wiring.find_layers(backbone)
    # Each layer of a dense method has another graph, as its state has another number of tensors.
    # Training and evaluation have one each, and one more as soon as a shape changes. A batch of
    # one example and `inference_mode` need further ones.
    reset_compiler(graphs=8 * len(layers))
    run_backward_without_autocast()
    if engine.compile == "model":
        return torch.compile(model)
    for layer in layers:
        layer.compile()
    return model


def checkpoint_layers(model: Any) -> None:
    """Recompute whole layers in the backward pass (gradient checkpointing)."""
    # transformers' current name and the one before
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if hasattr(model, name):
            getattr(model, name)({"use_reentrant": False})
            return
    model.enable_gradient_checkpointing()  # diffusers


class _CheckpointedRead:
    """Mixed into a connection's class: a call stores its state alone, and is recomputed in the
    backward pass.
    """

    def forward(self, state: State, *verb: str) -> Any:
        call = super().forward  # type: ignore[misc]
        return checkpoint(call, state, *verb, use_reentrant=False, preserve_rng_state=False)
