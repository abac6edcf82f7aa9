"""Quantised hosts: a projection of q, k and v that is one module and has no plain weight."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.hf.backbones import connected, output


def torchao_int8(model: nn.Module) -> Callable[[nn.Module], torch.Tensor]:
    quantisation = pytest.importorskip("torchao.quantization")
    quantisation.quantize_(model, quantisation.Int8WeightOnlyConfig())
    return lambda module: module.weight.dequantize()


def quanto_int8(model: nn.Module) -> Callable[[nn.Module], torch.Tensor]:
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    return lambda module: module.qweight.dequantize()


@pytest.mark.slow  # The libraries take seconds to import.
@pytest.mark.filterwarnings("ignore")  # their own
@pytest.mark.parametrize("quantise", [torchao_int8, quanto_int8])
@pytest.mark.parametrize("family", ["phi3", "neox-parallel"])
@torch.no_grad()
def test_a_fused_projection(family, quantise):
    """Equal to a plain model that has the rounded weights."""
    rounded = connected(family, "mudd")
    names = [name for name, m in rounded.named_modules() if type(m).__name__ == "Linear"]
    model = connected(family, "mudd")
    dequantise = quantise(model)
    for name in names:
        rounded.get_submodule(name).weight.copy_(dequantise(model.get_submodule(name)))
    torch.testing.assert_close(output(model, family), output(rounded, family), rtol=0, atol=1e-3)
