"""Parameter groups: weight decay, learning rates, and what Muon may orthogonalise."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

import crosslayer
from crosslayer.connection import find_connections
from crosslayer.optim import layer_matrices, zero_connection_updates
from crosslayer.testing.tiny_model import DEFAULT_SPECS, perturb_weights, tiny_gpt, token_ids
from tests.hf.all_families import build_model
from tests.hf.backbones import ids, llama, vit

every_method = pytest.mark.parametrize("spec", DEFAULT_SPECS)


@every_method
def test_every_parameter_is_in_one_group(spec):
    model = tiny_gpt(spec)
    groups = crosslayer.param_groups(model, 1e-3, 0.1, embedding_lr_scale=50)
    names = [g["name"] for g in groups]
    assert len(set(names)) == len(names)
    grouped = [id(p) for g in groups for p in g["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert len(set(grouped)) == len(grouped)


@every_method
def test_connections_are_treated_as_they_say(spec):
    model = tiny_gpt(spec)
    groups = crosslayer.param_groups(model, 1e-3, 0.1, connection_lr_scale=0.25)
    group = {id(p): g for g in groups for p in g["params"]}
    own_ids = set()
    for connection in find_connections(model):
        for name, p in connection.named_parameters(recurse=False):
            if not p.requires_grad:
                continue
            assert group[id(p)]["weight_decay"] == (
                0.1 if name in connection.weight_decay_params else 0
            )
            own_ids.add(id(p))
            assert group[id(p)]["lr"] == 2.5e-4
            assert group[id(p)]["muon"] is False
        for p in connection.norms.parameters():
            assert group[id(p)]["weight_decay"] == 0 and not group[id(p)]["muon"]
    assert {g["lr"] for i, g in group.items() if i not in own_ids} == {1e-3}


def test_what_takes_weight_decay():
    """The maps of an input to coefficients, and the weights that multiply skips or outputs."""
    expected = {
        "highway": {"W"},
        "skip_gain": {"gain"},
        "denseformer": {"alpha"},
        "mudd": {"W1", "W2"},
        "hyper": {"dynamic_alpha_fn", "dynamic_beta_fn"},
        "frac": {"dynamic_alpha_fn", "dynamic_beta_fn"},
        "mhc": {"fn"},
        "mhc_lite": {"dynamic_alpha_fn", "dynamic_beta_fn"},
    }
    for name in crosslayer.available():
        assert crosslayer.make(name).method.weight_decay_params == expected.get(name, set()), name


def test_the_head_at_the_end_of_a_sequential_is_no_layer():
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)]
    model = nn.Sequential(
        *(nn.Sequential(block) for block in blocks), nn.LayerNorm(8), nn.Linear(8, 50)
    )
    assert [id(p) for p in layer_matrices(model)] == [id(block[0].weight) for block in blocks]


def test_parametrized_parameters_are_their_connections():
    model = tiny_gpt("hyper")
    connection = find_connections(model)[0]
    for name in ("dynamic_alpha_fn", "static_alpha"):
        register_parametrization(connection, name, nn.Identity())
    groups = crosslayer.param_groups(model, 1e-3, 0.1)
    group_names = {id(p): g["name"] for g in groups for p in g["params"]}
    originals = connection.parametrizations
    dynamic, static = originals.dynamic_alpha_fn.original, originals.static_alpha.original
    assert group_names[id(dynamic)] == "connection with weight decay"
    assert group_names[id(static)] == "connection"
    assert not {id(dynamic), id(static)} & {id(p) for p in layer_matrices(model)}


def test_parametrized_parameters_stay_in_float32():
    model = perturb_weights(tiny_gpt("hyper"))
    plain = copy.deepcopy(model).bfloat16()
    for connection in find_connections(model)[:-1]:
        register_parametrization(connection, "static_alpha", nn.Identity())
    assert torch.equal(model.bfloat16()(token_ids()), plain(token_ids()))
    assert find_connections(model)[0].parametrizations.static_alpha.original.dtype is torch.float32


def test_a_plain_tensor_in_the_place_of_a_parameter_is_float32():
    """`FullyShardedDataParallel` puts one there, in the dtype of its mixed precision."""
    connection = find_connections(tiny_gpt("mudd"))[2]
    half = connection.W1.detach().bfloat16().requires_grad_()
    del connection.W1
    connection.W1 = half
    assert connection.W1.dtype == torch.float32
    connection.W1.sum().backward()
    assert half.grad is not None


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_have_their_own_rate(tied):
    """Without a gradient, AdamW's step is its decay alone, which is that of other weights."""
    model = crosslayer.connect(llama(tie_word_embeddings=tied), "mudd")
    groups = crosslayer.param_groups(model, 1e-3, 0.1, embedding_lr_scale=50)
    group = {id(p): g for g in groups for p in g["params"]}
    embeddings, head = model.model.embed_tokens.weight, model.lm_head.weight
    assert group[id(embeddings)]["lr"] == pytest.approx(0.05)
    assert {g["lr"] for i, g in group.items() if i != id(embeddings)} == {1e-3}
    assert (group[id(head)]["lr"] == 1e-3) is not tied
    matrix = model.model.layers[0].mlp.up_proj.weight
    before = {parameter: parameter.detach().clone() for parameter in (embeddings, head, matrix)}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.AdamW(groups).step()
    for parameter, old in before.items():
        torch.testing.assert_close(parameter, old * (1 - 1e-4), rtol=1e-6, atol=0)
    assert crosslayer.param_groups(model, 1e-3, 0.1, embedding_lr_scale=0)[0]["lr"] == 0


