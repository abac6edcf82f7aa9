"""The two processes of the tests of FSDP2 and tensor parallelism. A module of its own, so that it
can be spawned.
"""

import json
import os
import warnings

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import crosslayer
from crosslayer.connection import find_connections
from crosslayer.testing.tiny_model import perturb_weights
from crosslayer.testing.two_ranks import gloo_rank
from tests.hf.backbones import build, ids

SPECS = ("prenorm", "mudd", "hyper", "mhc", "attnres")
LOADS: tuple[tuple[str, str, torch.dtype, dict[str, int] | None], ...] = (
    ("tp", "phi3", torch.float32, {"tp_size": 2}),  # one projection of q, k and v
    ("ep", "mixtral", torch.float32, {"tp_size": 2, "ep_size": 2}),
    ("fsdp", "llama", torch.bfloat16, {"fsdp_size": 2}),
    ("hand", "llama", torch.bfloat16, None),
)


def train(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    with gloo_rank(rank, folder):
        mesh = init_device_mesh("cpu", (2,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        tokens = ids(4)
        errors = {}
        for spec in SPECS:
            # Connections sharded with their layers, in bf16, or on their own, in float32.
            for connections_apart in (False, True):
                model = perturb_weights(crosslayer.connect(build("llama"), spec), 0.05)
                expected = gradients(model, tokens)
                for layer in model.model.layers:
                    for connection in layer.connections if connections_apart else ():
                        if any(True for _ in connection.parameters()):
                            fully_shard(connection, mesh=mesh)
                    fully_shard(layer, mesh=mesh, mp_policy=policy)
                fully_shard(model, mesh=mesh, mp_policy=policy)
                sharded = gradients(model, tokens[2 * rank : 2 * rank + 2])
                errors[f"{spec}-{connections_apart}"] = relative_error(sharded, expected)
        if rank == 0:
            with open(f"{folder}/errors.json", "w") as file:
                json.dump(errors, file)


def load(rank: int, folder: str) -> None:
    """What transformers shards while it loads, and a hand-written `fully_shard`."""
    from transformers.distributed import DistributedConfig

    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    with gloo_rank(rank, folder):
        expected = torch.load(f"{folder}/expected.pt")
        errors = {}
        for name, family, dtype, config in LOADS:
            options = {} if config is None else {"distributed_config": DistributedConfig(**config)}
            model = crosslayer.from_pretrained(f"{folder}/{family}", dtype=dtype, **options)
            if name == "hand":
                shard_by_hand(model)
            out = model(ids(), output_hidden_states=True)
            out.logits.float().square().mean().backward()
            states = (out.logits, out.hidden_states[2])
            differences = [
                (s - e).norm() / e.norm() for s, e in zip(states, expected[family], strict=True)
            ]
            errors[name] = max(difference.item() for difference in differences)
        if rank == 0:
            with open(f"{folder}/errors.json", "w") as file:
                json.dump(errors, file)


def shard_by_hand(model: torch.nn.Module) -> None:
    """The recipe of docs/huggingface.md."""
    for connection in find_connections(model):
        for module in (*connection.norms, connection):
            if any(True for _ in module.parameters()):
                fully_shard(module)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)


def gradients(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(tokens).logits.float().square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def relative_error(sharded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    if sharded.keys() != expected.keys():
        return float("inf")
    differences = [(sharded[n].full_tensor() - g).square().sum() for n, g in expected.items()]
    norms = [g.square().sum() for g in expected.values()]
    return (sum(differences) / sum(norms)).sqrt().item()
