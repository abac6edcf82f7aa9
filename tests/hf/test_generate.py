"""Every way of decoding gives the tokens that no cache gives."""

import pytest
import torch
from test_connect import compiled_cells, connected
from transformers import StaticCache

import crosslayer
from tests.hf.backbones import LANGUAGE, ids
from tests.support.tiny import shake

families = pytest.mark.parametrize("family", LANGUAGE)
methods = pytest.mark.parametrize("arm", crosslayer.available())
NEW = {"max_new_tokens": 6, "min_new_tokens": 6}


def talker(family: str, arm: str) -> torch.nn.Module:
    return shake(connected(family, arm), 0.2)


@families
@methods
def test_with_every_cache(family, arm):
    model = talker(family, arm)
    outs = {
        cache: model.generate(
            ids(),
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **NEW,
            **options,
        )
        for cache, options in {
            "none": {"use_cache": False},
            "dynamic": {"use_cache": True},
            "static": {"cache_implementation": "static", "disable_compile": True},
        }.items()
    }
    plain = outs["none"]
    for out in outs.values():
        assert torch.equal(out.sequences, plain.sequences)
        torch.testing.assert_close(
            torch.stack(out.logits), torch.stack(plain.logits), rtol=1e-4, atol=1e-4
        )


@families
@methods
def test_sampling_and_beams(family, arm):
    model = talker(family, arm)
    for how in ({"do_sample": True, "top_k": 20}, {"do_sample": False, "num_beams": 3}):
        found = []
        for cache in (True, False):
            torch.manual_seed(5)
            found.append(model.generate(ids(), use_cache=cache, **NEW, **how))
        assert torch.equal(*found), how


@families
@methods
def test_left_padding_changes_nothing(family, arm):
    model, prompt = talker(family, arm), ids(1, 6)
    other = ids(1, 9)
    padded = torch.cat([torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt], 1), other])
    out = model.generate(padded, attention_mask=(padded > 0).long(), do_sample=False, **NEW)
    for row, asked in zip(out, (prompt, other), strict=True):
        plain = model.generate(asked, attention_mask=torch.ones_like(asked), do_sample=False, **NEW)
        assert torch.equal(row[-plain.shape[1] :], plain[0])


@pytest.mark.parametrize(("family", "arm"), compiled_cells(LANGUAGE))
def test_a_compiled_step_is_compiled_once(family, arm):
    """Decoding with a static cache: no recompilation from token to token, and the same tokens."""
    model = talker(family, arm)
    expected = model.generate(ids(), do_sample=False, use_cache=False, **NEW)
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
            at = torch.full((2, 1), position)
            token = step(token, past_key_values=cache, position_ids=at).logits[:, -1:].argmax(-1)
            tokens.append(token)
    assert torch.equal(torch.cat(tokens, 1), expected)
    # a cache with a sliding window counts tokens in a Python int, so that the host's own step is compiled twice
    assert len(graphs) == (2 if "sliding_window" in LANGUAGE[family].options else 1)