def test_a_tied_embedding_is_one_wherever_its_head_stands():
    model = nn.ModuleDict({"head": nn.Linear(16, 65, bias=False), "embed": nn.Embedding(65, 16)})
    model["head"].weight = model["embed"].weight
    (group,) = crosslayer.param_groups(model, 1e-3, 0.1, embedding_lr_scale=50)
    assert group["name"] == "embeddings"


def test_muon_gets_no_heads():
    """Heads behind a norm, and in a list, as those of several next tokens."""
    model = nn.ModuleDict(
        {
            "head": nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 65)),
            "heads": nn.ModuleList([nn.Linear(16, 65) for _ in range(2)]),
            "blocks": nn.ModuleList([nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16))]),
        }
    )
    shapes = [
        p.shape for g in crosslayer.param_groups(model, 1.0, 0.1) if g["muon"] for p in g["params"]
    ]
    assert shapes == [(8, 16), (16, 8)]


def test_the_decay_of_a_state_is_no_matrix():
    """Mamba's A_log takes no weight decay, and Muon does not orthogonalise it."""
    model, _ = build_model("mamba", ids())
    crosslayer.connect(model, "mudd")
    group = {id(p): g for g in crosslayer.param_groups(model, 1.0, 0.1) for p in g["params"]}
    found = [p for name, p in model.named_parameters() if name.endswith("A_log")]
    assert found
    for parameter in found:
        assert parameter.dim() == 2
        assert group[id(parameter)]["name"] == "vectors"


class HeadNorm(nn.Module):
    """With a weight a head, as Cohere's norms of q and k."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))


class ExpertsLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_norm = HeadNorm()
        self.experts_bias = nn.Parameter(torch.zeros(4, 8))  # one a expert, as in gpt-oss
        self.rel_pos_h = nn.Parameter(torch.zeros(7, 8))
        self.linear = weight_norm(nn.Linear(8, 8))


def test_what_has_two_dimensions_and_is_no_map():
    model = nn.ModuleDict({"embed": nn.Embedding(16, 8), "layers": nn.ModuleList([ExpertsLayer()])})
    weight_norm(model["embed"])
    names = {id(p): name.rpartition("layers.0.")[2] for name, p in model.named_parameters()}
    groups = crosslayer.param_groups(model, 1.0, 0.1)
    assert {g["name"]: [names[id(p)] for p in g["params"]] for g in groups} == {
        "embeddings": [f"embed.parametrizations.weight.original{i}" for i in range(2)],
        "vectors": ["experts_bias", "q_norm.weight", "linear.bias"],
        "other matrices": ["rel_pos_h", "linear.parametrizations.weight.original0"],
        "matrices": ["linear.parametrizations.weight.original1"],
    }


@pytest.mark.parametrize("container", [nn.ModuleList, lambda models: nn.Sequential(*models)])
def test_muon_gets_no_heads_of_several_models(container):
    models = [llama(), llama()]
    expected = [id(p) for model in models for p in layer_matrices(model)]
    assert [id(p) for p in layer_matrices(container(models))] == expected


def test_muon_gets_the_layers_matrices_alone():
    model = crosslayer.connect(llama(), "mudd")
    muon = {
        id(p) for g in crosslayer.param_groups(model, 1e-3, 0.1) if g["muon"] for p in g["params"]
    }
    names = {n for n, p in model.named_parameters() if id(p) in muon}
    assert all(n.endswith("_proj.weight") for n in names) and len(names) == 3 * 7


def test_muon_of_layers_in_a_dict():
    """As in torchtitan, where the keys are numbers. nanoGPT's dict has names, so it is no list."""
    blocks = [nn.Linear(8, 8), nn.Linear(8, 8)]
    layers = nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
    model = nn.ModuleDict({"wte": nn.Embedding(16, 8), "layers": layers, "head": nn.Linear(8, 16)})
    assert [id(p) for p in layer_matrices(model)] == [id(block.weight) for block in blocks]


