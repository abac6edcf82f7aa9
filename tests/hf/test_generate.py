"""Every way of decoding gives the tokens of decoding without a cache."""

import pytest
import torch
from transformers import StaticCache

from crosslayer.testing.tiny_model import perturb_weights
from tests.hf.backbones import (
    LANGUAGE,
    WIRINGS,
    connected,
    each_family,
    ids,
    parametrize_cells,
)
from tests.hf.test_connect import compiled_cells

NEW_TOKENS = {"max_new_tokens": 6, "min_new_tokens": 6}
CACHES = {
    "none": {"use_cache": False},
    "dynamic": {"use_cache": True},
    "static": {"cache_implementation": "static", "disable_compile": True},
}


def generator(family: str, spec: str) -> torch.nn.Module:
    return perturb_weights(connected(family, spec), 0.2)


@parametrize_cells(each_family(tuple(LANGUAGE)))
def test_with_every_cache(family, spec):
    model = generator(family, spec)
    outs = {}
    for cache, options in CACHES.items():
        outs[cache] = model.generate(
            ids(),
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **NEW_TOKENS,
            **options,
        )
    expected = torch.stack(outs["none"].logits)
    for out in outs.values():
        assert torch.equal(out.sequences, outs["none"].sequences)
        torch.testing.assert_close(torch.stack(out.logits), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize(
    "strategy",
    [{"do_sample": True, "top_k": 20}, {"do_sample": False, "num_beams": 3}],
    ids=["sampling", "beams"],
)
def test_sampling_and_beams(family, strategy):
    model = generator(family, "mudd")
    sequences = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        sequences.append(model.generate(ids(), use_cache=use_cache, **NEW_TOKENS, **strategy))
    assert torch.equal(*sequences)


@pytest.mark.parametrize("family", [family for family in LANGUAGE if family in WIRINGS])
def test_left_padding_changes_nothing(family):
    model = generator(family, "mudd")
    short, long = ids(1, 6), ids(1, 9)
    padding = torch.zeros(1, 3, dtype=torch.long)
    batch = torch.cat([torch.cat([padding, short], 1), long])
    mask = (batch > 0).long()
    out = model.generate(batch, attention_mask=mask, do_sample=False, **NEW_TOKENS)
    for row, prompt in zip(out, (short, long), strict=True):
        mask = torch.ones_like(prompt)
        alone = model.generate(prompt, attention_mask=mask, do_sample=False, **NEW_TOKENS)
        assert torch.equal(row[-alone.shape[1] :], alone[0])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "spec"), compiled_cells(tuple(LANGUAGE)))
def test_a_compiled_step_is_compiled_once(family, spec):
    """Decoding with a static cache: no recompilation from token to token, and the same tokens."""
    model = generator(family, spec)
    expected = model.generate(ids(), do_sample=False, use_cache=False, **NEW_TOKENS)
    cache = StaticCache(config=model.config, max_cache_len=16)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        prompt = ids()
        token = model(prompt, past_key_values=cache).logits[:, -1:].argmax(-1)
        tokens = [prompt, token]
        for position in range(prompt.shape[1], prompt.shape[1] + 5):
            positions = torch.full((2, 1), position)
            out = step(token, past_key_values=cache, position_ids=positions)
            token = out.logits[:, -1:].argmax(-1)
            tokens.append(token)
    assert torch.equal(torch.cat(tokens, 1), expected)
    # A cache with a sliding window counts tokens in a Python int: the host's own step is compiled
    # twice.
    assert len(graphs) == (2 if "sliding_window" in LANGUAGE[family].options else 1)
