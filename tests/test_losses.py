"""The loss of a language model from given logits."""

from types import SimpleNamespace

import pytest
import torch

from crosslayer.losses import next_token_loss


def test_bfloat16_logits_have_their_loss_in_float32():
    logits = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = torch.arange(12).view(2, 6) % 11

    def model(input_ids, use_cache):
        return SimpleNamespace(logits=logits)

    log_probabilities = logits.double().log_softmax(-1)
    expected = -log_probabilities.gather(-1, tokens[:, 1:, None]).mean().item()
    assert next_token_loss(model, tokens).item() == pytest.approx(expected, rel=1e-5)