def test_muon_gets_no_embedding_or_head_of_a_sequential():
    embedding, block, head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
    layers = nn.Sequential(nn.Sequential(block))
    assert [*layer_matrices(nn.Sequential(embedding, layers, head))] == [block.weight]
    headed = nn.Sequential(embedding, layers, nn.Sequential(nn.LayerNorm(8), head))
    assert [*layer_matrices(headed)] == [block.weight]
    head.weight = embedding.weight
    assert [*layer_matrices(nn.ModuleList([embedding, nn.Sequential(block), head]))] == [
        block.weight
    ]


def test_muon_of_a_model_as_wide_as_its_vocabulary():
    """A matrix with as many outputs as there are tokens is a head only where it is one."""
    narrow, wide = (crosslayer.connect(llama(vocab_size=v), "mudd") for v in (97, 32))
    assert wide.config.hidden_size == wide.config.vocab_size == 32
    counts = [
        sum(len(g["params"]) for g in crosslayer.param_groups(m, 1e-3, 0.1) if g["muon"])
        for m in (narrow, wide)
    ]
    assert counts[0] == counts[1] == 3 * 7


def test_muon_leaves_the_head_of_a_classifier_alone():
    model = crosslayer.connect(vit(), "mudd")
    muon = {
        id(p) for g in crosslayer.param_groups(model, 1e-3, 0.1) if g["muon"] for p in g["params"]
    }
    names = [n for n, p in model.named_parameters() if id(p) in muon]
    assert names and not any("classifier" in n for n in names)


def test_tied_and_frozen():
    model = crosslayer.connect(llama(tie_word_embeddings=True), "hyper(frozen='B WC')")
    groups = crosslayer.param_groups(model, 1e-3, 0.1)
    assert sum(p is model.lm_head.weight for g in groups for p in g["params"]) == 1
    assert not any("connection" in g["name"] for g in groups)


def test_an_optimizer_takes_them():
    """A gain learns at the model's rate and decays, as in the authors' code."""
    model = tiny_gpt("skip_gain")
    optimizer = torch.optim.AdamW(crosslayer.param_groups(model, 1e-2, 0.1))
    gain = model.blocks[0].connections[0].gain
    before = gain.item()
    model(torch.randint(31, (2, 7))).square().mean().backward()
    optimizer.step()
    decayed = before * (1 - 1e-2 * 0.1)
    assert abs(gain.item() - decayed) == pytest.approx(1e-2, rel=1e-3)


def test_float32_streams_under_a_bf16_model():
    model = perturb_weights(crosslayer.connect(llama(), "hyper(stream_dtype='float32')")).bfloat16()
    ids = torch.randint(97, (2, 9))
    state = model.model.layers[0].connections[0].init(model.model.embed_tokens(ids))
    inputs, state = model.model.layers[0].connections[0].read(state)
    assert state.H.dtype == torch.float32 and inputs[0].dtype == torch.bfloat16
    assert model(ids).logits.dtype == torch.bfloat16


def test_zero_connection_updates():
    model = tiny_gpt("denseformer")
    optimizer = torch.optim.AdamW(crosslayer.param_groups(model, 1e-2, 0.1))
    peaks = [group["lr"] for group in optimizer.param_groups]
    alpha, head = model.readout.alpha, model.head.weight
    for step in range(5):
        before = alpha.detach().clone(), head.detach().clone()
        model(torch.randint(31, (2, 7))).square().mean().backward()
        if step < 3:
            zero_connection_updates(optimizer)
            assert not alpha.grad.any() and head.grad.any()
        optimizer.step()
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak
        assert torch.equal(alpha, before[0]) == (step < 3) and not torch.equal(head, before[1])


def test_zero_connection_updates_of_other_optimizers():
    model = tiny_gpt("denseformer")
    with pytest.raises(ValueError, match="groups have no names; make them with param_groups"):
        zero_connection_updates(torch.optim.AdamW(model.parameters()))
    # before a backward pass, and where a connection has no gradient in this step
    optimizer = torch.optim.AdamW(crosslayer.param_groups(model, 1e-2, 0.1))
    zero_connection_updates(optimizer)
    for group in optimizer.param_groups:
        assert group["lr"] == (0 if group["name"].startswith("connection") else 1e-2)
    assert model.readout.alpha.grad is None
