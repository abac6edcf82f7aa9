"""MUDDPythia's layout against a loop of the published modelling code's mathematics, in float64.

No numbers of the published code exist here.
"""

import copy
import json
import pickle

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from crosslayer.convert import load_published, save_published
from crosslayer.convert.layout import complete_config
from crosslayer.convert.muddpythia import LAYOUT

# The keys and the options of the published config_1p4b.json and config_2p8b.json, with small sizes.
CONFIG = {
    "architectures": ["MUDDPythia"],
    "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    "block_size": 64,
    "bos_token_id": 0,
    "dense": True,
    "dense_type": "qkvr",
    "dim": 64,
    "dynamic_dense": True,
    "eos_token_id": None,  # 0 there; tests generate without an end of text
    "expand_last": True,
    "head_dim": 16,
    "intermediate_size": 192,
    "is_training": False,
    "model_type": "muddpythia",
    "n_head": 4,
    "n_layer": 3,
    "n_local_heads": 4,
    "norm_eps": 1e-05,
    "rope_base": 10000,
    "rotary_pct": 0.25,
    "round64": True,
    "sepln": True,
    "stack_hidden": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.35.0",
    "use_gradient_checkpointing": False,
    "use_layer_cache": True,
    "use_linear_bias": True,
    "use_parallel_residual": True,
    "use_qk_norm": True,
    "vocab_size": 97,
}
WIDTHS = (128, 256, 256)
VARIANTS = {
    "released": {},
    "all-of-a-head-rotates": {"rotary_pct": 1.0},
    "no-qk-norm": {"use_qk_norm": False},
    "one-after-the-other": {"use_parallel_residual": False},
    "another-rope-base": {"rope_base": 500},
    "dense-off": {"dense": False, "sepln": False},
    "defaults-of-the-class": {"round64": False, "expand_last": False},
}
variants = pytest.mark.parametrize("given", VARIANTS.values(), ids=VARIANTS)


