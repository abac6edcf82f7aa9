"""Bugs that users of these methods meet, planted one by one: the suite must see each.

The check that guards against a bug is one of the suite's own. It passes before the bug is planted
and fails after.
"""

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError

import crosslayer
from crosslayer import optim
from crosslayer.connection import Connection
from crosslayer.connections import attnres, denseformer, hyper, mgr, mhc, mhc_lite, mudd, postnorm
from crosslayer.connections._dense import History
from crosslayer.connections.denseformer import DenseFormer
from crosslayer.connections.hyper import Hyper
from crosslayer.connections.mhc import MHC
from crosslayer.norms import add_write
from crosslayer.ops import attention, depth_mix, depth_scores, gate, project
from crosslayer.ops import hyper as hyper_op
from tests import test_laws as laws
from tests import test_optim as optim_tests
from tests.connections import test_golden as golden
from tests.connections import test_loops as loops
from tests.connections.test_loops import Case, MHCOptions

Plant = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[], None]
BUGS: dict[str, tuple[Plant, Check]] = {}


def bug(**checks: Check) -> Callable[[Plant], Plant]:
    """Register a bug with the checks that see it."""

    def register(plant: Plant) -> Plant:
        for name, check in checks.items():
            BUGS[f"{plant.__name__}-{name}"] = plant, check
        return plant

    return register


# ---- checks that are no test of another file


def gradcheck_sinkhorn() -> None:
    """On logits far from the identity: near it, where methods start, gradients are too small."""
    logits = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    for rounds in (2, 20):
        assert torch.autograd.gradcheck(lambda z: mhc.sinkhorn(z, rounds, 1e-6), logits)


def row(case: str) -> Check:
    return partial(golden.test_a_row_of_linear_sublayers, case)


golden_mhc = row("mhc_deepseek_v4_n4_with_head_3sublayers")
golden_mudd = partial(
    golden.test_mudd_streams, "mudd", "muddformer_llama_L4_D64_noqknorm_noround_noexpand"
)
golden_mhc_lite = row("mhc_lite_n4_3sublayers")
golden_static = row("hc_static_n2_3sublayers")
golden_hyper = row("hc_dynamic_n4_tanh_layernorm_3sublayers")
golden_attnres = row("attnres_full_8sublayers")
golden_mgr = row("mgr_competitive_n4_10sublayers")


def loop(spec: str, reference: loops.Loop) -> Check:
    return partial(loops.check, spec, reference, Case(layers=3, seed=1))


def loop_mhc(**options: object) -> Check:
    mhc_options = MHCOptions(**{"iterations": 3} | options)
    return loop(mhc_options.spec, loops.mhc(mhc_options))


loop_hyper = loop("hyper", loops.hyper(4))
loop_mhc_lite = loop("mhc_lite(streams=3)", loops.mhc_lite(3))


# ---- 1. fluent wrong answers


@bug(golden=golden_mhc, loop=loop_mhc(), loop_dst_src=loop_mhc(orientation="dst src"))
def mhc_transposes_its_residual_matrix(patch):
    right = MHC.residual_matrix
    patch.setattr(MHC, "residual_matrix", lambda self, logits: right(self, logits).mT)


@bug(golden=golden_mhc, loop=loop_mhc())
def mhc_normalises_in_the_other_order(patch):
    right = mhc.sinkhorn
    patch.setattr(mhc, "sinkhorn", lambda logits, *args: right(logits.mT, *args).mT)


@bug(golden=golden_mhc_lite, loop=loop_mhc_lite)
def mhc_lite_transposes_its_residual_matrix(patch):
    right = mhc_lite.width_connection
    patch.setattr(mhc_lite, "width_connection", lambda H, pre, res: right(H, pre, res.mT))


@bug(golden_static=golden_static, golden=golden_hyper, loop=loop_hyper)
def hyper_transposes_its_width_connections(patch):
    right = hyper.width_connection

    def width_connection(H, pre, res, norm=None):
        return right(H, pre, res.mT, norm)

    patch.setattr(hyper, "width_connection", width_connection)  # static
    patch.setattr(hyper_op, "width_connection", width_connection)


@bug(golden=golden_mhc, loop=loop_mhc())
def mhc_never_applies_its_residual_matrix(patch):
    right = mhc.width_connection
    patch.setattr(mhc, "width_connection", lambda H, pre, res: (right(H, pre, res)[0], H))


