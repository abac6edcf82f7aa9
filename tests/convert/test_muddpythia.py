"""MUDDPythia's layout against a loop from its description; no numbers of the reference exist."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from crosslayer.convert import load_published, save_published

CONFIG = {
    "model_type": "muddpythia",
    "dim": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_local_heads": 4,
    "head_dim": 16,
    "vocab_size": 97,
    "block_size": 64,
    "intermediate_size": 192,
    "norm_eps": 1e-06,
    "rope_base": 10000,
    "rotary_pct": 0.25,
    "use_qk_norm": True,
    "use_parallel_residual": True,
    "use_linear_bias": True,
    "dense": True,
    "dynamic_dense": True,
    "dense_type": "qkvm",
    "sepln": True,
    "window_size": None,
    "window_type": None,
    "bos_token_id": 0,
    "eos_token_id": None,
}
WIDTHS = (128, 256, 256)
VARIANTS = {
    "released": {},
    "all-of-a-head-rotates": {"rotary_pct": 1.0},
    "no-qk-norm": {"use_qk_norm": False},
    "one-after-the-other": {"use_parallel_residual": False},
    "dense-off": {"dense": False},
}
variants = pytest.mark.parametrize("given", VARIANTS.values(), ids=VARIANTS)


def weights(config: dict) -> dict[str, torch.Tensor]:
    """Random weights under the reference's names, with the shapes of its modelling code."""
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

    w["tok_embeddings.weight"] = torch.randn(config["vocab_size"], D, generator=generator)
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
            K = 64 * ((l + 2) * C * (1 if l < L - 1 else 4) // 64 + 1)
            linear(f"dynamic_dense.{l}.w1", K, D, bias=False)
            linear(f"dynamic_dense.{l}.w2", C * (l + 2), K, bias=False)
            w[f"dense_bs.{l}"] = torch.randn(C, l + 2, generator=generator) * 0.3
    return w


def loop(
    w: dict[str, torch.Tensor], config: dict, ids: torch.Tensor, table: torch.dtype
) -> torch.Tensor:
    """The logits, in float64 but for RoPE's table."""
    w = {name: t.double() for name, t in w.items()}
    H, hd, T = config["n_head"], config["dim"] // config["n_head"], ids.shape[1]
    half = int(hd * config["rotary_pct"]) // 2
    angle = torch.outer(torch.arange(T).float(), 1 / 10000 ** (torch.arange(half).float() / half))
    cos, sin = (f(angle).to(table).double()[:, None] for f in (torch.cos, torch.sin))

    def linear(name, x):
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

    def rms(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

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
    logits = load_published(folder, rope)(ids).logits.double()
    right, wrong = (
        (torch.float32, torch.float16) if rope == "exact" else (torch.float16, torch.float32)
    )
    expected, other = (loop(weights(config), config, ids, table) for table in (right, wrong))
    torch.testing.assert_close(logits, expected, rtol=0, atol=5e-5)
    assert (logits - expected).abs().max() < 0.2 * (logits - other).abs().max(), (
        "the rounding must show"
    )


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
    folder, ids = written(weights(CONFIG), CONFIG), torch.arange(9)[None]
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
        ({"dense_type": "l"}, "config.json: dense_type must be 'qkvm' in this layout, got 'l'"),
        ({"n_local_heads": 2}, "config.json: n_local_heads must be n_head=4 in this layout, got 2"),
        ({"norm_eps": 1e-5}, "config.json: norm_eps must be 1e-06 in this layout, got 1e-05"),
        ({"rotary_pct": ...}, "config.json lacks 'rotary_pct'"),
    ],
)  # fmt: skip
def test_configs_without_counterpart(given, message, written):
    config = {name: value for name, value in (CONFIG | given).items() if value is not ...}
    with pytest.raises(ValueError, match=message):
        load_published(written(weights(CONFIG), config))
