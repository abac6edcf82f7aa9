"""MUDDFormer's layout against the reference's numbers: streams, logits, gradients, tokens."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import crosslayer
from crosslayer.connections._dense import History
from crosslayer.convert import load_published, save_published
from crosslayer.convert.layout import complete_config, mlp_widths
from crosslayer.convert.muddformer import LAYOUT
from crosslayer.convert.rows import convert_tensors, reverse_rows

GOLDEN = Path(__file__).parent.parent / "golden"
QKNORM = "muddformer_llama_L4_D64_qknorm_round64_expandlast"
BASELINE = "transformerpp_baseline_dense_false_L4_D64"
CASES = {
    "qknorm": (QKNORM, "mudd(round64=True, expand_last=True)", "qwen3"),
    "plain": ("muddformer_llama_L4_D64_noqknorm_noround_noexpand", "mudd", "llama"),
    "baseline": (BASELINE, "prenorm", "qwen3"),
}
cases = pytest.mark.parametrize("case", [case for case, _, _ in CASES.values()], ids=CASES)
IDLE = ("dense_bs.", "dynamic_dense.")


def golden(case: str, part: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / f"{case}.{part}.safetensors")


def theirs(case: str, ours: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    config = json.loads((GOLDEN / f"{case}.json").read_text())["config"]
    return convert_tensors(reverse_rows(LAYOUT.tensor_rows(complete_config(config, LAYOUT))), ours)


def sites(model) -> list[crosslayer.Connection]:
    return [m for m in model.modules() if isinstance(m, crosslayer.Connection)]


def close(ours, theirs, atol) -> None:
    torch.testing.assert_close(
        ours.reshape(theirs.shape).to(theirs.dtype), theirs, rtol=0, atol=atol
    )


@pytest.mark.parametrize(("case", "spec", "host"), CASES.values(), ids=CASES)
def test_host_and_spec(checkpoint, case, spec, host):
    model = load_published(checkpoint(case))
    assert (model.config.model_type, model.config.crosslayer) == (host, spec)
    assert (
        model.config.crosslayer_widths
        == json.loads((GOLDEN / f"{case}.json").read_text())["ffn_hidden_dims"]
    )


@cases
def test_logits_and_every_gradient(checkpoint, case):
    """In float64 but for the host's float32 table of RoPE: the order of sums does not matter."""
    model, file = (
        load_published(checkpoint(case)).double(),
        golden(case, "forward_float64_exactrope"),
    )
    out = model(file["input_ids"], labels=file["input_ids"])
    close(out.logits, file["logits"], 1e-5)
    close(out.loss, file["loss"], 1e-6)
    out.loss.backward()
    found = theirs(case, {name: p.grad for name, p in model.named_parameters()})
    expected = golden(case, "grads_from_float64")
    assert all(name.startswith(IDLE) for name in expected.keys() ^ found.keys())
    assert case == BASELINE or found.keys() == expected.keys()
    for name, gradient in found.items():
        close(gradient, expected[name], 5e-6)


@cases
@pytest.mark.parametrize(("rope", "part"), [("exact", "exactrope"), ("bfloat16", "ref")])
def test_greedy_tokens(checkpoint, case, rope, part):
    model, file = (
        load_published(checkpoint(case), rope=rope),
        golden(case, f"greedy_generation_{part}"),
    )
    prompt = file["prompt_ids"]
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
    )
    assert torch.equal(out, file["generated_ids"])


@pytest.mark.parametrize("case", [QKNORM, CASES["plain"][0]], ids=["qknorm", "plain"])
def test_streams_in_float64(checkpoint, case):
    """Every stream of the loaded connections, given the recorded block outputs."""
    row, file = (
        sites(load_published(checkpoint(case)).double()),
        golden(case, "forward_float64_exactrope"),
    )
    for l, site in enumerate(row[2::2], start=1):
        X = tuple(file[f"X.{j}"] for j in range(l))
        close(
            site.write_and_weigh(file[f"X.{l}"], None)[1].movedim(-2, 0),
            file[f"da_weights.{l - 1}"],
            1e-9,
        )
        inputs, state = site.mix_inputs(History(X, file[f"X.{l}"]))
        streams = (*inputs, state.h) if l < 4 else inputs
        names = [f"block_input.{l}.{way}" for way in "qkvr"] if l < 4 else ["final_hidden"]
        for name, stream in zip(names, streams, strict=True):
            close(stream, file[name], 1e-9)


