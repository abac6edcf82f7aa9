"""Recomputed states: the same gradients, whatever is done with the graph meanwhile."""

import copy
import functools
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import crosslayer
from crosslayer.connection import find_connections
from crosslayer.connections.prenorm import PreNorm, SingleStream
from crosslayer.cost.estimate import activation_bytes
from crosslayer.ops import dispatch
from crosslayer.recompute import enable_recompute, recompute_inputs, saved_layers_log2
from crosslayer.recomputed_reads import TracedState, _SaveTensors
from crosslayer.testing.tiny_model import (
    equal_tensors,
    loss_and_gradients,
    perturb_weights,
    tiny_gpt,
    token_ids,
    wrong_gradients,
)
from crosslayer.train.parallel import checkpoint_layers
from tests.hf import backbones

LAYERS = 6  # states are saved before layers 0, 3 and 5
# The default of every method, and the variants whose state or read differs in kind.
SPECS = [
    *(n for n in crosslayer.available() if not crosslayer.make(n).method.norms_its_stream),
    "denseformer(dilation=4, period=2)",
    "mudd(normed=True)",
    "attnres(block_size=2)",
]


@pytest.fixture(autouse=True)
def loop_with_recompute_inputs(monkeypatch):
    """The example's loop, with the line that recomputation adds."""

    def forward(self, state):
        for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
            inputs, state = connection.read(state)
            with recompute_inputs(inputs, state):
                y = sublayer(*inputs)
            state = connection.write(state, y)
        return state

    block = tiny_gpt("prenorm", layers=1).blocks[0]
    monkeypatch.setattr(type(block), "forward", forward)


def plain_and_recomputed(spec: str, how: str = "streams", parallel: bool = False):
    """A model, and a copy of it whose states are recomputed."""
    plain = tiny_gpt(spec, parallel, layers=LAYERS)
    recomputed = copy.deepcopy(plain)
    enable_recompute(find_connections(recomputed), how)
    return plain, recomputed


def assert_bitwise_equal(plain, recomputed, run=loss_and_gradients) -> None:
    loss, gradients = run(plain, token_ids())
    recomputed_loss, recomputed_gradients = run(recomputed, token_ids())
    assert torch.equal(loss, recomputed_loss)
    assert equal_tensors(gradients, recomputed_gradients)


def assert_close_gradients(gradients, expected, tolerance: float = 1e-5) -> None:
    """Relative to each parameter's largest, however small it is."""
    assert not wrong_gradients(gradients, expected, tolerance, floor=1e-30)


@pytest.fixture
def fresh_compiler():
    """Other compilations of the same code would count towards the limit."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("spec", "how"), [("mudd", "streams"), ("mgr", "inversion")])
def test_a_compiled_model_runs_its_reads_uncompiled(spec, how):
    plain, recomputed = plain_and_recomputed(spec, how)
    recomputed.compile(backend="aot_eager")
    _, gradients = loss_and_gradients(plain, token_ids())
    assert_close_gradients(loss_and_gradients(recomputed, token_ids())[1], gradients)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_inference_compiles_whole():
    """Nothing is recomputed there."""
    plain, recomputed = plain_and_recomputed("mudd")
    inference = torch.compile(recomputed, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(inference(token_ids()), plain(token_ids()))


@pytest.mark.parametrize("parallel", [False, True], ids=["sequential", "parallel"])
@pytest.mark.parametrize("spec", SPECS)
def test_gradients_are_bitwise_equal(spec, parallel):
    plain, recomputed = plain_and_recomputed(spec, parallel=parallel)
    assert_bitwise_equal(plain, recomputed)
    for connection in find_connections(recomputed):  # nothing is stored on the modules
        own = {k: v for k, v in vars(connection).items() if k not in ("_parameters", "_buffers")}
        assert not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(own))


@pytest.mark.parametrize(
    ("family", "spec"), [("llama", "mudd"), ("neox-parallel", "hyper"), ("mixtral", "mgr")]
)
def test_in_a_host_under_autocast(family, spec):
    def run(model, ids):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids).logits.float().logsumexp(-1).square().mean()
        loss.backward()
        return loss.detach(), {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }

    plain = perturb_weights(crosslayer.connect(backbones.build(family), spec))
    recomputed = copy.deepcopy(plain)
    enable_recompute(find_connections(recomputed))
    assert_bitwise_equal(plain, recomputed, run)


@pytest.mark.parametrize(("spec", "how"), [("hyper", "streams"), ("mgr", "inversion")])
def test_a_backward_pass_under_autocast(spec, how):
    """Replayed states would be of half precision."""

    def run(model, ids):
        model.zero_grad()
        loss = model(ids).square().mean()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    plain, recomputed = plain_and_recomputed(spec, how)
    (_, expected), (_, gradients) = (run(model, token_ids()) for model in (plain, recomputed))
    assert_close_gradients(gradients, expected)


def test_outputs_of_nodes_that_hold_tensors_are_kept(monkeypatch):
    """torch 2.11 frees what a node saved together with the node's output."""
    outputs = []
    apply = _SaveTensors.apply

    def record(*args):
        output = apply(*args)
        outputs.append(weakref.ref(output))
        return output

    monkeypatch.setattr(_SaveTensors, "apply", record)
    _, recomputed = plain_and_recomputed("denseformer")
    loss = recomputed(token_ids()).sum()
    assert outputs and all(output() is not None for output in outputs)
    del loss
    assert all(output() is None for output in outputs)


