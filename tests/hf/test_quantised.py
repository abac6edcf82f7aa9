"""Quantised hosts: a projection of q, k and v that is one module and has no plain weight."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

import crosslayer
from crosslayer.hf.qkv import FusedLinear
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


class ExactLinear(nn.Linear):
    """A "quantised" layer of the same numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class ExactConfig(QuantizationConfigMixin):
    def __init__(self, skipped: str = "", **_: Any):
        self.quant_method = "exact"
        self.skipped = skipped


class ExactQuantizer(HfQuantizer):
    """Replaces modules of nn.Linear itself, as transformers' quantizers of bitsandbytes do."""

    is_trainable = False
    requires_calibration = False

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear and self.quantization_config.skipped not in name:
                with torch.device("meta"):
                    bias = module.bias is not None
                    exact = ExactLinear(module.in_features, module.out_features, bias)
                model.set_submodule(name, exact)


@pytest.mark.parametrize("family", ["phi3", "neox-parallel"])
@torch.no_grad()
def test_a_quantiser_that_knows_the_class_alone(family, tmp_path, monkeypatch):
    """Before and after a reload; what it skips stays fused."""
    monkeypatch.setitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "exact", ExactConfig)
    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "exact", ExactQuantizer)
    model = connected(family, "mudd")
    model.save_pretrained(tmp_path / "plain")
    config = ExactConfig(skipped="layers.1.")
    loaded = type(model).from_pretrained(tmp_path / "plain", quantization_config=config)
    loaded.save_pretrained(tmp_path / "quantised")
    for quantised in (loaded, crosslayer.from_pretrained(tmp_path / "quantised")):
        for name, module in quantised.named_modules():
            if isinstance(module, nn.Linear):
                assert isinstance(module, ExactLinear) == ("layers.1." not in name)
            if isinstance(module, FusedLinear):
                assert "layers.1." in name
        torch.testing.assert_close(output(quantised, family), output(model, family))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [8, 4])
@torch.no_grad()
def test_bitsandbytes(bits, tmp_path):
    """Every projection, before and after a reload."""
    pytest.importorskip("bitsandbytes")
    # widths of one block, the least that 4-bit products on a CPU take
    model = connected("neox-parallel", "mudd", hidden_size=64, intermediate_size=64)
    model.save_pretrained(tmp_path / "plain")
    options = {f"load_in_{bits}bit": True, "bnb_4bit_compute_dtype": torch.float32}
    config = BitsAndBytesConfig(**options)
    folder = tmp_path / "plain"
    loaded = crosslayer.from_pretrained(folder, quantization_config=config, device_map="cpu")
    loaded.save_pretrained(tmp_path / "quantised")
    reloaded = crosslayer.from_pretrained(tmp_path / "quantised", device_map="cpu")
    for quantised in (loaded, reloaded):
        for layer in quantised.base_model.layers:
            assert not layer.attention.query_key_value.weight.is_floating_point()
    assert torch.equal(output(loaded, "neox-parallel"), output(reloaded, "neox-parallel"))
