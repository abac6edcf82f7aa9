"""Analyses of models whose answer is known: by construction, or from the model's own tensors."""

import copy
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    GPTNeoXConfig,
    GPTNeoXModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

import crosslayer
from crosslayer import methods
from crosslayer.connection import find_connections
from crosslayer.connections.mgr import MGR
from crosslayer.hf import connect
from crosslayer.inspect import (
    compare_depths,
    find_alarms,
    find_map_findings,
    measure_cosines,
    measure_scales,
    observe_model,
    summarise_mixing,
    unfold_connections,
)
from crosslayer.inspect.ablation import ablate_sublayers
from crosslayer.inspect.alarms import _collapsed_groups
from crosslayer.inspect.inspection import InspectionSubject, inspect_model
from crosslayer.inspect.lens import measure_block_gradients, measure_site_losses
from crosslayer.inspect.similarity import _linear_cka
from crosslayer.inspect.unfolding import UnfoldedMap, _held_norm
from crosslayer.mixing import MixingWeights, identity_weights, join_columns
from crosslayer.norms import NormSpec, apply_norm
from crosslayer.testing.tiny_model import DEFAULT_SPECS, equal_tensors, perturb_weights
from tests.hf.plain_models import GPT
from tests.inspect.methods import has_mixing_weights

pytestmark = pytest.mark.filterwarnings("ignore:connecting")

IDS = torch.randint(50, (3, 11), generator=torch.Generator().manual_seed(0))
METHODS = list(filter(has_mixing_weights, DEFAULT_SPECS))
PADDED = torch.ones_like(IDS)
PADDED[1, :4] = 0
BATCHES = [{"input_ids": IDS, "attention_mask": PADDED}, {"input_ids": IDS[:1, :5]}]


def backbone(spec: str | None, parallel: bool = False, layers: int = 3, dim: int = 24) -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 50,
        "hidden_size": dim,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
    }
    if parallel:
        model = GPTNeoXModel(GPTNeoXConfig(**sizes, use_parallel_residual=True))
    else:
        model = LlamaModel(LlamaConfig(**sizes))
    if spec is not None:
        connect(model, spec)
    for connection in find_connections(model):
        perturb_weights(connection, 0.2)
    return model


class FixedOutput(nn.Module):
    """A sub-layer whose output is a fixed random vector: it depends on its depth alone."""

    def __init__(self, dim: int, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.y = nn.Parameter(torch.randn(dim, generator=generator))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.y.expand_as(inputs[0])


class OwnModel(nn.Module):
    """A model of one's own around a `Stack`."""

    def __init__(self, spec: str, layers: int = 4, dim: int = 16):
        super().__init__()
        sublayers = [FixedOutput(dim, seed) for seed in range(2 * layers)]
        self.stack = crosslayer.Stack(spec, sublayers, dim)

    def forward(self, embedding: Tensor) -> Tensor:
        return self.stack(embedding)


EMBEDDING = [{"embedding": torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(9))}]


@pytest.mark.parametrize(
    ("spec", "parallel"), [*((spec, False) for spec in METHODS), ("mudd", True), ("mgr", True)]
)
def test_the_map_of_a_padded_batch(spec, parallel):
    """Its error, of every option, is a law in crosslayer.testing."""
    unfolded = unfold_connections(backbone(spec, parallel), BATCHES)
    assert unfolded.error < 2e-5
    assert unfolded.tokens == 34
    assert unfolded.mean.shape == (len(unfolded.inputs), len(unfolded.sources))


@pytest.mark.parametrize("spec", METHODS)
def test_the_written_parts_of_each_token(spec):
    """Weights may differ by token, by channel, or by both (highway)."""
    visits = []

    class Recorder:
        def visit_site(self, visit):
            visits.append((visit.weights.write, visit.parts, visit.written))

    observe_model(backbone(spec), BATCHES[:1], [Recorder()])
    assert len(visits) == 7
    for write, parts, written in visits:
        of_tokens = write.float().expand(1, 29, *write.shape[-3:])[0]
        assert len(of_tokens) == len(parts) == len(written) == 29
        for matrix, of_token, result in zip(of_tokens, parts, written, strict=True):
            expected = sum(matrix[:, i] * part for i, part in enumerate(of_token))
            torch.testing.assert_close(result, expected)