def backward_twice(model, ids):
    """The gradients of two backward passes over one graph."""
    model.zero_grad()
    loss = model(ids).logsumexp(-1).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def two_graphs(model, ids):
    """Two forward passes, then their two backward passes, in the same order."""
    model.zero_grad()
    losses = [model(part).logsumexp(-1).square().mean() for part in (ids, ids.flip(-1))]
    for loss in losses:
        loss.backward()
    return losses[1].detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def failing_forward(model, ids):
    """A forward pass that fails halfway, then one that does not."""
    handle = model.blocks[3].sublayers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids)
    handle.remove()
    return loss_and_gradients(model, ids)


def half_frozen(model, ids):
    """The first half of the model has no gradient."""
    for p in [
        *model.embed.parameters(),
        *model.position.parameters(),
        *model.blocks[:3].parameters(),
    ]:
        p.requires_grad_(False)
    return loss_and_gradients(model, ids)


def offloaded(model, ids):
    with save_on_cpu():
        return loss_and_gradients(model, ids)


def checkpointed_sublayers(model, ids):
    """Sub-layers that are recomputed too."""
    for block in model.blocks:
        for sublayer in block.sublayers:
            sublayer.forward = functools.partial(checkpoint, sublayer.forward, use_reentrant=False)
    return loss_and_gradients(model, ids)


def deep_supervision(model, ids):
    """A second loss, on the hidden state halfway, with a backward pass of its own."""
    model.zero_grad()
    seen = []
    handle = model.blocks[2].register_forward_hook(
        lambda _, args, state: seen.append(model.blocks[3].connections[0].hidden_state(state))
    )
    logits = model(ids)
    handle.remove()
    seen[0].square().mean().backward(retain_graph=True)
    logits.logsumexp(-1).square().mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def pipeline_cut(model, ids):
    """Only tensors go from one stage of a pipeline to the next."""
    model.zero_grad()
    state = model.readout.init(model.embed(ids) + model.position.weight[: ids.shape[1]])
    for block in model.blocks:
        state = block(state)
        state = state.state if isinstance(state, TracedState) else state
    loss = model.head(model.readout.readout(state)).logsumexp(-1).square().mean()
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def called_functionally(model, ids):
    """With other weights, which the model does not have in the backward pass."""
    weights = {n: (p.detach() + 0.1).requires_grad_() for n, p in model.named_parameters()}
    loss = torch.func.functional_call(model, weights, (ids,)).logsumexp(-1).square().mean()
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in weights.items()}


def steered(model, ids):
    """Hooks change what connections give to sub-layers."""
    connections = find_connections(model)[:-1]
    for connection in connections:
        connection.read = functools.partial(steered_read, connection.read)
    result = loss_and_gradients(model, ids)
    for connection in connections:
        del connection.read
    return result


def steered_read(read, state):
    inputs, state = read(state)
    return tuple(x + 1 for x in inputs), state