def weights(config: dict, embedding: float = 0.02) -> dict[str, torch.Tensor]:
    """Random weights under the reference's names, with the shapes of its modelling code.

    The embedding is small, as in the released models, so that eps shows.
    """
    D, L, w = config["dim"], config["n_layer"], {}
    generator = torch.Generator().manual_seed(5)

    def linear(name: str, out: int, into: int, bias: bool = True) -> None:
        w[f"{name}.weight"] = torch.randn(out, into, generator=generator) * into**-0.5
        if bias:
            w[f"{name}.bias"] = torch.randn(out, generator=generator) * 0.2

    def norm(name: str, width: int = D, bias: bool = True) -> None:
        w[f"{name}.weight"] = 1 + torch.randn(width, generator=generator) * 0.2
        if bias:
            w[f"{name}.bias"] = torch.randn(width, generator=generator) * 0.2

    w["tok_embeddings.weight"] = embedding * torch.randn(
        config["vocab_size"], D, generator=generator
    )
    linear("output", config["vocab_size"], D, bias=False)
    norm("norm")
    for l in range(L):
        for part in ("wq", "wk", "wv") if config["dense"] else ():
            linear(f"layers.{l}.attention.{part}", D, D)
        if not config["dense"]:
            linear(f"layers.{l}.attention.wqkv", 3 * D, D)
        linear(f"layers.{l}.attention.wo", D, D)
        for part in ("q_norm", "k_norm") if config["use_qk_norm"] else ():
            norm(f"layers.{l}.attention.{part}", D // config["n_head"], bias=False)
        linear(f"layers.{l}.feed_forward.w1", WIDTHS[l], D)
        linear(f"layers.{l}.feed_forward.w2", D, WIDTHS[l])
        norm(f"layers.{l}.ffn_norm")
        for way in range(3) if l and config["dense"] else ():
            norm(f"layers.{l}.attention_norms.{way}")
        if not l or not config["dense"]:
            norm(f"layers.{l}.attention_norm")
        if config["dense"]:
            C = 4 if l < L - 1 else 1
            K = C * (l + 2) * (4 if l == L - 1 and config["expand_last"] else 1)
            K = (K // 64 + 1) * 64 if config["round64"] else K
            linear(f"dynamic_dense.{l}.w1", K, D, bias=False)
            linear(f"dynamic_dense.{l}.w2", C * (l + 2), K, bias=False)
            w[f"dense_bs.{l}"] = torch.randn(C, l + 2, generator=generator) * 0.3
    return w


def loop(
    w: dict[str, torch.Tensor], config: dict, ids: torch.Tensor, table: torch.dtype
) -> torch.Tensor:
    """The logits, in float64 but for RoPE's table."""
    eps = config["norm_eps"]
    w = {name: t.double() for name, t in w.items()}
    H, hd, T = config["n_head"], config["dim"] // config["n_head"], ids.shape[1]
    half = int(hd * config["rotary_pct"]) // 2
    frequencies = 1 / config["rope_base"] ** (torch.arange(half).float() / half)
    angle = torch.outer(torch.arange(T).float(), frequencies)
    cos, sin = (f(angle).to(table).double()[:, None] for f in (torch.cos, torch.sin))

    def linear(name, x):
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)

    def rms(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()

    def rotated(x):  # [B T H hd]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def attention(l, xs):
        at = f"layers.{l}.attention"
        if config["dense"]:
            q, k, v = (linear(f"{at}.w{part}", x) for part, x in zip("qkv", xs, strict=True))
        else:
            q, k, v = linear(f"{at}.wqkv", xs[0]).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (H, hd)) for t in (q, k, v))
        if config["use_qk_norm"]:
            q, k = rms(q) * w[f"{at}.q_norm.weight"], rms(k) * w[f"{at}.k_norm.weight"]
        scores = torch.einsum("bthd,bshd->bhts", rotated(q), rotated(k)) / hd**0.5
        p = scores.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf")).softmax(-1)
        return linear(f"{at}.wo", torch.einsum("bhts,bshd->bthd", p, v).flatten(-2))

    x = w["tok_embeddings.weight"][ids]
    X, streams = [x], [x] * 4
    for l in range(config["n_layer"]):
        names = [f"layers.{l}.attention_norms.{way}" for way in range(3)]
        names = names if l and config["dense"] else [f"layers.{l}.attention_norm"] * 3
        r = streams[-1]
        h = r + attention(l, [norm(name, s) for name, s in zip(names, streams, strict=False)])
        inner = norm(f"layers.{l}.ffn_norm", r if config["use_parallel_residual"] else h)
        x = h + linear(
            f"layers.{l}.feed_forward.w2", F.gelu(linear(f"layers.{l}.feed_forward.w1", inner))
        )
        X.append(x)
        streams = [x] * 4
        if config["dense"]:
            A = linear(f"dynamic_dense.{l}.w2", F.gelu(linear(f"dynamic_dense.{l}.w1", rms(x))))
            A = A.unflatten(-1, w[f"dense_bs.{l}"].shape) + w[f"dense_bs.{l}"]
            streams = list(torch.einsum("btcj,jbtd->cbtd", A, torch.stack(X)))
    return linear("output", norm("norm", streams[-1]))


@variants
@pytest.mark.parametrize("rope", ["exact", "float16"])
def test_logits(given, rope, written):
    config = CONFIG | given
    folder, ids = written(weights(config), config), torch.arange(40).view(2, 20) * 2
    logits = load_published(folder, rope).double()(ids).logits
    tables = (torch.float32, torch.float16)
    right, wrong = tables if rope == "exact" else tables[::-1]
    expected, other = (loop(weights(config), config, ids, table) for table in (right, wrong))
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
    error = (logits - expected).abs().max()
    assert error < 0.01 * (logits - other).abs().max(), "the rounding must show"
    other = loop(weights(config), config | {"norm_eps": 1e-6}, ids, right)
    assert error < 1e-3 * (logits - other).abs().max(), "eps must show"