@bug(
    golden=golden_mhc_lite,
    loop=loop_mhc_lite,
    no_dead_parameter=lambda: laws.test_no_parameter_is_dead("mhc_lite", False),
)
def mhc_lite_never_applies_its_residual_matrix(patch):
    right = mhc_lite.width_connection
    patch.setattr(mhc_lite, "width_connection", lambda H, pre, res: (right(H, pre, res)[0], H))


@bug(golden=golden_mhc, loop=loop_mhc())
def mhc_norm_has_another_eps(patch):
    right = mhc.write_norm_project
    patch.setattr(
        mhc, "write_norm_project", lambda H, Y, post, fn, eps: right(H, Y, post, fn, 1e-5)
    )


@bug(golden=golden_mhc, loop=loop_mhc())
def mhc_gate_has_no_eps(patch):
    right = MHC.coefficients

    def coefficients(self, z):
        pre, *rest = right(self, z)
        return pre - self.eps, *rest

    patch.setattr(MHC, "coefficients", coefficients)


@bug(golden=golden_attnres, loop=loop("attnres(block_size=2)", loops.attnres(2)))
def attnres_norm_has_another_eps(patch):
    right = attnres.depth_attention
    patch.setattr(attnres, "depth_attention", lambda X, q, eps, norm: right(X, q, 1e-5))


@bug(golden=golden_mgr, loop=loop("mgr", loops.mgr(4, "competitive")))
def mgr_gate_norm_has_another_eps(patch):
    right = mgr.gate_pool

    def gate_pool(S, y, beta, pool_query, gate_query, norm):
        S, h, scores = right(S, y, beta, pool_query, gate_query)
        return S, h, scores if gate_query is None else depth_scores(S, gate_query, eps=1e-5)

    patch.setattr(mgr, "gate_pool", gate_pool)


@bug(golden=golden_mudd, loop=loop("mudd", loops.LOOPS["mudd"]))
def mudd_norm_has_another_eps(patch):
    right = mudd.write_norm_project
    patch.setattr(mudd, "write_norm_project", lambda H, Y, beta, W, eps: right(H, Y, beta, W, 1e-5))


@bug(golden=golden_hyper, loop=loop_hyper)
def hyper_layernorm_has_another_eps(patch):
    stream_norm = hyper.STREAM_NORMS["layernorm"]._replace(eps=1e-6)
    patch.setitem(hyper.STREAM_NORMS, "layernorm", stream_norm)


@bug(
    golden_static=golden_static,
    golden=golden_hyper,
    loop=partial(loops.check, "hyper", loops.hyper(4), Case(normed=False)),
)
def hyper_reads_out_the_mean(patch):
    right = Hyper.fused_read

    def fused_read(self, state, norms):
        (x,), after = right(self, state, norms)
        return (x / self.n if self.is_readout else x,), after

    patch.setattr(Hyper, "fused_read", fused_read)


@bug(
    loop=partial(
        loops.check,
        MHCOptions(readout="sum").spec,
        loops.mhc(MHCOptions(readout="sum")),
        Case(layers=2, normed=False),
    )
)
def mhc_reads_out_the_mean(patch):
    right = MHC.read_streams

    def read_streams(self, H, pre, *norms):
        return H.mean(-2) if pre is None else right(self, H, pre, *norms)

    patch.setattr(MHC, "read_streams", read_streams)


@bug(
    start=partial(loops.starts_on_its_own_stream, "hyper"),
    house_rules=lambda: laws.test_parameters_follow_the_conventions("hyper", False),
)
def hyper_draws_its_layer_index(patch):
    def initial_alpha(site, n):
        read_stream = torch.randint(n, (), device="cpu").item()
        return [[float(s == read_stream), *(float(s == t) for t in range(n))] for s in range(n)]

    patch.setattr(hyper, "_initial_alpha", initial_alpha)


@bug(start=partial(loops.starts_on_its_own_stream, "mhc"))
def mhc_draws_its_layer_index(patch):
    right, draw = MHC.reset_parameters, random.Random(0)

    @torch.no_grad()
    def reset_parameters(self):
        right(self)
        if not self.is_readout:
            self.base[: self.n] = -1
            self.base[draw.randrange(self.n)] = 1

    patch.setattr(MHC, "reset_parameters", reset_parameters)