def frozen_before_backward(model, ids):
    """Connections stop to learn once the loss is known."""
    loss = model(ids).logsumexp(-1).square().mean()
    for connection in find_connections(model):
        connection.requires_grad_(False)
    model.zero_grad()
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


@pytest.mark.parametrize(
    "run",
    [
        backward_twice,
        two_graphs,
        failing_forward,
        half_frozen,
        offloaded,
        checkpointed_sublayers,
        deep_supervision,
        pipeline_cut,
        called_functionally,
        steered,
        frozen_before_backward,
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize(
    ("spec", "how"), [("hyper", "streams"), ("mudd", "streams"), ("mgr", "inversion")]
)
def test_uses_of_the_graph(spec, how, run):
    if (how, run) == ("inversion", pipeline_cut):
        pytest.skip("a stage that is not the last has no state to invert from")
    plain, recomputed = plain_and_recomputed(spec, how)
    if how == "streams":
        assert_bitwise_equal(plain, recomputed, run)
        return
    loss, expected = run(plain, token_ids())
    recomputed_loss, gradients = run(recomputed, token_ids())
    assert torch.equal(loss, recomputed_loss)
    assert_close_gradients(gradients, expected)


def test_parameters_that_are_plain_attributes_are_not_recomputed_with():
    """`FullyShardedDataParallel` with use_orig_params=False makes them so, and frees them."""
    plain, recomputed = plain_and_recomputed("skip_gain")
    wrapped = find_connections(recomputed)[1:-1]
    originals = [connection._parameters.pop("gain") for connection in wrapped]
    for connection, original in zip(wrapped, originals, strict=True):
        connection.gain = original.clone()
    loss = recomputed(token_ids()).logsumexp(-1).square().mean()
    for connection in wrapped:
        del connection.gain
    loss.backward()
    assert torch.equal(loss, loss_and_gradients(plain, token_ids())[0])


@pytest.mark.parametrize(("spec", "how"), [("mudd", "streams"), ("mgr", "inversion")])
def test_a_host_whose_first_connections_have_no_parameters_is_called_functionally(spec, how):
    plain = perturb_weights(crosslayer.connect(backbones.build("llama"), spec))
    assert not list(find_connections(plain)[0].parameters())
    recomputed = copy.deepcopy(plain)
    enable_recompute(find_connections(recomputed), how)

    def gradients(model):
        weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        out = torch.func.functional_call(model, weights, (backbones.ids(),))
        out.logits.logsumexp(-1).square().mean().backward()
        return {name: weight.grad for name, weight in weights.items()}

    assert equal_tensors(gradients(recomputed), gradients(plain))


@pytest.mark.parametrize(("spec", "how"), [("hyper", "streams"), ("mgr", "inversion")])
def test_no_state_is_traced_without_gradients(spec, how):
    plain, recomputed = plain_and_recomputed(spec, how)
    with torch.no_grad():
        assert torch.equal(plain(token_ids()), recomputed(token_ids()))
        state = recomputed.readout.init(recomputed.embed(token_ids()))
        assert not isinstance(recomputed.blocks[0](state), TracedState)


def test_inversion_without_the_readout_is_an_error():
    _, recomputed = plain_and_recomputed("mgr", "inversion")
    state = recomputed.readout.init(recomputed.embed(token_ids()))
    for block in recomputed.blocks[:3]:
        state = block(state)
    with pytest.raises(RuntimeError, match="needs the backward pass to start at the readout"):
        state.state.y.sum().backward()


def test_inversion_keeps_ill_conditioned_streams():
    """A gate of 1 leaves nothing to invert: the stream there is one of those that are saved."""
    make = crosslayer.make("mgr", gate="independent")
    connection = make(crosslayer.plan(4)[6], 8, lambda port: torch.nn.Identity())
    S, y = tuple(torch.randn(2, 5, 8) for _ in range(4)), torch.randn(2, 5, 8)
    beta = torch.full((2, 5, 4), 0.1)
    beta[1, 2, 3] = 1.0
    state = type(connection.initial_state(y))(S, y, beta)
    back = connection.invert(
        connection.mix_inputs(state)[1], y, connection.inversion_context(state)
    )
    assert torch.equal(back.S[3][1, 2], S[3][1, 2])
    torch.testing.assert_close(back.S, S, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("spec", ["mgr", *crosslayer.make("mgr").method.test_variants])
def test_inversion_is_as_accurate_as_rounding(spec):
    plain, recomputed = plain_and_recomputed(spec, "inversion")
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float64, 1e-13)):
        loss, expected = loss_and_gradients(plain.to(dtype), token_ids())
        recomputed_loss, gradients = loss_and_gradients(recomputed.to(dtype), token_ids())
        assert torch.equal(loss, recomputed_loss)
        assert_close_gradients(gradients, expected, tolerance)


class Overwriting(torch.nn.Module):
    """A sub-layer that writes into its input before it saves it."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(12, 12)

    def forward(self, x, *_):
        return self.linear(x.mul_(2))


def test_an_output_that_is_written_into_is_an_error():
    """As without recomputation: the gradient of the sigmoid needs its output."""
    for model in plain_and_recomputed("hyper"):
        model.blocks[2].sublayers[1] = nn.Sequential(nn.Linear(12, 12), nn.Sigmoid())
        model.blocks[2].sublayers[1].register_forward_hook(lambda *args: args[2].mul_(0.5))
        loss = model(token_ids()).sum()
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize(("spec", "how"), [("hyper", "streams"), ("mgr", "inversion")])
def test_parameters_that_are_changed_before_the_backward_pass_are_an_error(spec, how, replaced):
    _, recomputed = plain_and_recomputed(spec, how)
    loss = recomputed(token_ids()).sum()
    connection = recomputed.blocks[1].connections[0]
    doubled = {name: 2 * tensor for name, tensor in connection.state_dict().items()}
    connection.load_state_dict(doubled, assign=replaced)
    with pytest.raises(RuntimeError, match=f"of {spec}, site 2 of 12 has changed since the for"):
        loss.backward()


class Transposing(nn.Module):
    """Saves a transposed view of its input."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (x.mT * self.gain).mT


@pytest.mark.parametrize("sublayer", [Overwriting, Transposing])
def test_an_input_that_is_written_into_or_transposed_is_saved(sublayer):
    plain = tiny_gpt("hyper", layers=LAYERS)
    for block in plain.blocks:
        block.sublayers[1] = sublayer()
    recomputed = copy.deepcopy(plain)
    enable_recompute(find_connections(recomputed))
    assert_bitwise_equal(plain, recomputed)


class TwoParts(PreNorm):
    """Both ports read a part of one tensor."""

    def mix_inputs(self, state):
        h = state.h if state.y is None else state.h + state.y
        return torch.stack([h, 2 * h][: len(self.ports)]).unbind(), SingleStream(h)


def test_inputs_that_are_parts_of_one_tensor_are_told_apart():
    plan = crosslayer.plan(3, parallel=True)
    sites = [TwoParts(site, 4, lambda port: nn.Identity()) for site in plan]
    x, w = torch.randn(1, 2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)

    def gradient():
        state = sites[0].init(x)
        for site in sites[:-1]:
            (a, b), state = site.read(state)
            with recompute_inputs((a, b), state):
                y = a * w[0] + b * w[1]
            state = site.write(state, y)
        return torch.autograd.grad(sites[-1].readout(state).sum(), w)[0]

    expected = gradient()
    enable_recompute(sites)
    assert torch.equal(gradient(), expected)


@pytest.mark.parametrize(
    ("spec", "how", "message"),
    [
        ("hyper", "inversion", '"inversion" is not supported by hyper; use "streams"'),
        ("postnorm", "streams", '"streams" is not supported by postnorm, whose stream is normed'),
        ("postnorm", "inversion", "not supported by postnorm; recompute whole layers"),
        ("hyper", "stream", "recompute must be one of streams, inversion, got 'stream'"),
    ],
)
def test_unsupported_modes_are_an_error(spec, how, message):
    with pytest.raises(ValueError, match=message):
        enable_recompute(find_connections(tiny_gpt(spec)), how)


def test_reads_use_the_kernels_of_the_forward_pass(monkeypatch):
    """The backward pass may come after a block of `use_kernels`."""
    _, recomputed = plain_and_recomputed("hyper")
    connection = recomputed.blocks[1].connections[0]
    devices = []
    mix_inputs = type(connection).mix_inputs

    def record(self, state):
        devices.append(dispatch.kernel_devices)
        return mix_inputs(self, state)

    monkeypatch.setattr(type(connection), "mix_inputs", record)
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "kernel_devices", ("meta",))
        loss = recomputed(token_ids()).sum()
    forward_reads = len(devices)
    loss.backward()
    assert set(devices) == {("meta",)} and len(devices) > forward_reads
    assert dispatch.kernel_devices == ()


