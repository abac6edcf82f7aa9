"""`crosslayer inspect` from folders to the report, and the analyses that need a language model."""

import json
import math

import pytest
import torch
from matplotlib.figure import Figure
from tokenizers import Tokenizer
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from crosslayer.cli.inspect import _short_names
from crosslayer.cli.main import main
from crosslayer.connection import Connection, find_connections
from crosslayer.connections.prenorm import PreNorm
from crosslayer.data.tokenizing import byte_tokenizer_json
from crosslayer.hf import connect
from crosslayer.inspect import compare_depths, measure_cosines, summarise_mixing
from crosslayer.inspect.ablation import (
    ablate_sublayers,
    ablate_ways,
    find_depth_weights,
    mean_token_loss,
    prune_depth_weights,
)
from crosslayer.inspect.attention import _HeadRecorder, measure_head_activations
from crosslayer.inspect.inspection import ANALYSES, InspectionSubject, inspect_model
from crosslayer.inspect.lens import measure_block_gradients, measure_site_losses
from crosslayer.inspect.sections import SECTIONS
from crosslayer.inspect.text_batches import find_sink_ids
from crosslayer.testing.tiny_model import DEFAULT_SPECS, perturb_weights
from tests.inspect.methods import has_mixing_weights

pytestmark = pytest.mark.filterwarnings("ignore:connecting")
IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, 8:] = 0
BATCHES = [{"input_ids": IDS, "attention_mask": MASK}]


def language_model(spec: str | None, layers: int = 2, vocab: int = 64) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config)
    if spec is not None:
        connect(model, spec)
    for connection in find_connections(model):
        perturb_weights(connection, 0.1)
    return model


def test_ablation_is_the_loss_of_a_model_with_zero_weights():
    model = language_model("mudd")
    ablation = ablate_sublayers(model, BATCHES)
    assert ablation.labels == ["0.attn", "0.mlp", "1.attn", "1.mlp"]
    whole = mean_token_loss(model, BATCHES)
    assert ablation.loss == whole
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.zero_()
    assert ablation.increase[3] == pytest.approx(mean_token_loss(model, BATCHES) - whole, abs=1e-6)


def test_ablation_of_an_attention_that_adds_the_stream_itself():
    """BLOOM's, without a connection. The weights of its output are zeroed by hand here."""
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=64, hidden_size=24, n_layer=2, n_head=2, initializer_range=0.3)
    model = BloomForCausalLM(config)
    ablation = ablate_sublayers(model, BATCHES)
    with torch.no_grad():
        for parameter in model.transformer.h[1].self_attention.dense.parameters():
            parameter.zero_()
    without = mean_token_loss(model, BATCHES)
    assert ablation.increase[2] == pytest.approx(without - ablation.loss, abs=1e-6)


def test_loss_is_that_of_the_tokens_without_padding():
    model = language_model(None)
    losses = []
    for row, length in ((IDS[0], 12), (IDS[1], 8)):
        row = row[:length]
        logits = model(row[None]).logits[0, :-1].log_softmax(-1)
        losses += [-logits[t, row[t + 1]].item() for t in range(length - 1)]
    assert mean_token_loss(model, BATCHES) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_appended_streams_of_mgr_are_not_ablated():
    ablation = ablate_sublayers(language_model("mgr(streams=3)", layers=3), BATCHES)
    assert ablation.labels == ["1.attn", "1.mlp", "2.attn", "2.mlp"]


