"""States had back in the backward pass: the same gradients, whatever is done with the graph meanwhile."""

import copy
import functools

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import crosslayer
from crosslayer.connection import find_connections
from crosslayer.cost.estimate import activation_bytes
from crosslayer.recompute import (
    TracedState,
    checkpoint_layers_log2,
    enable_recompute,
    recompute_inputs,
)
from crosslayer.train.parallel import checkpoint_layers
from examples import gpt as example
from tests.hf import backbones
from tests.support.tiny import ARMS, equal, gpt, loss_and_gradients, shake, tokens

LAYERS = 6  # states kept before layers 0, 3 and 5
STREAMS = [arm for arm in ARMS if not crosslayer.make(arm).method.norms_its_stream]


@pytest.fixture(autouse=True)
def recalling(monkeypatch):
    """The example's loop, with what a loop of one's own adds."""

    def forward(self, state):
        for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
            inputs, state = connection.read(state)
            with recompute_inputs(inputs, state):
                y = sublayer(*inputs)
            state = connection.write(state, y)
        return state

    monkeypatch.setattr(example.Block, "forward", forward)


def pair(arm: str, how: str = "streams", parallel: bool = False):
    """A model, and its copy whose states are had back."""
    plain = gpt(arm, parallel, layers=LAYERS)
    again = copy.deepcopy(plain)
    enable_recompute(find_connections(again), how)
    return plain, again


def same(plain, again, run=loss_and_gradients) -> bool:
    (loss, gradients), (its_loss, its_gradients) = run(plain, tokens()), run(again, tokens())
    return torch.equal(loss, its_loss) and equal(gradients, its_gradients)


def apart(expected, found) -> float:
    """The largest error of a gradient, relative to its largest element."""
    return max(
        ((found[n] - g).abs().max() / g.abs().max()).item() for n, g in expected.items() if g.any()
    )


@pytest.mark.parametrize("parallel", [False, True], ids=["sequential", "parallel"])
@pytest.mark.parametrize("arm", STREAMS)
def test_not_a_bit_changes(arm, parallel):
    plain, again = pair(arm, parallel=parallel)
    assert same(plain, again)
    assert not any(
        isinstance(value, torch.Tensor | TracedState)
        for c in find_connections(again)
        for value in vars(c).values()
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "neox-parallel", "mixtral"])
@pytest.mark.parametrize("arm", ["mudd", "hyper", "mgr"])
@pytest.mark.filterwarnings("ignore:mgr")
def test_in_a_host(family, arm):
    def run(model, ids):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids).logits.float().logsumexp(-1).square().mean()
        loss.backward()
        return loss.detach(), {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }

    plain = shake(crosslayer.connect(backbones.build(family), arm))
    again = copy.deepcopy(plain)
    enable_recompute(find_connections(again))
    assert same(plain, again, run)


def twice(model, ids):
    """The gradients of two backward passes over one graph."""
    model.zero_grad()
    loss = model(ids).logsumexp(-1).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def entwined(model, ids):
    """Two forward passes, then their backward passes, the first one's first."""
    model.zero_grad()
    losses = [model(part).logsumexp(-1).square().mean() for part in (ids, ids.flip(-1))]
    for loss in losses:
        loss.backward()
    return losses[1].detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def interrupted(model, ids):
    """A sub-layer that fails once, halfway."""
    handle = model.blocks[3].sublayers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids)
    handle.remove()
    return loss_and_gradients(model, ids)


def half_frozen(model, ids):
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


def checkpointed(model, ids):
    """Sub-layers that run again too."""
    for block in model.blocks:
        for sublayer in block.sublayers:
            sublayer.forward = functools.partial(checkpoint, sublayer.forward, use_reentrant=False)
    return loss_and_gradients(model, ids)


def deep(model, ids):
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


def cut(model, ids):
    """Tensors alone go from one stage of a pipeline to the next."""
    model.zero_grad()
    state = model.readout.init(model.embed(ids) + model.position.weight[: ids.shape[1]])
    for block in model.blocks:
        state = block(state)
        state = state.state if isinstance(state, TracedState) else state
    loss = model.head(model.readout.readout(state)).logsumexp(-1).square().mean()
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "run",
    [twice, entwined, interrupted, half_frozen, offloaded, checkpointed, deep, cut],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize(
    ("arm", "how"), [("hyper", "streams"), ("mudd", "streams"), ("mgr", "inversion")]
)
def test_whatever_is_done_with_the_graph(arm, how, run):
    if (how, run) == ("inversion", cut):
        pytest.skip("a stage that is not the last has no state to go back from")
    plain, again = pair(arm, how)
    (loss, expected), (its, found) = run(plain, tokens()), run(again, tokens())
    assert torch.equal(loss, its) and expected.keys() == found.keys()
    assert equal(expected, found) if how == "streams" else apart(expected, found) < 1e-5