def test_every_site_is_checked():
    sites = find_connections(tiny_gpt("hyper"))
    of_postnorm = find_connections(tiny_gpt("postnorm"))
    with pytest.raises(ValueError, match="is not supported by postnorm"):
        enable_recompute([*sites[:-1], *of_postnorm])
    with pytest.raises(ValueError, match="the last site must be the readout, got hyper, site"):
        enable_recompute(sites[:-1])
    for no_sites in ([], [nn.Identity()]):
        with pytest.raises(ValueError, match="takes a list of a model's connections"):
            enable_recompute(no_sites)
    layers = sites[-1].site.layer
    with pytest.raises(ValueError, match=rf"layers from 0 to {layers}, got \[0, {layers + 1}\]"):
        enable_recompute(sites, kept=[layers + 1, 0])
    with pytest.raises(ValueError, match="'inversion' keeps no states"):
        enable_recompute(find_connections(tiny_gpt("mgr")), "inversion", kept=[0])


def test_layers_that_are_checkpointed():
    model = crosslayer.connect(backbones.build("llama"), "hyper").train()
    enable_recompute(find_connections(model))
    checkpoint_layers(model)
    with pytest.raises(ValueError, match="cannot be combined with the recomputation of states"):
        model(backbones.ids())


def test_inversion_wants_float32_streams():
    model = tiny_gpt("mgr").bfloat16()
    enable_recompute(find_connections(model), "inversion")
    with pytest.raises(
        ValueError,
        match=r"inversion needs the streams in float32; \w+ mgr\(stream_dtype='float32'\)",
    ):
        model(token_ids())
    model = tiny_gpt("mgr(stream_dtype='float32')").bfloat16()
    enable_recompute(find_connections(model), "inversion")
    loss_and_gradients(model, token_ids())


