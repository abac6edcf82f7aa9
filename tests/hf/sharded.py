"""The two processes of the tests of FSDP, tensor parallelism and DeepSpeed. A module of its own, so
that it can be spawned.
"""

import copy
import functools
import json
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import crosslayer
from crosslayer.connection import find_connections
from crosslayer.hf import reset_connections
from crosslayer.hf.attach import is_connected
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
    """Write the errors of sharded gradients, and what `reset_connections` of such models misses."""
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
                after_reset = copy.deepcopy(model)
                reset_connections(after_reset)
                for layer in model.model.layers:
                    for connection in layer.connections if connections_apart else ():
                        if any(True for _ in connection.parameters()):
                            fully_shard(connection, mesh=mesh)
                    fully_shard(layer, mesh=mesh, mp_policy=policy)
                fully_shard(model, mesh=mesh, mp_policy=policy)
                sharded = gradients(model, tokens[2 * rank : 2 * rank + 2])
                case = f"{spec}-{connections_apart}"
                errors[case] = relative_error(sharded, expected)
                if own := of_connections(expected):  # a small part of all
                    errors[f"{case}, connections"] = relative_error(of_connections(sharded), own)
                reset_connections(model)
                for name, parameter in model.named_parameters():
                    expected_value = after_reset.get_parameter(name)
                    if not torch.equal(parameter.full_tensor(), expected_value):
                        errors[f"{spec}-{connections_apart}, reset {name}"] = float("inf")
        if rank == 0:
            with open(f"{folder}/errors.json", "w") as file:
                json.dump(errors, file)


def train_wrapped(rank: int, folder: str) -> None:
    """Write the losses of `FullyShardedDataParallel` in float32 and in mixed precision, each with
    those of one process.
    """
    warnings.simplefilter("ignore")
    policy = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    losses = {}
    with gloo_rank(rank, folder):
        for spec in SPECS:
            model = perturb_weights(crosslayer.connect(build("llama"), spec), 0.05).train()
            model.gradient_checkpointing_enable()
            pairs = []
            for mixed_precision in (None, policy):
                single, copied = copy.deepcopy(model), copy.deepcopy(model)
                expected = losses_of_steps(single, sgd(single), ids(4))
                optimizer = sgd(copied)
                wrapped = FullyShardedDataParallel(
                    copied,
                    auto_wrap_policy=functools.partial(
                        transformer_auto_wrap_policy,
                        transformer_layer_cls={type(copied.model.layers[0])},
                    ),
                    device_id=torch.device("cpu"),
                    use_orig_params=True,
                    mixed_precision=mixed_precision,
                )
                own_ids = ids(4)[2 * rank : 2 * rank + 2]
                pairs.append((losses_of_steps(wrapped, optimizer, own_ids), expected))
            losses[spec] = pairs
        write_losses(rank, folder, losses)


def train_with_deepspeed(rank: int, folder: str) -> None:
    """Write the losses of ZeRO stage 3, in float32 and in bfloat16, each with those of one process:
    of a model that is connected once it is partitioned, and of a saved one.
    """
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", DS_ACCELERATOR="cpu")
    losses = {}
    with gloo_rank(rank, folder):
        deepspeed.init_distributed("gloo")
        for dtype in (torch.float32, torch.bfloat16):
            config: dict[str, Any] = {
                "train_micro_batch_size_per_gpu": 2,
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": 1e9,
                "bf16": {"enabled": dtype == torch.bfloat16},
            }
            for name in ("plain", "mudd"):
                single = load_connected(f"{folder}/{name}")
                expected = losses_of_steps(single, sgd(single), ids(4))
                partitions = HfDeepSpeedConfig(config)  # while it lives, all models that are loaded
                model = load_connected(f"{folder}/{name}", dtype=dtype)
                engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
                own_ids = ids(4)[2 * rank : 2 * rank + 2]
                found = losses_of_steps(engine, engine, own_ids, engine.backward)
                losses[f"{name} {dtype}"] = (found, expected)
                del partitions
        write_losses(rank, folder, losses)


def load_connected(folder: str, **options: Any) -> Any:
    """A saved model, connected if it is plain."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, **options)
    torch.manual_seed(0)
    return model.train() if is_connected(model.model) else crosslayer.connect(model, "mudd").train()


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(crosslayer.param_groups(model, lr=0.5, weight_decay=0.1))


def losses_of_steps(
    model: Any,
    optimizer: Any,
    tokens: Tensor,
    backward: Callable[..., None] = Tensor.backward,
) -> list[float]:
    """The losses of three steps, each the mean over both processes."""
    losses = []
    for _ in range(3):
        loss = model(tokens, labels=tokens).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().float()
        dist.all_reduce(total)
        losses.append(total.item() / 2)
    return losses


def write_losses(rank: int, folder: str, losses: dict[str, Any]) -> None:
    if rank == 0:
        with open(f"{folder}/losses.json", "w") as file:
            json.dump(losses, file)


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


def of_connections(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: g for name, g in gradients.items() if ".connection" in name}


def relative_error(sharded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    if sharded.keys() != expected.keys():
        return float("inf")
    differences = [(sharded[n].full_tensor() - g).square().sum() for n, g in expected.items()]
    norms = [g.square().sum() for g in expected.values()]
    return (sum(differences) / sum(norms)).sqrt().item()
