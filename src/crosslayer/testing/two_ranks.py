"""What each of two processes does in the law on FSDP2; a module that spawned processes import."""

import json
import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from crosslayer.connection import find_connections
from crosslayer.testing.tiny_model import (
    TinyGPT,
    loss_and_gradients,
    tiny_gpt,
    token_ids,
    wrong_gradients,
)


@contextmanager
def gloo_rank(rank: int, folder: str) -> Iterator[None]:
    """One of two processes on CPUs that talk to each other. It ends where the block ends.

    Args:
        rank: 0 or 1.
        folder: of a file by which the two find each other.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    yield
    dist.barrier()  # neither process leaves while the other still talks to it
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the interpreter and abort


def shard_and_train(rank: int, folder: str, cases: list[tuple[str, bool]]) -> None:
    """Write what is wrong with each (spec, parallel) to `folder`/errors.json.

    The traceback of an exception ("" where there was none), the errors of wrong gradients by name,
    and the names of parameters with other initial values than those of a model that was never
    sharded.
    """
    warnings.simplefilter("error")
    # A pending write is a Linear's output, which is a view. Nothing here writes into it.
    warnings.filterwarnings("ignore", ".*returned a view tensor")
    with gloo_rank(rank, folder):
        mesh = init_device_mesh("cpu", (2,))
        errors = {}
        for spec, parallel in cases:
            found = {"exception": "", "gradients": {}, "reset parameters": []}
            try:
                model = tiny_gpt(spec, parallel)
                found["gradients"] = sharded_gradient_errors(model, mesh)
                unsharded = tiny_gpt(spec, parallel, perturbed=False)
                found["reset parameters"] = reset_sharded_parameters(model, unsharded)
            except Exception:  # of one method, while the others go on
                found["exception"] = traceback.format_exc()
            errors[f"{spec}-{parallel}"] = found
        if rank == 0:
            with open(f"{folder}/errors.json", "w") as file:
                json.dump(errors, file)


def sharded_gradient_errors(model: TinyGPT, mesh: DeviceMesh) -> dict[str, float]:
    """Shard a model; `wrong_gradients` of a batch that both processes share."""
    ids = token_ids(4)
    rank = mesh.get_rank()
    _, expected = loss_and_gradients(model, ids)
    model.checkpointing = True
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _, sharded = loss_and_gradients(model, ids[2 * rank : 2 * rank + 2])
    return wrong_gradients({n: g.full_tensor() for n, g in sharded.items()}, expected)


def reset_sharded_parameters(model: torch.nn.Module, expected: torch.nn.Module) -> list[str]:
    """Reset the connections' parameters; the names of those that are not as expected."""
    wrong = []
    for one, other in zip(find_connections(model), find_connections(expected), strict=True):
        one.reset_parameters()
        for name, parameter in one.named_parameters(recurse=False):
            whole = parameter.detach().full_tensor()
            if not torch.equal(whole, other._parameters[name]):
                wrong.append(f"{one.site.index}.{name}")
    return wrong