def test_states_are_saved_at_distances_that_double():
    assert saved_layers_log2(24) == {0, 9, 17, 21, 23}
    assert saved_layers_log2(6) == {0, 3, 5}
    assert saved_layers_log2(2) == {0, 1}
    assert saved_layers_log2(1) == {0}


def test_hooks_on_saved_tensors_see_less():
    """They see y of every site, the saved states, and what the sub-layers save."""
    plain, recomputed = plain_and_recomputed("hyper")

    def loss(model, ids):
        return model(ids).square().mean()

    kept = activation_bytes(recomputed, token_ids(), loss)
    assert kept < 0.6 * activation_bytes(plain, token_ids(), loss)
    hidden = 4 * 12  # of the MLPs
    for model in (plain, recomputed):
        seen = []
        with saved_tensors_hooks(lambda x: seen.append(x.shape[-1:]), lambda x: x):
            loss(model, token_ids())
        assert seen.count((hidden,)) >= LAYERS


@pytest.mark.parametrize(
    ("spec", "how"), [("hyper(streams=2)", "streams"), ("mgr(streams=2)", "inversion")]
)
def test_second_derivatives(spec, how):
    """A product with the Hessian is that of the plain model; torch.func recomputes nothing."""

    def products(recompute: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        sublayers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6)]
        stack = perturb_weights(
            crosslayer.Stack(spec, sublayers, dim=6, recompute=recompute)
        ).double()
        x, v = torch.randn(2, 1, 2, 6, dtype=torch.float64)

        def loss(x: torch.Tensor) -> torch.Tensor:
            return stack(x).square().sin().sum()

        _, transformed = torch.func.jvp(torch.func.grad(loss), (x,), (v,))
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(loss(x), x, create_graph=True)
        leaves = [x, *(p for p in stack.parameters() if p.requires_grad)]
        product = torch.autograd.grad(gradient, leaves, v, allow_unused=True)
        return [transformed, *(g for g in product if g is not None)]

    for recomputed, plain in zip(products(how), products(None), strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-9, atol=1e-9)
