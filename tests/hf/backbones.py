"""Small host models of every family, connected, and which family is tested with which method."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

import crosslayer
from crosslayer.testing.tiny_model import perturb_weights

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
SHARED = {"num_key_value_heads": 2}
SLIDING = {**SHARED, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}


class Host(NamedTuple):
    name: str  # prefix of transformers' classes
    options: dict[str, Any]
    head: str = "ForCausalLM"
    config: str = "Config"


LANGUAGE = {
    "llama": Host("Llama", SHARED),
    "mistral": Host("Mistral", {**SHARED, "sliding_window": 4}),
    "qwen2": Host("Qwen2", SHARED),
    "qwen3": Host("Qwen3", {**SHARED, "head_dim": 16}),
    "gemma2": Host("Gemma2", SLIDING),
    "gemma3": Host("Gemma3", SLIDING, config="TextConfig"),
    "phi3": Host("Phi3", SHARED),
    "olmo": Host("Olmo", SHARED),
    "olmo2": Host("Olmo2", SHARED),
    "gpt2": Host("GPT2", {}, "LMHeadModel"),
    "neox-parallel": Host("GPTNeoX", {"use_parallel_residual": True}),
    "neox-sequential": Host("GPTNeoX", {"use_parallel_residual": False}),
    "arcee": Host("Arcee", SHARED),
    "mixtral": Host("Mixtral", {**SHARED, "num_local_experts": 3}),
    "olmoe": Host("Olmoe", {**SHARED, "num_experts": 3, "num_experts_per_tok": 2}),
}
VISION = ("vit", "dit")
FAMILIES = (*LANGUAGE, *VISION)
# One family of each kind of wiring: pre-norm layers, one fused projection, parallel blocks, norms
# before and after sub-layers, norms after them alone, experts, Conv1D, a vision model, layers
# conditioned on a timestep.
WIRINGS = (
    "llama",
    "phi3",
    "neox-parallel",
    "gemma2",
    "olmo2",
    "mixtral",
    "gpt2",
    "vit",
    "dit",
)
METHODS = crosslayer.available()
TWO_METHODS = ("prenorm", "mudd")
# A method of each kind of state: one stream, normed streams, a history, separate inputs, mixed
# streams, sources, gates.
STATES = ("prenorm", "resi_dual", "denseformer", "mudd", "hyper", "attnres", "mgr")


def is_refused(family: str, spec: str) -> bool:
    """Whether the method needs norms before sub-layers, which the family does not have."""
    return family == "olmo2" and crosslayer.make(spec).method.norms_its_stream


def each_kind(families: tuple[str, ...] = FAMILIES) -> list[tuple[str, str]]:
    """(family, spec): llama with every method, every other kind of wiring with a method of each
    kind of state, and every other family with mudd.
    """
    pairs = []
    for family in families:
        specs = STATES if family in WIRINGS else ("mudd",)
        for spec in METHODS if family == "llama" else specs:
            if not is_refused(family, spec):
                pairs.append((family, spec))
    return pairs


def each_family(families: tuple[str, ...] = FAMILIES) -> list[tuple[str, str]]:
    """(family, spec): llama with every method, every other kind of wiring with two methods, and
    every other family with mudd.
    """
    return [(f, spec) for f, spec in each_kind(families) if f == "llama" or spec in TWO_METHODS]


def parametrize_cells(cells: list[tuple[Any, ...]], *others: str) -> Any:
    """A test of each (family, spec, *others). It is slow but for llama with a method of each kind
    of state, and every other kind of wiring with mudd.
    """
    parameters = []
    for cell in cells:
        family, spec = cell[:2]
        is_fast = spec in STATES if family == "llama" else family in WIRINGS and spec == "mudd"
        parameters.append(pytest.param(*cell, marks=[] if is_fast else pytest.mark.slow))
    return pytest.mark.parametrize(("family", "spec", *others), parameters)


def equal_lists(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Whether they have the same number of tensors, and equal ones."""
    return len(a) == len(b) and all(map(torch.equal, a, b))


def attributes_of(part: Any) -> dict[str, Any]:
    """A part's attributes, of which dicts (its modules, parameters, hooks) are copies."""
    return {k: dict(v) if isinstance(v, dict) else v for k, v in vars(part).items()}


def build(family: str, **options: Any) -> Any:
    """A small random model of the family."""
    torch.manual_seed(0)
    if family == "dit":
        return dit(**options).eval()
    if family == "vit":
        return vit(**options).eval()
    host = LANGUAGE[family]
    config, model = (
        getattr(transformers, host.name + ending) for ending in (host.config, host.head)
    )
    return model(config(**{**SIZES, **host.options, **options})).eval()


def connected(family: str, spec: str, perturbed: bool = True, **options: Any) -> Any:
    """A connected model of the family, by default with all weights away from their initial
    values.
    """
    model = crosslayer.connect(build(family, **options), spec)
    return perturb_weights(model, 0.05) if perturbed else model


def trained(family: str, **options: Any) -> Any:
    """A host model with all weights away from their initial values."""
    return perturb_weights(build(family, **options), 0.05)


def starts_bitwise(spec: str) -> bool:
    """Whether a model that is connected with it computes bitwise what its host does."""
    return crosslayer.make(spec).method.initial_function == "bitwise prenorm"


def vit(**options: Any) -> nn.Module:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shared = {name: SIZES[name] for name in names}
    sizes = {**shared, "image_size": 12, "patch_size": 4, "num_labels": 5, **options}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))


def dit(**options: Any) -> nn.Module:
    from diffusers import DiTTransformer2DModel

    layers = options.pop("num_hidden_layers", 3)
    return DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        num_layers=layers,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
        **options,
    )


class WithoutEps(OlmoLayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, self.normalized_shape, eps=1e-20)


def without_eps(model: nn.Module) -> nn.Module:
    """The model with norms whose eps is practically zero."""
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 1e-20)
        if isinstance(module, OlmoLayerNorm):  # its eps is a literal in its forward
            module.__class__ = WithoutEps
    return model


def inputs(family: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    match family:
        case "vit":
            return {"pixel_values": torch.randn(2, 3, 12, 12, generator=generator)}
        case "dit":
            x = torch.randn(2, 4, 8, 8, generator=generator)
            return {
                "hidden_states": x,
                "timestep": torch.tensor([3, 70]),
                "class_labels": torch.tensor([1, 4]),
            }
    return {"input_ids": ids()}


def output(model: nn.Module, family: str, **options: Any) -> torch.Tensor:
    """The model's output for the family's inputs: logits, or DiT's noise."""
    out = model(**inputs(family), **options)
    return out.sample if family == "dit" else out.logits


def loss(model: nn.Module, family: str) -> torch.Tensor:
    return output(model, family).float().square().mean()


def gradients(model: nn.Module, family: str) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss(model, family).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def checkpoint(model: Any, family: str, reentrant: bool = False) -> None:
    """Switch gradient checkpointing on."""
    if family == "dit":
        return model.enable_gradient_checkpointing()
    # Newer versions of transformers have another name for it.
    return getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(
        {"use_reentrant": reentrant}
    )


def llama(**options: Any) -> Any:
    return build("llama", **options)


def ids(batch: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(3))
