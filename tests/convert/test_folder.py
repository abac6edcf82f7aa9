"""Damaged or incomplete folders: an error of one line, before a model is built."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import crosslayer
from crosslayer.convert import load_published, save_published
from crosslayer.convert.published import is_published
from tests.hf.backbones import llama

CASE = "muddformer_llama_L4_D64_qknorm_round64_expandlast"


@pytest.fixture(autouse=True)
def built(monkeypatch):
    """The classes of the models that were given weights."""
    calls = []
    genuine = PreTrainedModel.from_pretrained.__func__

    def counting(cls, *args, **kwargs):
        calls.append(cls)
        return genuine(cls, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(counting))
    return calls


def shards(folder, drop=None):
    """The weights of a folder in three files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = [names[i::3] for i in range(3)]
    index = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        index |= dict.fromkeys(part, file)
        if i != drop:
            save_file({name: tensors[name] for name in part}, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )


def test_sharded(checkpoint, built):
    folder, ids = checkpoint(CASE), torch.arange(9)[None]
    single = load_published(folder)(ids).logits
    shards(folder)
    assert torch.equal(load_published(folder)(ids).logits, single)
    assert len(built) == 2


def edited(**changes):
    """The same weights with some replaced, or left out where None."""

    def edit(folder):
        tensors = load_file(folder / "model.safetensors") | {
            n.replace("__", "."): t for n, t in changes.items()
        }
        save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors")

    return edit


def configured(**changes):
    def edit(folder):
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(
            json.dumps({n: v for n, v in config.items() if v is not ...})
        )

    return edit