def test_wrong_weights_are_named(monkeypatch):
    right = MGR.mixing_weights

    def wrong(connection, state):
        weights = right(connection, state)
        return weights._replace(read=weights.read * 1.1)

    monkeypatch.setattr(MGR, "mixing_weights", wrong)
    with pytest.raises(ValueError, match=r"mixing_weights of mgr do not give .*: at 0\.attn"):
        unfold_connections(backbone("mgr"), BATCHES)


@pytest.mark.parametrize(
    ("name", "shape", "columns"), [("carry", (4, 4), 1), ("write", (2, 17, 1, 2), 1)]
)
def test_weights_of_another_shape_are_named(monkeypatch, name, shape, columns):
    right = MGR.mixing_weights
    weights = {name: torch.ones(shape)}
    wrong = lambda connection, state: right(connection, state)._replace(**weights)  # noqa: E731
    monkeypatch.setattr(MGR, "mixing_weights", wrong)
    expected = rf"mixing_weights of mgr: {name} must be \[out {columns} K\] or .*, got"
    with pytest.raises(ValueError, match=expected):
        unfold_connections(backbone("mgr"), BATCHES)


# The wirings of Hyper-Connections, Figure 7, as matrices [[0, B], [A_m, A_r]] of `hyper`.
SEQUENTIAL = ("hyper(streams=1, dynamic=False, matrix=[[0, 1], [1, 0]])", "the output before")
PRE_NORM = ("prenorm", "all outputs before")
ATTENTION_HOP = [[0, 0, 1], [1, 1, 0], [0, 0, 0]]
MLP_HOP = [[0, 1, 0], [1, 1, 0], [1, 0, 0]]
TWO_HOP = (
    # Attention reads the residual and writes to stream 1; the MLP reads both.
    f"hyper(streams=2, dynamic=False, matrix=[{ATTENTION_HOP}, {MLP_HOP}])",
    "MLPs before, and the attention just before",
)


SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}


def test_a_head_that_does_more_is_not_read_out():
    """Granite divides its logits, which the final norm and the head alone do not."""
    config = GraniteConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2)
    plain = GraniteForCausalLM(config).eval()
    assert measure_site_losses(plain, BATCHES).losses[-1] > 0
    config.logits_scaling = 8.0
    with pytest.raises(ValueError, match="GraniteForCausalLM does more than its head to a hidden"):
        measure_site_losses(GraniteForCausalLM(config).eval(), BATCHES)


def test_the_lens_norms_a_post_norm_stream_once():
    """Its readout is normed already, by weights that are not 1."""
    plain = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2))
    model = perturb_weights(connect(plain, "postnorm")).eval()
    losses = measure_site_losses(model, [{"input_ids": IDS}])
    logits = model(input_ids=IDS).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten())
    assert losses.losses[-1] == pytest.approx(expected.item(), rel=1e-5)


def test_the_lens_reads_the_stream_where_ways_differ():
    """And so do the distances: the stream r, which the output joins, not the input of q."""
    model = perturb_weights(
        connect(LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2)), "mudd")
    )
    states = []
    first = find_connections(model)[2]  # of the second layer's attention
    handle = first.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    model.eval()(input_ids=IDS)
    handle.remove()
    r = first.state_parts(first.mix_inputs(states[0])[1])[-1]
    logits = model.lm_head(find_connections(model)[-1].apply_port_norms(r)[0])[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten())
    losses = measure_site_losses(model, [{"input_ids": IDS}])
    assert losses.losses[losses.labels.index("1.attn")] == pytest.approx(expected.item(), rel=1e-4)
    embedding = model.model.embed_tokens(IDS)
    cosine = torch.cosine_similarity(embedding[:, -1], r[:, -1], dim=-1)
    distance = compare_depths(model, [{"input_ids": IDS}]).angular[0, 2].item()
    assert distance == pytest.approx((cosine.arccos() / math.pi).mean().item(), abs=1e-4)


