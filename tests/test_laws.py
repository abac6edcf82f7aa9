"""The laws every connection obeys: one suite over every file in connections/ and the variants it names."""

import copy
import io
import json
import pickle

import pytest
import torch
import torch.multiprocessing
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

import crosslayer
from tests.support import two_ranks
from tests.support.tiny import (
    ARMS,
    connections,
    equal,
    gpt,
    loss_and_gradients,
    shake,
    tokens,
    without_eps,
)

both = pytest.mark.parametrize("parallel", [False, True], ids=["sequential", "parallel"])
every = pytest.mark.parametrize("arm", ARMS)
# a compile takes seconds: the variants, and parallel blocks, are compiled among the slow tests
slowly = pytest.mark.parametrize(
    "parallel", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["sequential", "parallel"]
)
compiled = pytest.mark.parametrize(
    "arm",
    [
        arm if arm in crosslayer.available() else pytest.param(arm, marks=pytest.mark.slow)
        for arm in ARMS
    ],
)


def chain(arm: str, parallel: bool, dim: int = 6, layers: int = 4) -> list[crosslayer.Connection]:
    """The connections alone, in float64 with shaken weights."""
    make = crosslayer.make(arm)
    norm = lambda port: torch.nn.RMSNorm(dim, eps=1e-6)  # noqa: E731
    sites = [make(site, dim, norm).double() for site in crosslayer.plan(layers, parallel)]
    return [shake(site) for site in sites]


def in_float32(function, *state):
    """What the function gives when it is computed in float32 throughout, rounded to what it gives in bf16."""
    wide = tree_map(lambda x: x.float() if isinstance(x, Tensor) else x, state)
    return tree_map(
        lambda x, like: x.to(like.dtype) if isinstance(x, Tensor) else x,
        function(*wide),
        function(*state),
    )


def run(sites: list[crosslayer.Connection], x: Tensor) -> Tensor:
    """The whole depth with a sub-layer that treats every token alone and tells its inputs apart."""
    state = sites[0].init(x)
    for k, site in enumerate(sites[:-1]):
        inputs, state = site.read(state)
        state = site.write(
            state, sum(torch.tanh((i + k + 1) * x.roll(i, -1)) for i, x in enumerate(inputs))
        )
    return sites[-1].readout(state)


@both
@every
def test_every_token_is_alone(arm, parallel):
    sites, x = chain(arm, parallel), torch.randn(2, 6, 6, dtype=torch.float64)
    order = torch.randperm(6)
    torch.testing.assert_close(run(sites, x)[:, order], run(sites, x[:, order]), rtol=0, atol=1e-12)


@both
@every
def test_causal(arm, parallel):
    model, ids = gpt(arm, parallel).double(), tokens()
    torch.testing.assert_close(model(ids)[:, :4], model(ids[:, :4]), rtol=0, atol=1e-12)


@both
@every
def test_state_cuts_bitwise(arm, parallel):
    model, ids = gpt(arm, parallel), tokens()
    x = model.embed(ids) + model.position(torch.arange(ids.shape[1]))
    for cut in range(len(model.blocks)):
        state = model.readout.init(x)
        for block in model.blocks[:cut]:
            state = block(state)
        assert hasattr(state, "_fields"), "a state is a NamedTuple"
        leaves, spec = tree_flatten(state)
        assert all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves)
        assert not any(isinstance(leaf, torch.nn.Parameter) for leaf in leaves), (
            "FSDP would free it under the next block"
        )
        state = tree_unflatten([leaf if leaf is None else leaf.clone() for leaf in leaves], spec)
        for block in model.blocks[cut:]:
            state = block(state)
        assert torch.equal(model.head(model.readout.readout(state)), model(ids))


@both
@every
def test_gradient_checkpointing_is_bitwise(arm, parallel):
    model, ids = gpt(arm, parallel), tokens()
    loss, gradients = loss_and_gradients(model, ids)
    model.checkpointing = True
    again, recomputed = loss_and_gradients(model, ids)
    assert torch.equal(loss, again) and equal(gradients, recomputed)


@both
@every
def test_read_recomputes_bitwise(arm, parallel):
    model, ids = gpt(arm, parallel), tokens()
    loss, gradients = loss_and_gradients(model, ids)
    for connection in connections(model):
        read = connection.read
        connection.read = lambda state, read=read: checkpoint(read, state, use_reentrant=False)
    again, recomputed = loss_and_gradients(model, ids)
    assert torch.equal(loss, again) and equal(gradients, recomputed)