def test_streams_of_the_baseline_in_float64(checkpoint):
    *row, out = sites(load_published(checkpoint(BASELINE)).double())
    file = golden(BASELINE, "forward_float64_exactrope")
    state = row[0].init(file["X.0"])
    for l in range(4):
        (x,), state = row[2 * l].mix_inputs(state)
        close(x, file[f"block_input.{l}.single"], 1e-9)
        state = row[2 * l].write(state, file[f"attn_out.{l}"])
        (h,), state = row[2 * l + 1].mix_inputs(state)
        state = row[2 * l + 1].write(state, file[f"X.{l + 1}"] - h)
    close(out.mix_inputs(state)[0][0], file["final_hidden"], 1e-9)


@cases
@pytest.mark.parametrize(("rope", "prefix"), [("exact", "exactrope"), ("bfloat16", "ref")])
def test_everything_the_reference_recorded(checkpoint, case, rope, prefix):
    model, file = load_published(checkpoint(case), rope=rope), golden(case, "forward_float32")
    seen = recorded(model, file["input_ids"])
    expected = {
        name.removeprefix(f"{prefix}."): t
        for name, t in file.items()
        if name.startswith(f"{prefix}.")
    }
    assert expected.keys() == seen.keys() | ({"rope_cos_sin"} if prefix == "ref" else set())
    for name, tensor in expected.items():
        if name == "rope_cos_sin":
            half = tensor.shape[1]
            table = model.model.rotary_emb(torch.empty(0), torch.arange(len(tensor))[None])
            assert torch.equal(torch.stack([part[0, :, :half] for part in table], -1), tensor)
        else:
            close(seen[name], tensor, 1e-4)
    other = "exactrope" if prefix == "ref" else "ref"
    assert (seen["logits"] - file[f"{other}.logits"]).abs().max() > 1e-3, (
        "the rounding must show in these numbers"
    )


def recorded(model, input_ids) -> dict[str, torch.Tensor]:
    """Streams, weights, attention and block outputs of one run, under the reference's names."""
    seen: dict[str, torch.Tensor] = {}
    mudd = model.config.crosslayer != "prenorm"

    def watched(site, gather):
        def watching(state):
            inputs, after = gather(state)
            l = site.site.layer
            if site.opens_layer:
                if mudd:
                    seen.update({f"X.{j}": x for j, x in enumerate(after.X)})
                    if site.a is not None:
                        seen[f"da_weights.{l - 1}"] = site.write_and_weigh(after.X[-1], None)[
                            1
                        ].movedim(-2, 0)
                else:
                    seen[f"X.{l}"] = inputs[0]
                if site.is_readout:
                    seen["final_hidden"] = inputs[0]
                elif len(inputs) == 1:
                    seen[f"block_input.{l}.single"] = inputs[0]
                else:
                    streams = zip("qkvr", (*inputs, after.h), strict=True)
                    seen.update({f"block_input.{l}.{way}": x for way, x in streams})
            return inputs, after

        return watching

    for site in sites(model):
        site.mix_inputs = watched(site, site.mix_inputs)
    for l, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(
            lambda _, __, out, l=l: seen.update({f"attn_out.{l}": out[0]})
        )
    with torch.no_grad():
        seen["logits"] = model(input_ids).logits
    return seen


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_round_trips_are_bitwise(checkpoint, case, dtype, tmp_path):
    folder = checkpoint(case, bos_token_id=7)
    tensors = {name: t.to(dtype) for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    model = load_published(folder)
    assert model.dtype == dtype and all(
        p.dtype == torch.float32 for s in sites(model) for p in s.parameters(False)
    )
    save_published(model, tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(name.startswith(IDLE) for name in tensors.keys() ^ back.keys())
    assert case == BASELINE or back.keys() == tensors.keys()
    assert all(t.dtype == dtype and torch.equal(t, tensors[name]) for name, t in back.items())
    given, config = (
        json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "back")
    )
    options = (
        {"round64", "expand_last", "sepln", "dense_type"} if case == BASELINE else set()
    )  # of the idle parameters
    assert all(config[name] == value for name, value in given.items() if name not in options)
    again = load_published(tmp_path / "back")
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in again.state_dict().items())