@variants
def test_round_trips(given, written, tmp_path):
    config = CONFIG | given
    tensors, ids = weights(config), torch.arange(11)[None]
    model = load_published(written(tensors, config), "float16")
    save_published(model, tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys() and all(
        torch.equal(back[name], t) for name, t in tensors.items()
    )
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert torch.equal(load_published(tmp_path / "back", "float16")(ids).logits, model(ids).logits)


def test_gradients_and_decoding(written):
    """Every parameter learns, and the cache agrees with the whole sequence at once."""
    model = load_published(written(weights(CONFIG), CONFIG))
    ids = torch.arange(1, 9)[None]
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    again = [model(out[:, :k]).logits[0, -1].argmax().item() for k in range(8, 14)]
    assert out[0, 8:].tolist() == again


def test_copies_pickles_and_checkpointing(written):
    model, ids = load_published(written(weights(CONFIG), CONFIG), "float16"), torch.arange(9)[None]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(ids).logits, model(ids).logits)
    model(ids, labels=ids).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    # its name since transformers 5.23, and before
    getattr(model.train(), "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model(ids, labels=ids).loss.backward()
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())


def test_half_precision(written, tmp_path):
    folder, ids = written(weights(CONFIG, embedding=1.0), CONFIG), torch.arange(9)[None]
    model = load_published(folder, "float16", "bfloat16")
    own = ("a", "W1", "W2")
    for name, p in model.named_parameters():
        assert p.dtype == (torch.float32 if name.rsplit(".", 1)[-1] in own else torch.bfloat16), (
            name
        )
    assert (model(ids).logits - load_published(folder, "float16")(ids).logits).abs().max() < 0.1
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_the_layout_is_found_by_its_weights(written):
    config = {name: value for name, value in CONFIG.items() if name != "model_type"}
    assert load_published(written(weights(CONFIG), config)).config.model_type == "gpt_neox"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window_size": 256}, "config.json: window_size must be None in this layout, got 256"),
        ({"use_linear_bias": False}, "use_linear_bias must be True in this layout, got False"),
        ({"dense_type": "l"}, "config.json: dense_type must be 'qkvr' in this layout, got 'l'"),
        ({"n_local_heads": 2}, "config.json: n_local_heads must be n_head=4 in this layout, got 2"),
        ({"rotary_pct": 0.2}, "an even number of a head's 16 components must be rotated, got 3"),
        ({"rotary_pct": 0.05}, "an even number of a head's 16 components must be rotated, got 0"),
        ({"rotary_pct": 2.0}, "an even number of a head's 16 components must be rotated, got 32"),
        ({"dense": False, "window_size": 256}, "window_size must be None in this layout, got 256"),
    ],
)  # fmt: skip
def test_configs_without_counterpart(given, message, written):
    with pytest.raises(ValueError, match=message):
        load_published(written(weights(CONFIG), CONFIG | given))


def test_the_config_that_is_written_is_the_published_one(written, tmp_path):
    """The published code knows no dense_type but "qkvr", and no window."""
    save_published(load_published(written(weights(CONFIG), CONFIG)), tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    ignored = {"auto_map", "is_training", "torch_dtype", "transformers_version"}
    ignored |= {"use_gradient_checkpointing", "use_layer_cache"}
    assert config.keys() - {"dtype", "pad_token_id"} == CONFIG.keys() - ignored
    assert all(config[key] == CONFIG[key] for key in CONFIG.keys() - ignored)


def test_defaults_and_the_trainers_letter(written):
    """The defaults are those of the published config class; m, for r, is understood."""
    whole = complete_config({}, LAYOUT)
    sizes = [whole[key] for key in ("dim", "n_layer", "vocab_size", "intermediate_size")]
    assert sizes == [2560, 32, 32000, 10240]
    assert not whole["expand_last"] and whole["norm_eps"] == 1e-5
    given = CONFIG | {"dense_type": "qkvm", "window_size": None, "window_type": None}
    for key in ("norm_eps", "rotary_pct", "rope_base", "use_parallel_residual", "use_linear_bias"):
        del given[key]
    ids = torch.arange(9)[None]
    short = load_published(written(weights(CONFIG), given, "short"))
    assert torch.equal(
        short(ids).logits, load_published(written(weights(CONFIG), CONFIG))(ids).logits
    )