def test_pruning_restores_the_weights():
    model = language_model("denseformer", layers=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    curve = prune_depth_weights(model, BATCHES, [0, 0.5, 1])
    assert curve.losses[0] == mean_token_loss(model, BATCHES)
    assert len(set(curve.losses)) == 3
    # without any weight the readout is zero and every token as likely
    assert curve.losses[2] == pytest.approx(math.log(64))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert prune_depth_weights(language_model("hyper"), BATCHES, [0.5]) is None


def test_a_share_of_the_weights_is_pruned():
    """A third of 9, the smallest."""
    model = language_model("denseformer", layers=3)
    weights = find_depth_weights(model)
    pruned = torch.cat(weights).abs().sort().values[2]
    (loss,) = prune_depth_weights(model, BATCHES, [1 / 3]).losses
    with torch.no_grad():
        for weight in weights:
            weight[weight.abs() <= pruned] = 0
    assert sum((weight == 0).sum() for weight in weights) == 3
    assert loss == mean_token_loss(model, BATCHES)


def test_a_planted_sink_head_is_not_active():
    model = language_model("hyper")
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        attention.q_proj.weight.zero_()  # every score is 0: the first position is the argmax
    activations = measure_head_activations(model, BATCHES)
    assert activations.active[1] == 0
    assert 0 < activations.active[0] < 1
    assert activations.pattern_layer == 1
    torch.testing.assert_close(activations.patterns.sum(-1), torch.ones(2, 12))
    assert (activations.patterns[:, -1] - 1 / 12).abs().max() < 1e-6
    everything = measure_head_activations(model, BATCHES, sink_ids=range(64))
    assert everything.active.max() == 0
    assert model.config._attn_implementation == "sdpa"
    assert measure_head_activations(model, BATCHES, pattern_layer=0).pattern_layer == 0
    with pytest.raises(ValueError, match="a layer from 0 to 1, got 2"):
        measure_head_activations(model, BATCHES, pattern_layer=2)


def test_heads_over_padding_and_over_the_first_two_tokens():
    model = language_model("hyper")
    apart = [{"input_ids": IDS[:1]}, {"input_ids": IDS[1:, :8]}]
    active = measure_head_activations(model, BATCHES).active
    torch.testing.assert_close(active, measure_head_activations(model, apart).active)
    assert measure_head_activations(model, [{"input_ids": IDS[:, :2]}]).active.max() == 0
    assert measure_head_activations(language_model(None, layers=4), BATCHES).pattern_layer == 3


def test_a_planted_bug_makes_the_sink_head_active(monkeypatch):
    """Keys in the wrong order."""
    record = _HeadRecorder._record

    def record_reversed(recorder, layer, module, inputs, outputs):
        record(recorder, layer, module, inputs, (outputs[0], outputs[1].flip(-1)))

    monkeypatch.setattr(_HeadRecorder, "_record", record_reversed)
    with pytest.raises(AssertionError):
        test_a_planted_sink_head_is_not_active()


def test_sinks_are_the_papers_tokens():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(byte_tokenizer_json()))
    assert tokenizer.decode(sorted(find_sink_ids(tokenizer))) == "\n."


def test_ways_of_mudd():
    model = language_model("mudd")
    ablation = ablate_ways(model, BATCHES)
    assert ablation.labels == ["q", "k", "v", "r"]
    whole = mean_token_loss(model, BATCHES)
    for site in find_connections(model):  # the way k by hand: its stream is X_l, one-hot
        if site.a is not None and len(site.a) == 4:
            with torch.no_grad():
                site.a[1].zero_()
                site.a[1, -1] = 1
                site.W2.unflatten(1, site.a.shape)[:, 1].zero_()
    expected = mean_token_loss(model, BATCHES) - whole
    assert ablation.increase[1] == pytest.approx(expected, abs=1e-6)
    shared = ablate_ways(language_model("mudd(ways='qk v r')"), BATCHES)
    assert shared.labels == ["qk", "v", "r"]
    one_way = language_model("mudd(ways='qkvr')")
    ablation = ablate_ways(one_way, BATCHES)
    for site in find_connections(one_way):  # without its only way it is the plain residual
        if site.a is not None:
            with torch.no_grad():
                site.a.zero_()
                site.a[0, -1] = 1
                site.W2.zero_()
    expected = mean_token_loss(one_way, BATCHES) - ablation.loss
    assert ablation.labels == ["qkvr"]
    assert ablation.increase == pytest.approx([expected], abs=1e-6)
    assert ablate_ways(language_model("hyper"), BATCHES) is None