@pytest.mark.parametrize(
    ("case", "rope"), [(QKNORM, "exact"), (CASES["plain"][0], "bfloat16"), (BASELINE, "bfloat16")]
)
def test_as_a_transformers_folder(checkpoint, case, rope, tmp_path):
    model = load_published(checkpoint(case), rope=rope)
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    save_published(loaded, tmp_path / "back")
    assert torch.equal(load_published(tmp_path / "back", rope)(ids).logits, model(ids).logits)


def test_trained_connections_are_not_rounded(checkpoint, tmp_path):
    """Connections of a bfloat16 model are float32: what training gave them is saved."""
    model = load_published(checkpoint(CASES["plain"][0]), dtype="bfloat16")
    with torch.no_grad():
        for site in sites(model):
            for parameter in site.parameters(False):
                parameter.add_(1e-3)
    save_published(model, tmp_path / "back")
    again = load_published(tmp_path / "back")
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in again.state_dict().items())


def test_defaults_of_the_config_class(checkpoint):
    """The defaults are those of the reference's config class: the sizes of MUDDFormer-2.8B."""
    whole = complete_config({}, LAYOUT)
    sizes = [whole[key] for key in ("dim", "n_layer", "n_head", "intermediate_size")]
    assert sizes == [2560, 32, 32, 6912]
    assert sum(mlp_widths(whole)) == pytest.approx(32 * 6912, rel=0.005)
    folder = checkpoint(CASES["plain"][0])
    given = json.loads((folder / "config.json").read_text())
    left_out = {
        "use_qk_norm",
        "expand_last",
        "round64",
        "norm_eps",
        "rope_base",
        "n_local_heads",
        "head_dim",
    }
    short = {"model_type": "muddformer"} | {
        name: given[name] for name in given.keys() - left_out - {"eos_token_id"}
    }
    model = load_published(folder)
    (folder / "config.json").write_text(json.dumps(short))
    ids = torch.arange(9)[None]
    assert torch.equal(load_published(folder)(ids).logits, model(ids).logits)
    config = load_published(folder).config
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)


def test_another_rope_base_and_eps(checkpoint, tmp_path, written):
    folder = checkpoint(QKNORM)
    changed = {"rope_base": 500.0, "norm_eps": 1e-3}
    config = json.loads((folder / "config.json").read_text()) | changed
    model = load_published(written(load_file(folder / "model.safetensors"), config, "base"))
    assert model.config.rope_parameters["rope_theta"] == 500
    assert model.config.rms_norm_eps == 1e-3, "of the norms of the host too"
    save_published(model, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()).items() >= changed.items()


def test_fewer_key_heads(checkpoint, tmp_path, written):
    """Two heads of k and v, each for two of q, equal four of which two and two are equal."""
    folder = checkpoint(QKNORM)
    tensors, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    for name in tensors:
        if name.endswith(("wk.weight", "wv.weight")):
            tensors[name] = tensors[name][:32]
    fewer = load_published(written(tensors, config | {"n_local_heads": 2}, "fewer"))
    save_published(fewer, tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys() and all(
        torch.equal(back[name], t) for name, t in tensors.items()
    )
    for name, t in tensors.items():
        if name.endswith(("wk.weight", "wv.weight")):
            tensors[name] = t.unflatten(0, (2, 16)).repeat_interleave(2, 0).flatten(0, 1)
    ids = torch.arange(9)[None]
    close(fewer(ids).logits, load_published(written(tensors, config, "full"))(ids).logits, 1e-5)