def test_what_scores_nothing_is_an_error():
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2)).eval()
    for analyse in (measure_site_losses, measure_block_gradients, ablate_sublayers):
        for batches in ([], [{"input_ids": IDS[:, :1]}]):
            with pytest.raises(ValueError, match="nothing was scored: give at least"):
                analyse(model, batches)


def test_gradients_of_a_frozen_model():
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2)).eval()
    expected = measure_block_gradients(model, BATCHES).rms
    model.requires_grad_(False)
    assert measure_block_gradients(model, BATCHES).rms == expected
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())


def test_a_model_that_is_no_number_fails_alone():
    """What scores it by the next token is not done for an encoder either."""
    broken = connect(LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2)).eval(), "mgr")
    with torch.no_grad():
        broken.lm_head.weight[0] = broken.model.embed_tokens.weight[:] = math.nan
    inspection = inspect_model("broken", InspectionSubject(broken, BATCHES), ("mixing", "scales"))
    assert "is not finite" in inspection.failures()[0] and not inspection.results
    sizes = dict(SIZES, num_attention_heads=2, max_position_embeddings=16)
    encoder = BertLMHeadModel(BertConfig(**sizes, is_decoder=False)).eval()
    inspection = inspect_model("encoder", InspectionSubject(encoder, BATCHES), ("lens", "cosines"))
    assert inspection.failures()[0].startswith("lens: BertLMHeadModel sees the tokens")
    assert list(inspection.results) == ["cosines"]
    # what does not apply to it is not called failed, and without batches nothing is
    empty = [{"input_ids": IDS, "attention_mask": torch.zeros_like(IDS)}]
    observed = ("mixing", "unfolded", "cosines", "distances", "scales")
    for analyses, batches, failures in (
        (("ways", "pruning"), BATCHES, 0),
        (("lens", "ablation"), [], 2),
        (observed, empty, 5),
    ):
        inspection = inspect_model("encoder", InspectionSubject(encoder, batches), analyses)
        reasons = list(inspection.not_done.values())
        assert all(reason.startswith("nothing was") for reason in reasons)
        assert len(reasons) == failures and not inspection.results


class TwoStreams(NamedTuple):
    first: Tensor
    second: Tensor
    y: Tensor | None = None


class SecondStream(crosslayer.Connection[TwoStreams]):
    """Outputs go to a second stream, the embedding stays in the first, and their sum is read."""

    start = 0.0  # of the second stream, in embeddings

    def initial_state(self, x):
        return TwoStreams(x, self.start * x)

    def mix_inputs(self, state):
        second = state.second if state.y is None else state.second + state.y
        return (state.first + second,), TwoStreams(state.first, second)

    def state_parts(self, state):
        return state.first, state.second

    def mixing_weights(self, state):
        streams = identity_weights(2, state.first)
        write = streams if state.y is None else join_columns(streams, streams[:, 1:])
        return MixingWeights(write, torch.ones_like(streams[:1]), streams)


def test_the_weights_of_a_float64_model():
    """DenseFormer puts its weights into an identity, which has their precision."""
    model = OwnModel("denseformer").double()
    batches = [{name: x.double() for name, x in batch.items()} for batch in EMBEDDING]
    assert unfold_connections(model, batches).error < 1e-6


def test_a_stream_may_start_empty(monkeypatch):
    monkeypatch.setattr(methods, "_registered", {"second_stream": SecondStream})
    unfolded = unfold_connections(OwnModel("second_stream"), EMBEDDING)
    assert torch.equal(unfolded.mean, torch.ones(9, 9).double().tril()) and unfolded.error < 1e-6
    monkeypatch.setattr(SecondStream, "start", 0.5)
    with pytest.raises(ValueError, match="a first state whose parts are the embedding or zero"):
        unfold_connections(OwnModel("second_stream"), EMBEDDING)