@bug(law=lambda: laws.test_reads_compute_the_same_without_gradients("prenorm", False))
def a_read_without_gradients_writes_into_its_state(patch):
    right = Connection.read

    def read(self, state):
        result = right(self, state)
        if state.y is not None and not torch.is_grad_enabled():
            state.y.zero_()
        return result

    patch.setattr(Connection, "read", read)


@bug(law=lambda: laws.test_frozen_weights_pass_gradients_on("hyper", False))
def frozen_weights_stop_gradients(patch):
    right = Connection.write

    def write(self, state, y):
        is_trained = any(p.requires_grad for p in self.parameters())
        return right(self, state, y if is_trained else y.detach())

    patch.setattr(Connection, "write", write)


@bug(law=lambda: laws.test_strides_do_not_matter("prenorm", False))
def a_write_ignores_strides(patch):
    right = Connection.write

    def write(self, state, y):
        return right(self, state, y.as_strided(y.shape, torch.empty(y.shape).stride()))

    patch.setattr(Connection, "write", write)


class Converged(torch.autograd.Function):
    """Sinkhorn with the gradient of an exactly doubly stochastic matrix, which it never gives."""

    @staticmethod
    def forward(ctx, logits, rounds, eps):
        M = crosslayer.ops.sinkhorn(logits, rounds, eps)
        ctx.save_for_backward(M)
        return M

    @staticmethod
    def backward(ctx, G):
        (M,) = ctx.saved_tensors
        n, eye = M.shape[-1], torch.eye(M.shape[-1], dtype=M.dtype).expand_as(M)
        system = torch.cat([torch.cat([eye, M], -1), torch.cat([M.mT, eye], -1)], -2)
        sums = torch.cat([(G * M).sum(-1), (G * M).sum(-2)], -1)
        u, v = (torch.linalg.pinv(system) @ sums[..., None]).squeeze(-1).split(n, -1)
        return M * (G - u[..., :, None] - v[..., None, :]), None, None


@bug(
    golden=golden_mhc, loop=loop_mhc(), loop20=loop_mhc(iterations=20), gradcheck=gradcheck_sinkhorn
)
def sinkhorn_is_differentiated_as_if_converged(patch):
    patch.setattr(mhc, "sinkhorn", Converged.apply)


@bug(golden=golden_mhc, loop=loop_mhc(), gradcheck=gradcheck_sinkhorn)
def sinkhorn_takes_its_scalings_for_constants(patch):
    right = mhc.sinkhorn

    def sinkhorn(logits, rounds, eps):
        K = logits.softmax(-1) + eps
        return K * (right(logits, rounds, eps) / K).detach()

    patch.setattr(mhc, "sinkhorn", sinkhorn)


@bug(golden=golden_mhc, loop=loop_mhc(), gradcheck=gradcheck_sinkhorn)
def sinkhorn_is_differentiated_through_its_last_round(patch):
    def sinkhorn(logits, rounds, eps):
        M = logits.softmax(-1) + eps
        M = M / (M.sum(-2, keepdim=True) + eps)
        for turn in range(rounds - 1):
            M = M if turn < rounds - 2 else (M / logits.exp()).detach() * logits.exp()
            M = M / (M.sum(-1, keepdim=True) + eps)
            M = M / (M.sum(-2, keepdim=True) + eps)
        return M

    patch.setattr(mhc, "sinkhorn", sinkhorn)


@bug(bf16=lambda: laws.test_a_bf16_model_keeps_coefficients_in_float32("mhc", False))
def mixers_are_cast_with_the_model(patch):
    patch.setattr(Connection, "_apply", nn.Module._apply)


def under_autocast(spec: str) -> Check:
    return partial(laws.test_autocast_leaves_coefficients_in_float32, spec, False)


@bug(mhc=under_autocast("mhc"), mudd=under_autocast("mudd"), mgr=under_autocast("mgr"))
def autocast_reaches_the_mixers(patch):
    def read(self, state):
        xs, state = self.mix_inputs(state)
        return self.apply_port_norms(*xs), state

    patch.setattr(Connection, "read", read)


# ---- 2. what does not compose


@bug(law=lambda: laws.test_forward_stores_nothing("denseformer", False))
def denseformer_keeps_its_history_on_the_module(patch):
    right = DenseFormer.mix_inputs

    def mix_inputs(self, state):
        xs, state = right(self, state)
        self.accumulators = state.X
        return xs, state

    patch.setattr(DenseFormer, "mix_inputs", mix_inputs)


