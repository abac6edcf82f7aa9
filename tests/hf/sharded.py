"""What each of two processes does in the test of FSDP2 with mixed precision; a module of its own to be spawned."""

import json
import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import crosslayer
from tests.hf.backbones import build, ids
from tests.support.tiny import shake


def train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    mesh, tokens, errors = init_device_mesh("cpu", (2,)), ids(4), {}
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for arm in crosslayer.available():
        for apart in (
            False,
            True,
        ):  # the connections sharded with their layers, in bf16, or apart, in float32
            model = shake(crosslayer.connect(build("llama"), arm), 0.05)
            expected = gradients(model, tokens)
            for layer in model.model.layers:
                for connection in layer.connections if apart else ():
                    if any(True for _ in connection.parameters()):
                        fully_shard(connection, mesh=mesh)
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            found = gradients(model, tokens[2 * rank : 2 * rank + 2])
            errors[f"{arm}-{apart}"] = float("inf")
            if found.keys() == expected.keys():
                apart_by = [
                    (found[n].full_tensor() - g).square().sum() for n, g in expected.items()
                ]
                whole = [g.square().sum() for g in expected.values()]
                errors[f"{arm}-{apart}"] = (sum(apart_by) / sum(whole)).sqrt().item()
    if rank == 0:
        with open(f"{folder}/errors.json", "w") as file:
            json.dump(errors, file)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the interpreter, and abort what is done


def gradients(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(tokens).logits.float().square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