@pytest.mark.parametrize(("spec", "reads"), [SEQUENTIAL, PRE_NORM, TWO_HOP])
def test_known_wirings(spec, reads):
    unfolded = unfold_connections(OwnModel(spec), EMBEDDING)
    expected = torch.zeros(9, 9)
    for k in range(9):
        for j in range(k + 1):
            is_mlp_or_embedding = j % 2 == 0
            expected[k, j] = {
                "the output before": j == k,
                "all outputs before": True,
                "MLPs before, and the attention just before": is_mlp_or_embedding or j == k,
            }[reads]
    rows = 8 if reads == TWO_HOP[1] else 9  # the readout sums streams 0 and 1
    assert torch.equal(unfolded.mean[:rows], expected[:rows].double())
    assert unfolded.std.abs().max() == 0
    assert unfolded.inputs[:3] == ["0.attn", "0.mlp", "1.attn"]
    assert unfolded.sources == ["embedding", *unfolded.inputs[:-1]]


def test_findings_of_known_wirings():
    plain = find_map_findings(unfold_connections(OwnModel("prenorm"), EMBEDDING))
    assert plain.lambda_score == 1
    assert plain.embedding_in_readout == 1
    assert plain.parallel_pairs == plain.wasted == plain.opposite_signs == []
    assert plain.attention_share == pytest.approx(20 / 45)

    # An MLP that does not read the attention before it (a parallel block) and keeps it for later.
    parallel = (
        "hyper(streams=2, dynamic=False, matrix=["
        "[[0, 0, 1], [1, 1, 0], [0, 0, 1]], [[0, 1, -1], [1, 1, 0], [0, 1, 1]]])"
    )
    found = find_map_findings(unfold_connections(OwnModel(parallel), EMBEDDING))
    assert found.parallel_pairs == [(f"{layer}.attn", f"{layer}.mlp") for layer in range(4)]
    assert "0.mlp (streams 0, 1)" in found.opposite_signs

    # A model of one stream whose third write goes nowhere.
    model = OwnModel("hyper(streams=1, dynamic=False)")
    with torch.no_grad():
        find_connections(model)[2].static_beta.zero_()
    assert find_map_findings(unfold_connections(model, EMBEDDING)).wasted == ["1.attn"]


def known_map(rows: list[list[float]], streams: Tensor | None = None) -> UnfoldedMap:
    """A map of attentions and MLPs by the weights of each input, and to each stream."""
    sublayers = [f"{k // 2}.{('attn', 'mlp')[k % 2]}" for k in range(len(rows) - 1)]
    mean = nn.utils.rnn.pad_sequence([torch.tensor(row).double() for row in rows], True)
    return UnfoldedMap(
        sources=["embedding", *sublayers],
        inputs=[*sublayers, "readout"],
        sources_before=list(map(len, rows)),
        mean=mean,
        std=torch.zeros_like(mean),
        one_token=mean,
        has_streams=streams is not None,
        stream_means=[] if streams is None else [streams],
        one_token_streams=[],
        tokens=1,
        error=0.0,
        by_projection=False,
    )


def test_findings_of_a_known_map():
    rows = [[1.0] * sources for sources in range(1, 10)]
    rows[7][:2] = [3.0, 3.0]  # the ends' mean is 2
    rows[8][0] = 33.0  # the ends' mean is 9
    found = find_map_findings(known_map(rows))
    assert found.lambda_score == (2 + 9) / 2
    assert found.embedding_in_readout == pytest.approx(33 / (41 / 9))
    assert found.wasted == [], "whatever the embedding's weight is"


def test_the_reach_of_attentions_is_that_to_far_layers():
    rows = [[1.0] * sources for sources in range(1, 10)]
    for k, row in enumerate(rows):
        for j in range(1, len(row), 2):  # of attentions
            is_far = k // 2 - j // 2 > 1
            row[j] = 0.5 if is_far else 7.0
    assert find_map_findings(known_map(rows)).attention_reach == 0.5


def test_a_sign_that_is_opposite_in_a_weight_that_counts():
    streams = torch.tensor([[1.0, 0.5, 1.0], [1.0, -0.5, -0.05]])
    found = find_map_findings(known_map([[1.0], [1.0] * 2, [1.0] * 3], streams))
    assert found.opposite_signs == ["0.attn (streams 0, 1)"]


