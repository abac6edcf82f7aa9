"""What kernels take of a host's norms to run them themselves is what these are."""

import pytest
import torch
from transformers.models.cohere.modeling_cohere import CohereLayerNorm

import crosslayer
from crosslayer.connection import find_connections
from crosslayer.fused_norms import norm_spec_of
from crosslayer.norms import apply_norm
from tests.hf.backbones import LANGUAGE, VISION, build

# norms of their own kinds, or none before a sub-layer
OTHERS = {"gemma2", "gemma3", "olmo", "olmo2", "dit"}


def test_a_norm_that_only_looks_known_is_not():
    model = build("llama")
    for layer in model.model.layers:
        layer.input_layernorm = CohereLayerNorm(model.config.hidden_size)
    model = crosslayer.connect(model, "prenorm")
    taken = [norm_spec_of(site.norms[0]) for site in find_connections(model)]
    assert not any(taken[0:-1:2]) and all(taken[1::2])


def test_a_hooked_norm_is_a_module():
    site = find_connections(crosslayer.connect(build("llama"), "prenorm"))[0]
    for norm in (site.norms[0], site.norms[0].lent()):
        for hook in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
            handle = getattr(norm, f"register_{hook}_hook")(lambda *_: None)
            assert norm_spec_of(site.norms[0]) is None
            handle.remove()
    assert norm_spec_of(site.norms[0])


@pytest.mark.parametrize("family", [*LANGUAGE, *VISION])
def test_a_known_norm_is_what_it_is_taken_for(family):
    torch.manual_seed(0)
    model = crosslayer.connect(build(family), "mudd" if family in LANGUAGE else "prenorm")
    known = 0
    for site in find_connections(model):
        for norm in site.norms:
            taken = norm_spec_of(norm)
            if taken is not None:
                torch.nn.init.normal_(taken.weight)
                x = torch.randn(2, 3, len(taken.weight))
                torch.testing.assert_close(apply_norm(x, taken), norm(x), rtol=1e-6, atol=1e-6)
                known += 1
    assert bool(known) == (family not in OTHERS)
