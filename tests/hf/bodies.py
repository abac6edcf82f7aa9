"""Small host models of every family, as the tests connect them."""

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def llama(**options) -> PreTrainedModel:
    return build(LlamaForCausalLM, LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **options}))


def neox(parallel: bool, **options) -> PreTrainedModel:
    return build(GPTNeoXForCausalLM, GPTNeoXConfig(**{**SIZES, "use_parallel_residual": parallel, **options}))


def build(cls, config) -> PreTrainedModel:
    torch.manual_seed(0)
    return cls(config).eval()


HOSTS = {
    "llama": llama,
    "neox-parallel": lambda **options: neox(True, **options),
    "neox-sequential": lambda **options: neox(False, **options),
}
NORM_EPS = {"llama": "rms_norm_eps", "neox-parallel": "layer_norm_eps", "neox-sequential": "layer_norm_eps"}


def ids(batch: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(3))
