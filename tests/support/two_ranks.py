"""What each of two processes does in the law on FSDP2; a module of its own, so that a spawned process can import it."""

import json
import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.tiny import ARMS, gpt, loss_and_gradients, tokens


def shard_and_train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # a pending write is a Linear's output, which is a view; nothing here writes into it
    warnings.filterwarnings("ignore", ".*returned a view tensor")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    mesh, ids, errors = init_device_mesh("cpu", (2,)), tokens(4), {}
    for arm in ARMS:
        for parallel in (False, True):
            model = gpt(arm, parallel)
            _, expected = loss_and_gradients(model, ids)
            model.checkpointing = True
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            _, sharded = loss_and_gradients(model, ids[2 * rank : 2 * rank + 2])
            missing = expected.keys() ^ sharded.keys()
            errors[f"{arm}-{parallel}"] = (
                float("inf")
                if missing
                else max(
                    (sharded[n].full_tensor() - g).abs().max().item() for n, g in expected.items()
                )
            )
    if rank == 0:
        with open(f"{folder}/errors.json", "w") as file:
            json.dump(errors, file)
    dist.barrier()  # neither leaves while the other still talks to it
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the interpreter, and abort what is done