@pytest.mark.parametrize("spec", [None, "denseformer", "hyper"])
def test_the_lens_at_the_last_site_is_the_model(spec):
    model = language_model(spec)
    lens = measure_site_losses(model, BATCHES)
    assert lens.labels == ["0.attn", "0.mlp", "1.attn", "1.mlp", "readout"]
    assert lens.losses[-1] == pytest.approx(mean_token_loss(model, BATCHES), rel=1e-5)
    hidden = model.model.norm(model.model.embed_tokens(IDS)) if spec is None else None
    if hidden is not None:
        logits = model.lm_head(hidden).log_softmax(-1)
        losses = [-logits[0, t, IDS[0, t + 1]] for t in range(11)]
        losses += [-logits[1, t, IDS[1, t + 1]] for t in range(7)]
        assert lens.losses[0] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


def test_gradients_do_not_grow_with_the_number_of_batches():
    model = language_model("prenorm")
    once = measure_block_gradients(model, BATCHES).rms
    assert measure_block_gradients(model, BATCHES * 3).rms == pytest.approx(once, rel=1e-4)


def test_gradients_of_blocks():
    model = language_model("mgr(streams=2)")
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    gradients = measure_block_gradients(model, BATCHES)
    assert torch.equal(model.lm_head.weight.grad, torch.ones_like(model.lm_head.weight))
    assert all(p.grad is None for p in model.model.parameters())
    labels = IDS.where(MASK.bool(), -100)
    model(IDS, attention_mask=MASK, labels=labels).loss.backward()
    for layer, rms in zip(model.model.layers, gradients.rms, strict=True):
        values = torch.cat([p.grad.flatten() for p in layer.parameters() if p.grad is not None])
        assert rms == pytest.approx(values.square().mean().sqrt().item(), rel=1e-5)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The command on three models, one of them without a connection."""
    folder = tmp_path_factory.mktemp("inspect")
    for name, spec in (("plain", None), ("mgr", "mgr(streams=2)"), ("mudd", "mudd")):
        model = language_model(spec, layers=2, vocab=256)
        model.save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text(byte_tokenizer_json())
    (folder / "text.txt").write_text("A stream of text. It has <b>lines</b>.\n" * 20)
    out = folder / "out"
    models = [str(folder / name) for name in ("plain", "mgr", "mudd")]
    arguments = ["inspect", *models, "--sections", "all", "--layer", "1", "--out", str(out)]
    sizes = ["--sequences", "3", "--context", "40", "--batch", "2"]
    arguments += ["--data", str(folder / "text.txt"), *sizes]
    assert main(arguments) == 0
    return out


@pytest.mark.slow
def test_the_report_has_every_picture_and_number(report):
    content = json.loads((report / "inspection.json").read_text())
    assert [model["connection"] for model in content["models"]] == [
        "prenorm",
        "mgr(streams=2)",
        "mudd",
    ]
    assert content["models"][1]["results"]["unfolded"]["error"] < 1e-5
    page = (report / "report.html").read_text()
    pictures = sorted(path.stem for path in (report / "figures").glob("*.svg"))
    assert page.count("<figure") == len(pictures)
    assert "<script" not in page
    # of single models at no known step, and of a text without groups
    of_groups = {"classes", "steps", "step_numbers"}
    assert set(pictures) == {section.name for section in SECTIONS} - of_groups
    sizes = {path.stem: path.stat().st_size for path in (report / "figures").glob("*.png")}
    assert sizes.keys() == set(pictures) and min(sizes.values()) > 5_000


def test_only_what_the_sections_need_is_run():
    seen = []
    inspection = inspect_model(
        "hyper",
        InspectionSubject(language_model("hyper"), BATCHES * 2),
        ["unfolded", "ablation"],
        lambda *step: seen.append(step),
    )
    assert set(inspection.results) == {"unfolded", "findings", "ablation"}
    steps = [("connections", done, 2) for done in range(3)]
    assert seen == steps + [("ablation", done, 10) for done in range(11)]
    drawn = [section.name for section in SECTIONS if section.panels([inspection])]
    assert drawn == ["unfolded", "one_token", "streams", "ablation"]
    names = {analysis for section in SECTIONS for analysis in section.analyses}
    assert names == set(ANALYSES)


def test_what_cannot_be_shown_is_said(tmp_path, capsys):
    """In a model with a context of 16 tokens, of the method whose weights are no gates."""
    model = language_model("mudd", vocab=256)
    model.config.max_position_embeddings = 16
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(byte_tokenizer_json())
    (tmp_path / "text.txt").write_text("A stream of text.\n" * 20)
    twice = [f"{tmp_path}/model", f"{tmp_path}/model/"]
    command = ["inspect", *twice, "--data", str(tmp_path / "text.txt"), "--sequences", "2"]
    out = tmp_path / "out"
    assert main([*command, "--sections", "gates,cosines", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "gates is not drawn" in printed
    assert "cosines is not" not in printed and "without a saved model" not in printed
    assert "sequences of up to 16 tokens" in (out / "report.html").read_text()
    failing = ["--sections", "patterns", "--layer=2", "--out", str(tmp_path / "failing")]
    assert main([*command, *failing]) == 0
    printed = capsys.readouterr().out
    assert "attention: expected a layer from 0 to 1, got 2" in printed
    assert "patterns is not drawn" not in printed  # the failure says why
    for option, message in (
        ("--context=17", "context must be from 2 to the model's 16, got 17"),
        ("--layer=3", "--layer must be from 0 to 1, or 2 for the readout, got 3"),
    ):
        assert main([*command, option, "--out", str(tmp_path / "new")]) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="nothing was observed"):
        measure_cosines(model, [])
    with pytest.raises(ValueError, match="nothing was observed"):
        compare_depths(model, [])


def test_an_unknown_section_is_refused(tmp_path, capsys):
    assert main(["inspect", "somewhere", "--sections", "cosine", "--out", str(tmp_path)]) == 1
    assert "'cosine' is unknown (did you mean 'cosines'?); known: all," in capsys.readouterr().err


def test_an_existing_report_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "report.html").write_text("old")
    assert main(["inspect", "somewhere", "--out", str(tmp_path)]) == 1
    assert "exists already; choose another folder" in capsys.readouterr().err


def test_models_whose_folders_end_alike_have_longer_names(tmp_path, monkeypatch):
    assert _short_names(["runs/mudd/model", "published/gpt2"]) == ["mudd", "gpt2"]
    alike = ["first/mudd", "second/mudd"]
    assert _short_names(alike) == alike
    kept = [f"long/path/runs/{run}/models/step-000100" for run in ("mudd-0-1a", "hyper-0-2b")]
    monkeypatch.chdir(tmp_path)
    assert [_short_names([place]) for place in (".", "model", "x/..")] == [[tmp_path.name]] * 3
    assert _short_names(kept) == ["mudd-0-1a/models/step-000100", "hyper-0-2b/models/step-000100"]


@pytest.mark.slow
@pytest.mark.parametrize("spec", filter(has_mixing_weights, DEFAULT_SPECS))
def test_every_section_of_every_method_is_drawn(spec):
    inspection = inspect_model(spec, InspectionSubject(language_model(spec), BATCHES))
    without_lens = ["lens: resi_dual reads out by 2 norms, not by one"]
    assert inspection.failures() == (without_lens if spec == "resi_dual" else [])
    for section in SECTIONS:
        for _, draw in section.panels([inspection]):
            draw(Figure().subplots())


def test_a_model_that_has_diverged_is_left_as_it_was():
    """A weight that is NaN is not equal to itself."""
    plain = language_model(None)
    with torch.no_grad():
        plain.model.layers[1].input_layernorm.weight[0] = float("nan")
    with pytest.raises(ValueError, match=r"the state before 1\.mlp is not finite"):
        summarise_mixing(plain, BATCHES)
    assert not find_connections(plain) and not hasattr(plain.config, "crosslayer")


def test_a_method_without_mixing_weights_has_the_other_analyses(monkeypatch):
    monkeypatch.setattr(PreNorm, "mixing_weights", Connection.mixing_weights)
    subject = InspectionSubject(language_model("prenorm"), BATCHES)
    names = ["scales", "mixing", "cosines", "distances", "lens", "ablation"]
    inspection = inspect_model("mine", subject, names)
    assert set(inspection.results) == {"cosines", "distances", "lens", "ablation"}
    assert inspection.failures() == ["mixing, scales: prenorm has no mixing_weights"]
    # nor do those that read the input alone need the parts of a state
    monkeypatch.setattr(PreNorm, "state_parts", Connection.state_parts)
    assert set(inspect_model("mine", subject, names).results) == {"distances", "lens", "ablation"}