def truncated(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def pickled(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")


def renamed(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.2.attention.query.weight"] = tensors.pop("layers.2.attention.wq.weight")
    save_file(tensors, folder / "model.safetensors")


def overlapping(folder):
    tensors = load_file(folder / "model.safetensors")
    shards(folder)
    save_file({"norm.weight": tensors["norm.weight"]}, folder / "model-00001-of-00003.safetensors")


def indexed_alone(folder):
    shards(folder)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["lost.weight"] = "model-00001-of-00003.safetensors"
    file.write_text(json.dumps(index))


def two_files(folder):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({}, folder / "b.safetensors")


BROKEN = {
    "truncated": (truncated, "model.safetensors is truncated or not safetensors"),
    "empty-file": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        "is truncated or not safetensors",
    ),
    "pickle": (
        pickled,
        "pytorch_model.bin is a pickle, which can run code and is never loaded; .*save_file",
    ),
    "no-weights": (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    "two-files": (two_files, "has 2 safetensors files but no index of them"),
    "no-config": (lambda f: (f / "config.json").unlink(), "published/config.json: no such file"),
    "bad-config": (lambda f: (f / "config.json").write_text("{"), "config.json: not JSON"),
    "odd-config": (
        lambda f: (f / "config.json").write_text("[]"),
        "config.json: expected an object of JSON, got list",
    ),
    "a-shard-lost": (
        lambda f: shards(f, drop=1),
        "lacks the shard model-00002-of-00003.safetensors, of 3 in",
    ),
    "a-tensor-lost": (indexed_alone, "and the files disagree about 'lost.weight'"),
    "a-shard-other": (overlapping, "'norm.weight' is in model-00001-of-00003.safetensors, too"),
    "missing": (
        edited(layers__2__ffn_norm__weight=None),
        "a tensor is missing: 'layers.2.ffn_norm.weight'",
    ),
    "several-missing": (
        edited(dense_bs__0=None, dense_bs__1=None),
        "2 tensors are missing, the first: 'dense_bs.0'",
    ),
    "foreign": (
        edited(layers__4__ffn_norm__weight=torch.ones(64)),
        "a tensor is unknown: 'layers.4.ffn_norm",
    ),
    "renamed": (
        renamed,
        r"'layers.2.attention.wq.weight' \(did you mean 'layers.2.attention.query.weight'\?\)",
    ),
    "wrong-shape": (
        edited(layers__1__feed_forward__w1__weight=torch.ones(192, 64)),
        r"'layers.1.feed_forward.w1.weight' has the shape \(192, 64\), expected \(128, 64\)",
    ),
    "another-size": (configured(dim=128), r"has the shape .*, expected"),
    "another-option": (
        configured(expand_last=False, round64=False),
        r"'dynamic_dense.0.w1.weight' has the shape",
    ),
    "unknown-layout": (
        configured(model_type="mudformer"),
        r"model_type 'mudformer' \(did you mean 'muddformer'\?\)\); known: muddformer, muddpythia",
    ),
    "no-layout": (configured(dim=...), "neither a model_type nor gpt-fast's names"),
    "half-a-config": (
        configured(model_type="muddformer", dim="64"),
        "dim must be a whole number of at least 1",
    ),
    "one-layer": (configured(n_layer=1), "n_layer must be at least 2"),
    "many-layers": (configured(n_layer=10**9), "n_layer must be at most"),
    "odd-heads": (configured(n_head=5), "n_head must divide dim=64, got 5"),
    "key-heads": (configured(n_local_heads=3), "n_local_heads must divide n_head=4, got 3"),
    "quantised": (
        edited(norm__weight=torch.ones(64).to(torch.int8)),
        "'norm.weight' is I8, expected one of F64, F32",
    ),
    "rope-base": (configured(rope_base="1e4"), "rope_base must be a finite number, got '1e4'"),
    "shared-norms": (
        configured(sepln=False),
        "config.json: sepln must be True in this layout, got False",
    ),
    "static": (
        configured(dynamic_dense=False),
        "config.json: dynamic_dense must be True in this layout",
    ),
}


@pytest.mark.parametrize(("breaks", "message"), BROKEN.values(), ids=BROKEN)
def test_one_line_and_no_model(breaks, message, checkpoint, built):
    folder = checkpoint(CASE)
    breaks(folder)
    with pytest.raises(ValueError, match=message) as error:
        load_published(folder)
    assert "\n" not in str(error.value) and not built


def test_arguments(checkpoint, built, tmp_path):
    with pytest.raises(
        ValueError, match="rope must be one of exact, bfloat16, float16, got 'half'"
    ):
        load_published(checkpoint(CASE), rope="half")
    with pytest.raises(
        ValueError, match="dtype must be one of float32, bfloat16, float16, got 'half'"
    ):
        load_published(tmp_path / "published", dtype="half")
    with pytest.raises(ValueError, match=r"nowhere/config\.json: no such file"):
        load_published(tmp_path / "nowhere")
    assert not built


def test_a_transformers_folder_is_told_apart(checkpoint, tmp_path):
    load_published(checkpoint(CASE)).save_pretrained(tmp_path / "saved")
    with pytest.raises(
        ValueError,
        match=r"already; crosslayer\.from_pretrained loads it",
    ):
        load_published(tmp_path / "saved")
    assert is_published(tmp_path / "published") and not is_published(tmp_path / "saved")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (None, "layouts are of llama, qwen3, gpt_neox, got 'llama' unconnected"),
        ("hyper", r"the layout of MUDDFormer cannot represent crosslayer='hyper'"),
        ("mudd(dilation=2)", r"cannot represent crosslayer='mudd\(dilation=2\)'"),
        ("mudd", r"cannot represent crosslayer_widths=None, only \["),
    ],
)
def test_nothing_is_written_of_another_model(spec, message, tmp_path):
    model = llama()
    if spec is not None:
        crosslayer.connect(model, spec)
    with pytest.raises(ValueError, match=message):
        save_published(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_of_a_model_with_a_sliding_window(checkpoint, tmp_path):
    model = load_published(checkpoint(CASE))
    model.config.use_sliding_window = True
    with pytest.raises(ValueError, match="cannot represent use_sliding_window=True"):
        save_published(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_of_another_rope(checkpoint, tmp_path):
    model = load_published(checkpoint(CASE))
    model.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000}
    with pytest.raises(
        ValueError, match="the layout of MUDDFormer cannot represent rope_parameters="
    ):
        save_published(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_host_that_cannot_have_it():
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {
        "vocab_size": 9,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    with pytest.raises(ValueError, match="crosslayer_qk_norm is for gpt_neox, got 'llama'"):
        LlamaForCausalLM(LlamaConfig(**small, crosslayer="prenorm", crosslayer_qk_norm=True))
    with pytest.raises(
        ValueError,
        match=re.escape("crosslayer_rope must be one of exact, bfloat16, float16, got 'x'"),
    ):
        LlamaForCausalLM(LlamaConfig(**small, crosslayer="prenorm", crosslayer_rope="x"))
    with pytest.raises(
        ValueError, match="crosslayer_widths must be one width a layer, 1 in all, got 2"
    ):
        LlamaForCausalLM(LlamaConfig(**small, crosslayer="prenorm", crosslayer_widths=[8, 8]))