def test_own_weights_of_denseformer():
    model = backbone("denseformer")
    sites = summarise_mixing(model, BATCHES)
    connections = find_connections(model)
    for connection, site in zip(connections, sites, strict=True):
        if connection.alpha is not None:
            torch.testing.assert_close(site.read_mean[0], connection.alpha.detach().double())
            assert site.read_std.max() < 1e-12  # static


def test_mean_and_deviation_over_tokens_of_several_batches():
    model = backbone("mudd")
    together = summarise_mixing(model, BATCHES)[2]
    values = []

    def collect(connection, arguments):
        state = arguments[0]
        _, A = connection.write_and_weigh(state.h, state.y)
        values.append(A.flatten(0, 1))

    handle = find_connections(model)[2].register_forward_pre_hook(collect)
    with torch.no_grad():
        for batch in BATCHES:
            model(**batch)
    handle.remove()
    values[0] = values[0][PADDED.flatten().bool()]
    A = torch.cat(values).double()  # [tokens C L]
    assert len(A) == 34
    torch.testing.assert_close(together.read_mean, A.mean(0), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(together.read_std, A.std(0, correction=0), atol=1e-6, rtol=1e-4)
    assert together.inputs == ["1.q", "1.k", "1.v", "1.r"]
    assert together.parts == ["X_0", "X_1"]


def test_a_stream_that_differs_between_tokens_beside_ways_that_do_not():
    """A norm after the mixture of r alone; q, k and v have static weights."""
    site = summarise_mixing(backbone("mudd(normed='post', dynamic=False)"), BATCHES)[2]
    assert site.inputs == ["1.q", "1.k", "1.v", "1.r"]
    assert site.read_std[:3].max() < 1e-6 < 1e-3 < site.read_std[3].max()
    torch.testing.assert_close(site.read_mean[3], site.carry_mean[-1])


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("hyper(streams=2)", ["stream 0", "stream 1"]),
        ("attnres", ["v_0", "v_1"]),
        ("denseformer", ["X_0", "stream"]),
        ("altup", [f"part {number}" for number in range(4)]),
    ],
)
def test_labels_of_parts(spec, parts):
    assert summarise_mixing(backbone(spec), BATCHES)[1].parts == parts