@bug(law=partial(laws.test_two_inputs_by_turns, "denseformer", False))
def denseformer_keeps_its_history_in_a_list_of_its_own(patch):
    # The law on attributes cannot see it: the list is the same object all the time.
    history: list[Tensor] = []

    def mix_inputs(self, state):
        h = add_write(state.h, state.y)
        if not self.site.index:
            history.clear()
        if self.opens_layer:
            history.append(h)
        if self.alpha is not None:
            (h,), _ = depth_mix(tuple(history[j] for j in self.sources), self.alpha[None])
        return (h,), History((), h)

    patch.setattr(denseformer.DenseFormer, "mix_inputs", mix_inputs)


@bug(law=partial(laws.test_every_token_is_alone, "denseformer", False))
def denseformer_sees_the_other_sequences(patch):
    right = DenseFormer.mix_inputs

    def mix_inputs(self, state):
        (h,), state = right(self, state)
        return (h - 0.1 * h.mean(0, keepdim=True),), state

    patch.setattr(DenseFormer, "mix_inputs", mix_inputs)


# ---- 3. second derivatives


def second_derivatives(spec: str) -> Check:
    return partial(laws.test_second_derivatives, spec, False)


@bug(attnres=second_derivatives("attnres"), hyper=second_derivatives("hyper"))
def second_derivatives_take_saved_tensors_as_constants(patch):
    """What `once_differentiable` lets pass without an error under `torch.autograd.grad`."""
    right = attention.definition_gradients

    def gradients(definition, inputs, *dout):
        constants = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
        return right(definition, constants, *dout)

    for module in (attention, project):
        patch.setattr(module, "definition_gradients", gradients)


@bug(attnres=second_derivatives("attnres"), mgr=second_derivatives("mgr"))
def a_definition_is_another_function(patch):
    right = attention.plain_weighted_sum

    def squared(X, w):
        return right(X, w.square())

    for module in (attention, gate):
        patch.setattr(module, "plain_weighted_sum", squared)


@bug(law=partial(laws.test_memory_traffic_is_what_read_moves, "hyper", False))
def no_write_is_counted(patch):
    patch.setattr(Hyper, "memory_traffic", lambda self: self.n + 1)


@bug(law=partial(laws.test_float16_has_the_range_of_prenorm, "mhc", True))
def a_parallel_block_rounds_the_sum_of_streams(patch):
    patch.setattr(MHC, "mix_and_norm", Connection.mix_and_norm)


def check_declared_scales(spec: str) -> None:
    if laws.initial_function(spec) != "prenorm up to scales":  # whose cases the law leaves out
        laws.test_scales_nothing_else_than_it_says(spec)


@bug(law=partial(check_declared_scales, "attnres"))
def scales_are_not_declared(patch):
    patch.setattr(attnres.AttnRes, "initial_function", "prenorm")


@bug(law=partial(laws.test_scales_nothing_else_than_it_says, "hyper"))
def the_scale_of_the_readout_is_not_declared(patch):
    patch.setattr(Hyper, "initial_function", "prenorm")


@bug(law=partial(laws.test_is_postnorm_where_it_says_so, "postnorm"))
def the_embedding_has_no_norm(patch):
    normed = postnorm.PostNorm.norm_mixed

    def leave_embedding(self, inputs, state):
        return normed(self, inputs, state) if self.site.index else (inputs, state)

    patch.setattr(postnorm.PostNorm, "norm_mixed", leave_embedding)


# ---- 4. the optimizer


def weight_decay(spec: str) -> Check:
    return partial(laws.test_weight_decay_keeps_the_initial_function, spec, False)


@bug(hyper=weight_decay("hyper"))
def static_weights_are_decayed(patch):
    decayed = Hyper.weight_decay_params | {"static_alpha", "static_beta"}
    patch.setattr(Hyper, "weight_decay_params", decayed)


@bug(
    hyper=weight_decay("hyper"),
    mudd=weight_decay("mudd"),
    altup=partial(optim_tests.test_connections_are_treated_as_they_say, "altup"),
)
def whatever_is_a_matrix_is_decayed(patch):
    """The usual rule of training scripts, which knows no connections."""
    patch.setattr(optim, "find_connections", lambda model: [])


@pytest.mark.parametrize("name", BUGS)
def test_the_suite_sees(name, monkeypatch):
    plant, check = BUGS[name]
    torch.manual_seed(0)
    check()
    plant(monkeypatch)
    torch.manual_seed(0)
    with pytest.raises((AssertionError, GradcheckError)):
        check()
