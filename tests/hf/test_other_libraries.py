"""Models of other libraries, and export to ONNX. CI installs LitGPT, torchtitan, OLMo-core, fla and
ONNX Runtime for these tests.
"""

import copy
import json
import re
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.export import Dim

import crosslayer
from crosslayer.connection import find_connections
from crosslayer.fused_norms import norm_spec_of
from crosslayer.hf.attach import find_backbone
from crosslayer.hf.qkv import FusedLinear
from crosslayer.testing.tiny_model import perturb_weights
from tests.hf import sharded
from tests.hf.backbones import build, connected, ids
from tests.support.split_inputs import check_split_inputs

pytestmark = [
    pytest.mark.slow,  # The libraries take seconds to import.
    pytest.mark.filterwarnings("ignore"),  # their own
]
IDS = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))


def test_deepspeed(tmp_path):
    pytest.importorskip("deepspeed")
    plain = perturb_weights(build("llama"), 0.05)
    plain.save_pretrained(tmp_path / "plain")
    perturb_weights(crosslayer.connect(plain, "mudd"), 0.05).save_pretrained(tmp_path / "mudd")
    torch.multiprocessing.spawn(sharded.train_with_deepspeed, (str(tmp_path),), nprocs=2)
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert len(losses) == 4
    for case, (found, expected) in losses.items():
        tolerance = 5e-3 if "bfloat16" in case else 1e-5
        assert found == pytest.approx(expected, rel=tolerance), case