@pytest.mark.parametrize(("arm", "how"), [("hyper", "streams"), ("mgr", "inversion")])
def test_nothing_is_traced_without_gradients(arm, how):
    plain, again = pair(arm, how)
    with torch.no_grad():
        assert torch.equal(plain(tokens()), again(tokens()))
        assert not isinstance(
            again.blocks[0](again.readout.init(again.embed(tokens()))), TracedState
        )


def test_a_backward_pass_without_a_way_back_is_an_error():
    _, again = pair("mgr", "inversion")
    state = again.readout.init(again.embed(tokens()))
    for block in again.blocks[:3]:
        state = block(state)
    with pytest.raises(RuntimeError, match="inversion goes from the readout back"):
        state.state.y.sum().backward()


def test_inversion_falls_back_where_it_is_ill_conditioned():
    """A token whose gate is open all the way leaves nothing to invert: its streams are those that are kept."""
    arm = "mgr(gate='independent')"
    torch.manual_seed(0)
    connection = crosslayer.make(arm)(crosslayer.plan(4)[6], 8, lambda port: torch.nn.Identity())
    S, y = tuple(torch.randn(2, 5, 8) for _ in range(4)), torch.randn(2, 5, 8)
    beta = torch.full((2, 5, 4), 0.1)
    beta[1, 2, 3] = 1.0
    state = type(connection.initial_state(y))(S, y, beta)
    back = connection.invert(
        connection.mix_inputs(state)[1], y, connection.inversion_context(state)
    )
    assert torch.equal(back.S[3][1, 2], S[3][1, 2])
    torch.testing.assert_close(back.S, S, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm.startswith("mgr")])
def test_inversion_is_as_good_as_rounding(arm):
    plain, again = pair(arm, "inversion")
    (loss, expected), (its, found) = (
        loss_and_gradients(plain, tokens()),
        loss_and_gradients(again, tokens()),
    )
    assert torch.equal(loss, its) and apart(expected, found) < 2e-5
    plain, again = plain.double(), again.double()
    assert (
        apart(loss_and_gradients(plain, tokens())[1], loss_and_gradients(again, tokens())[1])
        < 1e-13
    )


class Overwriting(torch.nn.Module):
    """A sub-layer that writes into its input before it keeps it."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(12, 12)

    def forward(self, x, *_):
        return self.linear(x.mul_(2))


def test_an_input_that_is_written_into_is_kept():
    plain = gpt("hyper", layers=LAYERS)
    for block in plain.blocks:
        block.sublayers[1] = Overwriting()
    again = copy.deepcopy(plain)
    enable_recompute(find_connections(again))
    assert same(plain, again)


@pytest.mark.parametrize(
    ("arm", "how", "line"),
    [
        (
            "hyper",
            "inversion",
            "hyper has no inversion, as its writes cannot be undone; recompute streams, reads or",
        ),
        (
            "postnorm",
            "streams",
            "postnorm's stream goes through the layers' norms, which are not moved on; recompute",
        ),
        ("hyper", "stream", "how must be one of streams, inversion, got 'stream'"),
    ],
)
def test_one_line(arm, how, line):
    with pytest.raises(ValueError, match=line):
        enable_recompute(find_connections(gpt(arm)), how)


def test_layers_that_are_checkpointed():
    model = crosslayer.connect(backbones.build("llama"), "hyper").train()
    enable_recompute(find_connections(model))
    checkpoint_layers(model)
    with pytest.raises(
        ValueError,
        match="gradient checkpointing of layers cannot be combined with the recomputation",
    ):
        model(backbones.ids())


def test_inversion_wants_float32_streams():
    model = gpt("mgr").bfloat16()
    enable_recompute(find_connections(model), "inversion")
    with pytest.raises(
        ValueError,
        match=r"inversion needs the streams in float32; say mgr\(stream_dtype='float32'\)",
    ):
        model(tokens())
    model = gpt("mgr(stream_dtype='float32')").bfloat16()
    enable_recompute(find_connections(model), "inversion")
    loss_and_gradients(model, tokens())


def test_states_are_kept_at_distances_that_double():
    assert checkpoint_layers_log2(24) == {0, 9, 17, 21, 23}
    assert (
        checkpoint_layers_log2(6) == {0, 3, 5}
        and checkpoint_layers_log2(2) == {0, 1}
        and checkpoint_layers_log2(1) == {0}
    )


def test_what_is_kept_is_what_hooks_see():
    """y at every site and the states that are kept, beside the sub-layers' own: of `reads` it is a state a site."""
    plain, again = pair("hyper")
    loss = lambda model, ids: model(ids).square().mean()  # noqa: E731
    assert activation_bytes(again, tokens(), loss) < 0.6 * activation_bytes(plain, tokens(), loss)
