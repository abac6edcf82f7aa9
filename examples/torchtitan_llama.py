"""torchtitan's Llama 3 with another residual connection, for torchtitan's own trainer.

    torchrun --nproc-per-node 8 -m torchtitan.train --module examples.torchtitan_llama \
        --config debugmodel_mudd --hf_assets_path FOLDER_OF_A_TOKENIZER

It was tried with torchtitan 0.3 on CPUs: FSDP2 and HSDP over two ranks, mixed precision, activation
checkpointing, compiled layers, and a checkpoint that was resumed. Its pipelines, and its plans of
tensor and sequence parallelism, do not work with the state of a connection: see
docs/parallelism.md. Context parallelism was not tried.

For another size or connection, add a function like those at the end. To connect another model of
torchtitan, put its class in place of Llama3Model. Call `connect` nowhere else: torchtitan's models
have no values yet when they are built, and `init_states` below initialises the connections.
"""

import re
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.models.llama3 import Llama3Model, config_registry
from torchtitan.trainer import Trainer

import crosslayer
from crosslayer.compilation import reset_compiler
from crosslayer.hf import reset_connections


class ConnectedLlama3(Llama3Model):
    """Llama 3 whose residual connections are replaced when it is built."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        connection: str  # like "mudd(dilation=2)"

    def __init__(self, config: Any):
        super().__init__(config)
        crosslayer.connect(self, config.connection)
        # With checkpointing, and for dense connections, each layer is another graph.
        reset_compiler(graphs=2 * len(self.layers))

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Initialise torchtitan's modules, and then the connections, which are plain modules."""
        super().init_states(buffer_device=buffer_device)
        reset_connections(self)

    def verify_module_protocol(self) -> None:
        """torchtitan asks whether each module can initialise itself; connections do it above."""


def connect_config(config: Trainer.Config, connection: str) -> Trainer.Config:
    """The same training of the connected model.

    Args:
        config: of a training of Llama 3.
        connection: a spec, like "mudd(dilation=2)".
    """
    model = config.model_spec.model
    options = {field.name: getattr(model, field.name) for field in fields(model)}
    connected = ConnectedLlama3.Config(**options, connection=connection)
    # The adapter for checkpoints of transformers would leave the connections out.
    config.model_spec = replace(config.model_spec, model=connected, state_dict_adapter=None)
    # The default backend shards all modules by torchtitan's own rules, which connections lack.
    config.parallelism.spmd_backend = "partial_dtensor"
    # The class says which of a connection's parameters take weight decay. The others take none.
    decayed = "|".join(crosslayer.make(connection).method.weight_decay_params)
    pattern = rf"\.connections?\.(?!(.*\.)?({decayed})$)"
    with torch.device("meta"):
        names = [name for name, _ in connected.build().named_parameters()]
    if any(re.search(pattern, name) for name in names):  # torchtitan refuses an empty group
        others = config.optimizer.param_groups[-1]
        without_decay = ParamGroupConfig(
            pattern=pattern,
            optimizer_name=others.optimizer_name,
            optimizer_kwargs={**others.optimizer_kwargs, "weight_decay": 0.0},
        )
        config.optimizer.param_groups.insert(0, without_decay)
    return config


def debugmodel_mudd() -> Trainer.Config:
    return connect_config(config_registry.llama3_debugmodel(), "mudd")


def llama3_8b_hyper() -> Trainer.Config:
    return connect_config(config_registry.llama3_8b(), "hyper")