@both
@every
def test_norms_taken_along_are_the_ports_own(arm, parallel):
    sites, x = chain(arm, parallel), torch.randn(2, 6, 6, dtype=torch.float64)
    state, taken = sites[0].init(x), []
    for site in sites:
        inputs, after = site.read(state)
        norms = site.known() if site.fuses else ()
        if norms:
            own, own_after = site.mix_inputs(state, *norms)
            for a, b in zip(
                (*own, *tree_leaves(own_after)), (*inputs, *tree_leaves(after)), strict=True
            ):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        taken.append(bool(norms))
        state = site.write(
            after, sum(torch.tanh((i + 2) * x.roll(i, -1)) for i, x in enumerate(inputs))
        )
    assert taken[0] or parallel or not sites[0].fuses


@slowly
@compiled
def test_one_graph(arm, parallel):
    model, ids = gpt(arm, parallel), tokens()
    loss, gradients = loss_and_gradients(model, ids)
    model.compile(fullgraph=True, backend="aot_eager")
    again, compiled = loss_and_gradients(model, ids)
    torch.testing.assert_close(again, loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(compiled, gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
# 8 columns' sums have had a wrong gradient, where autograd made it
@pytest.mark.parametrize(
    "arm",
    [
        "prenorm",
        "mudd",
        "hyper",
        "attnres(block_size=3)",
        "mgr",
        "hyper(streams=6)",
        "mhc(streams=2)",
    ],
)
def test_inductor(arm):
    model, ids = gpt(arm, layers=3), tokens()
    loss, gradients = loss_and_gradients(model, ids)
    model.compile(fullgraph=True)
    again, compiled = loss_and_gradients(model, ids)
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(compiled, gradients, rtol=1e-4, atol=1e-5)


@slowly
@compiled
def test_blocks_compile_to_few_graphs(arm, parallel):
    """Per-block compile: a graph a structure of state, parameters and declared wiring; no other integer is baked in."""
    from torch._dynamo.testing import CompileCounter

    model, counter, ids = gpt(arm, parallel, layers=6), CompileCounter(), tokens()
    state, structures = model.readout.init(model.embed(ids)), set()
    for block in model.blocks:
        wiring = [tuple((n, p.shape) for n, p in block.named_parameters())]
        wiring += [
            tuple(v for v in vars(c).values() if isinstance(v, int)) for c in block.connections
        ]
        structures.add(
            (tuple(leaf is not None and leaf.stride() for leaf in tree_leaves(state)), *wiring)
        )
        state = block(state)
        block.compile(fullgraph=True, backend=counter)
    model(ids)
    assert counter.frame_count <= len(structures)


@both
@every
def test_no_parameter_is_dead(arm, parallel):
    model = gpt(arm, parallel)
    _, gradients = loss_and_gradients(model, tokens())
    alive = {n for n, g in gradients.items() if g.abs().max() > 0}
    assert alive == {n for n, p in model.named_parameters() if p.requires_grad}


@both
@every
def test_starts_as_prenorm_where_it_says_so(arm, parallel):
    plain = gpt("prenorm", parallel, eps=0.0, shaken=False).double()
    model = gpt(without_eps(arm), parallel, eps=0.0, shaken=False).double()
    body = plain.state_dict().keys() & model.state_dict().keys()
    assert all(torch.equal(plain.state_dict()[k], model.state_dict()[k]) for k in body), (
        "one body for every arm"
    )
    error = (model(tokens()) - plain(tokens())).abs().max()
    if crosslayer.make(arm).method.starts_as_prenorm:
        assert error < 1e-12
    else:
        assert error > 1e-3, "starts as PreNorm but does not say so"


@both
@every
def test_gradcheck(arm, parallel):
    sites = chain(arm, parallel, dim=6, layers=2)
    x = torch.randn(1, 2, 6, dtype=torch.float64, requires_grad=True)
    parameters = [p for site in sites for p in site.parameters() if p.requires_grad]
    assert torch.autograd.gradcheck(lambda x, *_: run(sites, x), (x, *parameters), fast_mode=True)


@both
@every
def test_copies_and_pickles_after_a_step(arm, parallel):
    model, ids = gpt(arm, parallel), tokens()
    loss_and_gradients(model, ids)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    expected = loss_and_gradients(model, ids)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss, gradients = loss_and_gradients(twin, ids)
        assert torch.equal(loss, expected[0]) and equal(gradients, expected[1])


@both
@every
def test_saves_and_loads_bitwise(arm, parallel):
    model, file = gpt(arm, parallel), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    twin = gpt(arm, parallel, shaken=False)
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(twin(tokens()), model(tokens()))


@both
@every
def test_forward_stores_nothing(arm, parallel):
    model = gpt(arm, parallel)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    model(tokens())
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert all(vars(module)[k] is before[name][k] for k in vars(module)), (
            f"{name} changed in forward"
        )


@both
@every
def test_parameters_keep_the_house_rules(arm, parallel):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    make, norm = crosslayer.make(arm), lambda port: torch.nn.RMSNorm(6)
    with torch.device("meta"):
        for site in crosslayer.plan(4, parallel):
            assert all(p.is_meta for p in make(site, 6, norm).parameters())
    sites = [make(site, 6, norm) for site in crosslayer.plan(4, parallel)]
    assert torch.equal(state, torch.get_rng_state()), (
        "building a connection must not move the global random state"
    )
    names = {n for site in sites for n, _ in site.named_parameters(recurse=False)}
    assert (
        make.method.weight_decay_params & names
        or not make.method.weight_decay_params
        or "dynamic=False" in arm
    )
    for site in sites:
        own = dict(site.named_parameters(recurse=False))
        assert all(p.dim() >= 1 and p.dtype == torch.float32 for p in own.values())
        fresh = {n: p.detach().clone() for n, p in own.items()}
        shake(site)
        site.reset_parameters()
        assert equal(fresh, {n: p.detach() for n, p in own.items()}), (
            "reset_parameters gives the initial values back"
        )


@both
@every
def test_a_bf16_model_keeps_coefficients_in_float32(arm, parallel):
    exact = gpt(arm, parallel).double()
    model = copy.deepcopy(exact).float().bfloat16()
    for connection in connections(model):
        assert all(p.dtype == torch.float32 for p in connection.parameters(recurse=False))
        assert all(p.dtype == torch.bfloat16 for p in connection.norms.parameters())
    logits = model(tokens())
    assert logits.dtype == torch.bfloat16
    plain = gpt("prenorm", parallel).double()
    rounding = (copy.deepcopy(plain).float().bfloat16()(tokens()).double() - plain(tokens())).norm()
    error = (logits.double() - exact(tokens())).norm()
    assert error < 4 * rounding, "a connection may not lose more than bf16 itself does"


@both
@every
def test_bf16_error_is_at_most_twice_the_float32_internal_reference(arm, parallel):
    """The reference reads every bf16 state in float32 throughout and rounds what it gives out, nothing in between."""
    dim = 48
    make = crosslayer.make(arm)
    exact = [
        shake(make(site, dim, lambda port: torch.nn.Identity()).double())
        for site in crosslayer.plan(4, parallel)
    ]
    sites = [copy.deepcopy(site).float() for site in exact]
    x = torch.randn(4, 32, dim).bfloat16()

    def reference(sites, x):
        state = sites[0].init(x)
        for k, site in enumerate(sites[:-1]):
            inputs, state = in_float32(site.read, state)
            state = site.write(
                state, sum(torch.tanh((i + k + 1) * x.roll(i, -1)) for i, x in enumerate(inputs))
            )
        return in_float32(sites[-1].readout, state)

    truth = run(exact, x.double())
    ours, theirs = ((f(sites, x).double() - truth).norm() for f in (run, reference))
    assert ours <= 2 * theirs


@both
@every
def test_autocast_leaves_coefficients_in_float32(arm, parallel):
    model, ids = gpt(arm, parallel), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        state = model.readout.init(model.embed(ids))
        inputs, state = model.blocks[0].connections[0].read(state)
    expected, _ = model.blocks[0].connections[0].read(model.readout.init(model.embed(ids)))
    assert all(torch.equal(x, y) for x, y in zip(inputs, expected, strict=True))


@pytest.fixture(scope="session")
def sharded_errors(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("fsdp"))
    torch.multiprocessing.spawn(two_ranks.shard_and_train, (folder,), nprocs=2)
    with open(f"{folder}/errors.json") as file:
        return json.load(file)


@pytest.mark.xdist_group("fsdp")
@both
@every
def test_two_rank_fsdp2(arm, parallel, sharded_errors):
    assert sharded_errors[f"{arm}-{parallel}"] < 1e-5


def test_a_new_file_is_a_new_method(tmp_path, monkeypatch):
    (tmp_path / "ninth.py").write_text(
        "from crosslayer.connections.prenorm import PreNorm\nclass Ninth(PreNorm):\n    pass\n"
    )
    monkeypatch.setattr(
        crosslayer.connections, "__path__", [*crosslayer.connections.__path__, str(tmp_path)]
    )
    assert "ninth" in crosslayer.available()
    assert torch.equal(gpt("ninth")(tokens()), gpt("prenorm")(tokens()))