def test_nothing_is_changed_in_a_plain_model():
    model = backbone(None).train()
    config = model.config
    model.layers[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    out = model(IDS).last_hidden_state
    unfolded = unfold_connections(model, BATCHES)
    assert torch.equal(torch.tril(torch.ones(7, 7)).double(), unfolded.mean)
    assert [type(module) for module in model.modules()] == kinds
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert model.training
    assert not model.layers[1].training
    assert equal_tensors(model.state_dict(), before)
    assert model.config is config
    assert torch.equal(model(IDS).last_hidden_state, out)


def test_a_plain_post_norm_model_is_seen_as_post_norm():
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    model = BertModel(config, add_pooling_layer=False).eval()
    connected = crosslayer.connect(copy.deepcopy(model), "postnorm")
    plain = unfold_connections(model, BATCHES)
    assert torch.equal(plain.mean, unfold_connections(connected, BATCHES).mean)
    assert plain.error < 1e-5
    assert not find_connections(model)
    assert inspect_model("bert", InspectionSubject(model, BATCHES), ()).connection == "postnorm"


def test_a_model_of_plain_torch_with_its_own_argument():
    """nanoGPT's backbone is a ModuleDict, which cannot be called."""
    model = connect(GPT().eval(), "mudd")
    unfolded = unfold_connections(model, [{"ids": torch.arange(6)[None]}])
    assert unfolded.inputs[-1] == "readout" and unfolded.error < 1e-5


class TwoMLPs(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.first, self.second = (nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(self.norm(x))
        return x + self.second(self.norm(x))


@pytest.mark.parametrize("spec", ["mudd", "hyper"])
def test_sub_layers_of_one_kind_in_a_layer(spec):
    model = GPT()
    model.transformer["h"] = nn.ModuleList(TwoMLPs() for _ in range(3))
    perturb_weights(connect(model, spec))
    batches = [{"ids": torch.randint(50, (2, 5))}]
    labels = [f"{layer}{letter}.mlp" for layer in range(3) for letter in ("", "b")]
    scales = measure_scales(model, batches)
    assert [site.label for site in scales] == [*labels, "readout"]
    last_labels = [mixing.label for mixing in summarise_mixing(model, batches)][-2:]
    assert last_labels == [labels[-1], "readout"]
    unfolded = unfold_connections(model, batches)
    assert unfolded.sources[1:] == labels and unfolded.error < 1e-4
    assert compare_depths(model, batches).labels[:6] == labels
    find_map_findings(unfolded)


def test_norms_of_a_wider_dtype_than_their_model():
    """As PEFT leaves them in a model that it prepares for training in few bits."""
    model = backbone(None).bfloat16()
    for norm in (m for m in model.modules() if "Norm" in type(m).__name__):
        norm.float().weight.data.normal_()
    assert measure_scales(model, BATCHES)
    assert not find_connections(model)


def test_a_model_that_reports_its_hidden_states_is_seen_once():
    model = backbone("mudd")
    expected = unfold_connections(model, BATCHES).mean
    sizes = [site.output_rms for site in measure_scales(model, BATCHES)]
    model.config.output_hidden_states = True  # layers ask connections for hidden states too
    assert torch.equal(unfold_connections(model, BATCHES).mean, expected)
    assert [site.output_rms for site in measure_scales(model, BATCHES)] == sizes


def test_cosines_and_distances_of_planted_inputs():
    model = OwnModel("prenorm", layers=2)
    sublayers = model.stack.sublayers
    with torch.no_grad():
        for sublayer in sublayers:
            sublayer.y.zero_()  # the stream never changes
    cosines = measure_cosines(model, EMBEDDING)
    assert cosines.labels == ["0.attn", "0.mlp", "1.attn", "1.mlp", "readout"]
    assert cosines.adjacent[0].isnan().all()
    torch.testing.assert_close(cosines.adjacent[1:], torch.ones(4, 3).double())
    torch.testing.assert_close(cosines.embedding, torch.ones(5, 3).double())
    distances = compare_depths(model, EMBEDDING)
    assert distances.angular.max() < 1e-3
    torch.testing.assert_close(distances.cka, torch.ones(5, 5).double())

    last = torch.zeros(1, 2, 16)
    last[0, 0, 0] = last[0, 1, 1] = 1  # of two tokens only the second counts
    with torch.no_grad():
        sublayers[0].y[0] = 1
    distances = compare_depths(model, [{"embedding": last}])
    assert distances.angular[0, 1] == pytest.approx(math.acos(1 / math.sqrt(2)) / math.pi)
    with torch.no_grad():
        sublayers[0].y.copy_(-2 * last[0, 1])
    assert compare_depths(model, [{"embedding": last}]).angular[0, 1] == pytest.approx(1)


def test_cka_is_that_of_centred_tokens():
    x = 3 + torch.randn(3, 20, 8, generator=torch.Generator().manual_seed(0)).double()
    centring = torch.eye(20).double() - 1 / 20

    def hsic(a: Tensor, b: Tensor) -> Tensor:
        return torch.trace(a @ a.T @ centring @ b @ b.T @ centring)

    expected = torch.zeros(3, 3).double()
    for i, a in enumerate(x):
        for j, b in enumerate(x):
            expected[i, j] = hsic(a, b) / (hsic(a, a) * hsic(b, b)).sqrt()
    assert expected.min() < 0.9
    torch.testing.assert_close(_linear_cka(x), expected)


def test_rms_of_a_planted_embedding_and_output():
    """The root of the mean over tokens and channels; of hidden states, the mean over tokens."""
    model = OwnModel("prenorm", layers=1)
    with torch.no_grad():
        model.stack.sublayers[0].y.copy_(torch.tensor([1.0, 7] * 8))
    ones = torch.ones(16)
    embedding = torch.stack([ones, 7 * ones])[None]  # [B T D]
    sites = measure_scales(model, [{"embedding": embedding}])
    assert [site.output_rms for site in sites[:2]] == pytest.approx([5, 5])
    assert sites[0].stream_rms.tolist() == pytest.approx([5])
    assert sites[0].hidden_rms == pytest.approx(4)


def test_the_largest_magnitudes_are_of_all_batches():
    values = torch.zeros(3, 1, 1, 16)
    values[:, 0, 0, 0] = torch.tensor([3.0, -5, 1])
    batches = [{"embedding": embedding} for embedding in values]
    site = measure_scales(OwnModel("prenorm", layers=1), batches)[0]
    assert site.output_largest == site.hidden_largest == [5, 3, 1]
    assert site.written_largest.tolist() == [5]


def test_a_stream_once_an_output_is_written():
    """Its change is relative to what it has become: 3 of 4."""
    model = OwnModel("prenorm", layers=1)
    nn.init.constant_(model.stack.sublayers[0].y, 3.0)
    ones = [{"embedding": torch.ones(1, 2, 16)}]
    changes = [site.stream_change for site in measure_scales(model, ones)]
    assert changes[0] is None
    assert torch.cat(changes[1:3]).tolist() == pytest.approx([0, 3 / 4])
    norms = [site.part_norms.item() for site in summarise_mixing(model, ones)]
    assert norms[:2] == pytest.approx([4, 16])


def test_the_write_to_each_fraction():
    model = OwnModel("frac(dynamic=False)")
    with torch.no_grad():
        find_connections(model)[0].static_beta.copy_(torch.tensor([2.0, 3.0]))
    assert summarise_mixing(model, EMBEDDING)[1].write_mean.tolist() == [2, 3]


def test_gains_are_of_the_product_in_the_order_of_depth():
    """[[1, 0], [-3, 1]] @ [[1, 2], [0, 1]] = [[1, 2], [-3, -5]]."""
    model = OwnModel("hyper(streams=2, dynamic=False)", layers=1)
    attention, mlp = find_connections(model)[:2]
    with torch.no_grad():
        attention.static_alpha[:, 1:] = torch.tensor([[1.0, 2], [0, 1]]).T
        mlp.static_alpha[:, 1:] = torch.tensor([[1.0, 0], [-3, 1]]).T
    site = measure_scales(model, EMBEDDING)[1]
    assert site.forward_gain == 8  # the row |-3| + |-5|
    assert site.backward_gain == 7  # the column |2| + |-5|


def test_equal_streams_have_collapsed():
    model = OwnModel("hyper(streams=2, dynamic=False)")
    sites = measure_scales(model, EMBEDDING)
    for site in sites:
        assert site.stream_cosine[0, 1] == pytest.approx(1)
    alarms = find_alarms(sites, summarise_mixing(model, EMBEDDING))
    assert list(map(str, alarms)) == ["collapsed streams: 0, 1, smallest mean cosine 1.0000"]


def test_streams_that_have_collapsed_together_are_one_alarm():
    cosine = torch.eye(6)
    for a, b, value in ((0, 2, 0.9995), (2, 5, 0.9996), (0, 5, 0.9985), (1, 4, 0.9999)):
        cosine[a, b] = cosine[b, a] = value
    assert _collapsed_groups(cosine) == [[0, 2, 5], [1, 4]]
    cosine[1, 5] = cosine[5, 1] = 0.9992
    assert _collapsed_groups(cosine) == [[0, 1, 2, 4, 5]], "5 joins two groups"


def test_planted_sizes_and_alarms():
    model = OwnModel("hyper(streams=2, dynamic=False)")
    connections = find_connections(model)
    with torch.no_grad():
        for connection in connections[:-1]:
            connection.static_beta[1] = 0  # stream 1 is never written,
            connection.static_alpha[1, 0] = 0  # nor read
            connection.static_alpha[0, 0] = 1
        model.stack.sublayers[3].y[5] = 1000  # a massive activation
    sites = measure_scales(model, EMBEDDING)
    assert sites[4].output_largest == pytest.approx([1000] * 3)
    assert sites[4].stream_rms[0] < 20  # the site applies the write
    assert sites[5].stream_rms[0] > 200
    assert sites[-1].forward_gain == 1
    alarms = find_alarms(sites, summarise_mixing(model, EMBEDDING))
    assert [alarm.label for alarm in alarms] == ["constant stream: 1", "unused stream: 1"]

    # a stream that no sub-layer reads is of use where another one takes from it
    with torch.no_grad():
        connections[2].static_alpha[1, 1] = 0.5
    alarms = find_alarms(measure_scales(model, EMBEDDING), summarise_mixing(model, EMBEDDING))
    assert [alarm.label for alarm in alarms] == ["constant stream: 1"]
    with torch.no_grad():
        connections[2].static_alpha[1, 1] = 0

    with torch.no_grad():
        for connection in connections[:-1]:
            connection.static_alpha[:, 1:] *= 1.5
    assert measure_scales(model, EMBEDDING)[-2].forward_gain == pytest.approx(1.5**8)


def test_gates_of_mgr():
    model = backbone("mgr(streams=2)", layers=4)
    sites = measure_scales(model, BATCHES)
    assert [site.gate is not None for site in sites] == [False] * 2 + [True] * 7
    gate = sites[4].gate
    assert gate.counts.sum() == 34 * 2
    assert 0 < gate.quartiles[0] < gate.mean < gate.quartiles[4] < 1
    assert (gate.quartiles.diff(dim=-1) >= 0).all()


def test_no_batch_is_an_error():
    with pytest.raises(ValueError, match="nothing was observed"):
        unfold_connections(backbone("prenorm"), [])


def test_connections_that_are_not_called_are_an_error():
    """Hooks see no call of `read`."""

    class Direct(crosslayer.Stack):
        def forward(self, x):
            return self.connections[-1].read(self.connections[0].init(x))[0][0]

    model = Direct("prenorm", [nn.Identity()] * 2, 4)
    batch = {"x": torch.randn(1, 3, 4)}
    for analyse in (unfold_connections, measure_scales, summarise_mixing):
        with pytest.raises(ValueError, match=r"a model that calls its connections as modules"):
            analyse(model, [batch])


def test_the_bias_of_a_norm_is_a_constant():
    """The last contribution; those of the sources do not have it."""
    contributions = torch.randn(2, 4, 8)
    norm = NormSpec(torch.randn(8), torch.randn(8), 1e-5, centred=True)
    held = _held_norm(contributions, norm)
    torch.testing.assert_close(held.sum(1), apply_norm(contributions.sum(1), norm))
    plain = _held_norm(contributions, norm._replace(bias=None))
    assert torch.equal(held[:, :-1], plain[:, :-1])


def test_a_learned_prompt_is_refused():
    """PEFT's module around the model adds it, and the sites are those of the model within."""
    import peft  # takes seconds

    connected = connect(LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2)), "mudd")
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(connected, prompt)
    batch = {"input_ids": torch.tensor([[1, 2, 3, 4]])}
    with pytest.raises(
        ValueError, match=r"PromptTuningConfig: .* not observed; its get_base_model"
    ):
        measure_scales(model, [batch])
    assert measure_scales(model.get_base_model(), [batch])


def test_a_batch_without_names_is_an_error():
    with pytest.raises(TypeError, match=r"of the model.s arguments by name, .* got a Tensor"):
        measure_scales(connect(GPT(), "mudd"), [torch.zeros(2, 5, dtype=torch.long)])


def test_a_batch_without_tokens_changes_nothing():
    model = backbone("hyper")
    empty = {"input_ids": IDS, "attention_mask": torch.zeros_like(IDS)}
    expected = summarise_mixing(model, BATCHES)
    for batches in ([empty, *BATCHES], [*BATCHES, empty]):
        for site, other in zip(expected, summarise_mixing(model, batches), strict=True):
            torch.testing.assert_close(other.read_mean, site.read_mean, rtol=0, atol=0)