@pytest.mark.parametrize("spec", ["mudd", "hyper"])
def test_onnx(spec, tmp_path):
    """For batches of any size and length, as docs/serving.md says."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model = connected("llama", spec).eval()
    arguments = {"input_ids": ids(), "use_cache": False}
    shapes = {"input_ids": {0: Dim("batch"), 1: Dim("length")}, "use_cache": None}
    program = torch.onnx.export(model, kwargs=arguments, dynamic_shapes=shapes)
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for batch, length in ((2, 9), (1, 4), (5, 17)):
        tokens = ids(batch, length)
        (logits,) = session.run(None, {"input_ids": tokens.numpy()})
        expected = model(tokens, use_cache=False).logits
        torch.testing.assert_close(torch.from_numpy(logits), expected)


def test_litgpt():
    litgpt = pytest.importorskip("litgpt")
    config = litgpt.Config(
        n_layer=3, n_embd=32, n_head=4, n_query_groups=2, intermediate_size=64, vocab_size=50,
        padding_multiple=2, block_size=16, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
        bias=False, parallel_residual=False,
    )  # fmt: skip
    plain = litgpt.GPT(config).eval()
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    assert torch.equal(model(IDS), plain(IDS))
    assert model.transformer.h[1].connections[0].ports == ("q", "k", "v")

    attention = plain.transformer.h[1].attn
    sizes = [config.head_size * heads for heads in (4, 2, 2)]
    check_split_inputs(attention, lambda x: attention.qkv(x).split(sizes, dim=-1), 32)


@pytest.mark.parametrize("pooling", ["token", "avg"])
def test_timm(pooling):
    timm = pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))  # of torchvision
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4}
    plain = timm.models.VisionTransformer(**sizes, num_classes=10, global_pool=pooling).eval()
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    assert torch.equal(model(image), plain(image))
    assert model.blocks[1].connections[0].ports == ("q", "k", "v")
    readouts = [name for name, m in model.named_modules() if getattr(m, "is_readout", False)]
    assert readouts == (["norm.connection"] if pooling == "token" else ["blocks.2.connections.2"])
    perturb_weights(model, 0.05)(image).square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []

    attention = plain.blocks[1].attn
    check_split_inputs(attention, lambda x: attention.qkv(x).chunk(3, dim=-1), 32)


VISION_TRANSFORMERS = [
    "vit_tiny_patch16_224", "deit3_small_patch16_224", "beit_base_patch16_224",
    "eva02_tiny_patch14_224", "vit_base_patch16_clip_224", "vit_base_patch16_siglip_224",
    "vit_base_patch14_dinov2", "vit_little_patch16_reg4_gap_256", "naflexvit_base_patch16_gap",
]  # fmt: skip


@pytest.mark.parametrize("name", VISION_TRANSFORMERS)
def test_vision_transformers_of_timm(name):
    timm = pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))  # of torchvision
    plain = timm.create_model(name, depth=3, embed_dim=48, num_heads=4, num_classes=10).eval()
    image = torch.randn(1, *plain.default_cfg["input_size"])
    assert torch.equal(crosslayer.connect(copy.deepcopy(plain), "mudd")(image), plain(image))


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "convnext_atto", "mixer_s16_224"])
def test_models_of_timm_that_are_refused(name):
    timm = pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))
    with pytest.raises(ValueError, match="connect cannot connect"):
        crosslayer.connect(timm.create_model(name), "mudd")


def test_torchvision():
    models = pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError)).models
    plain = models.VisionTransformer(32, 8, 3, 4, 32, 64, num_classes=10).eval()
    torch.nn.init.normal_(plain.heads.head.weight)  # zeros at first
    image = torch.randn(2, 3, 32, 32)
    model = crosslayer.connect(copy.deepcopy(plain), "mudd")
    assert torch.equal(model(image), plain(image))
    assert model.encoder.layers[1].connections[0].ports == ("q", "k", "v")


def test_olmo_core(monkeypatch):
    """Built without weights, as its train module builds it, and initialised by its own code."""
    pytest.importorskip("olmo_core")
    stand_in = ModuleType("cached_path")  # it downloads, and needs the packages of several clouds
    client = type("Client", (), {"recoverable_errors": ()})
    names = {"SchemeClient": client, "S3Client": client}
    for name in ("cached_path", "add_scheme_client"):
        names[name] = lambda *args, **kwargs: None
    vars(stand_in).update(names)
    monkeypatch.setitem(sys.modules, "cached_path", stand_in)
    monkeypatch.setitem(sys.modules, "cached_path.schemes", stand_in)
    from olmo_core.nn.transformer import TransformerConfig

    for name in ("olmo2_30M", "gemma3_1B"):
        config = getattr(TransformerConfig, name)(vocab_size=50, n_layers=3)
        plain, model = (config.build(init_device="meta") for _ in range(2))
        crosslayer.connect(model, "mudd")
        for each in (plain, model):
            each.init_weights(device=torch.device("cpu"))
            each.eval()
        model.load_state_dict(plain.state_dict(), strict=False)
        assert torch.equal(model(IDS), plain(IDS)), name
        assert model.blocks["1"].connections[0].ports == ("q", "k", "v")
        model(IDS).square().mean().backward()
        assert [n for n, p in model.named_parameters() if p.grad is None] == [], name

        attention = plain.blocks["1"].attention
        projections = (attention.w_q, attention.w_k, attention.w_v)
        check_split_inputs(attention, lambda x, of=projections: [p(x) for p in of], plain.d_model)


def test_fla():
    """All architectures that can be built here: Rodimus cannot, others need flash-attn. Their
    kernels need a GPU; `connect` verifies their layers' own code.
    """
    models = pytest.importorskip("fla.models")
    names = [name.removesuffix("Config") for name in dir(models) if name.endswith("Config")]
    ports = {}
    for name in names:
        config = getattr(models, f"{name}Config")(num_hidden_layers=4)
        try:
            with torch.device("meta"):
                model = getattr(models, f"{name}ForCausalLM")(config)
        except (TypeError, ImportError):
            continue
        crosslayer.connect(model, "mudd")
        backbone, wiring = find_backbone(model)
        ports[name] = wiring.find_layers(backbone)[1].connections[0].ports
    assert len(ports) >= 36
    assert ports["ABC"] == ("q", "k", "v")
    assert ports["GatedDeltaNet"] == ports["KDA"] == ports["RWKV7"] == ("mixer",)


def test_fla_with_norms_that_are_not_fused():
    models = pytest.importorskip("fla.models")
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 50, "num_heads": 2}
    config = models.GatedDeltaNetConfig(**sizes, head_dim=32, fuse_norm=False)
    crosslayer.connect(models.GatedDeltaNetForCausalLM(config), "mudd")


def test_attention_residuals_of_fla_are_refused():
    models = pytest.importorskip("fla.models")
    config = models.GLAConfig(
        hidden_size=64, num_hidden_layers=3, vocab_size=50, num_heads=2, attnres_block_size=2
    )
    with pytest.raises(ValueError, match="connect cannot connect"):
        crosslayer.connect(models.GLAForCausalLM(config), "mudd")


def build_as_torchtitan(config: Any) -> Any:
    """Build a model as torchtitan's trainer does: without weights, which are made afterwards."""
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def test_torchtitan():
    pytest.importorskip("torchtitan")
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import config_registry

    from examples.torchtitan_llama import connect_config, debugmodel_mudd

    training = debugmodel_mudd()
    assert training.model_spec.state_dict_adapter is None  # it would leave the connections out
    # a connection without parameters has no group of the optimizer
    baseline = connect_config(config_registry.llama3_debugmodel(), "prenorm")
    assert len(baseline.optimizer.param_groups) == len(training.optimizer.param_groups) - 1
    configs = [config_registry.llama3_debugmodel().model_spec.model, training.model_spec.model]
    for config in configs:
        for layer in config.layers:  # flex attention has no backward on a CPU
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    plain, model = map(build_as_torchtitan, configs)
    model.load_state_dict(plain.state_dict(), strict=False)
    positions = torch.arange(9).expand(2, 9)
    assert torch.equal(model(IDS, positions), plain(IDS, positions))
    model(IDS, positions).square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []

    # its subclasses of Linear and RMSNorm add no forward
    assert isinstance(model.layers["1"].attention.qkv_linear.wqkv, FusedLinear)
    assert norm_spec_of(find_connections(model)[1].norms[0]) is not None

    # torchtitan's optimizer exempts the same parameters of connections from weight decay.
    groups = crosslayer.param_groups(model, lr=1.0, weight_decay=0.1)
    without_decay = {id(p) for g in groups if not g["weight_decay"] for p in g["params"]}
    pattern = training.optimizer.param_groups[0].pattern
    for connection in find_connections(model):
        for name, parameter in connection.named_parameters():
            is_exempt = re.search(pattern, f"layers.0.connections.0.{name}") is not None
            assert is_exempt == (id(parameter) in without_decay), name

    attention = plain.layers["1"].attention
    check_split_inputs(attention, attention.qkv_linear, 256)
