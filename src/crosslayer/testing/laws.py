"""The laws every connection obeys: one suite of tests over every method that `make` knows.

    pytest --pyargs crosslayer.testing.laws -k laurel

A new file in connections/ is covered as soon as it exists, and so is the method of an installed
package. Most laws are checked for the default options of every method; those that options can break
are also checked for the class's `test_variants`.
"""

import copy
import inspect
import io
import json
import pickle
from importlib.metadata import entry_points

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

import crosslayer
from crosslayer.connection import PRENORM_FUNCTIONS, find_connections
from crosslayer.fused_norms import FusedNormConnection
from crosslayer.methods import ENTRY_POINT_GROUP
from crosslayer.testing import two_ranks
from crosslayer.testing.tiny_model import (
    DEFAULT_SPECS,
    TESTED_SPECS,
    TESTED_VARIANTS,
    equal_tensors,
    loss_and_gradients,
    perturb_weights,
    tiny_gpt,
    token_ids,
    without_eps,
)

SITES = crosslayer.plan(layers=2)
KINDS = {False: "sequential", True: "parallel"}


def cases(specs: list[str], parallel: bool, *marks: pytest.MarkDecorator) -> list:
    """(spec, parallel) of each spec, as test cases."""
    return [pytest.param(s, parallel, marks=marks, id=f"{s}-{KINDS[parallel]}") for s in specs]


# Most laws: every method, as a sequential and as a parallel block.
every_method = pytest.mark.parametrize(
    ("spec", "parallel"), cases(DEFAULT_SPECS, False) + cases(DEFAULT_SPECS, True)
)
# Laws that options can break: every variant too.
every_option = pytest.mark.parametrize(
    ("spec", "parallel"), cases(TESTED_SPECS, False) + cases(DEFAULT_SPECS, True)
)
# A law that options can break in parallel blocks alone.
every_start = pytest.mark.parametrize(
    ("spec", "parallel"), cases(TESTED_SPECS, False) + cases(TESTED_SPECS, True)
)
# Laws that parallel blocks cannot break.
every_variant = pytest.mark.parametrize(("spec", "parallel"), cases(TESTED_SPECS, False))
every_variant_slow = pytest.mark.parametrize(
    ("spec", "parallel"),
    cases(DEFAULT_SPECS, False) + cases(TESTED_VARIANTS, False, pytest.mark.slow),
)
every_sequential = pytest.mark.parametrize(("spec", "parallel"), cases(DEFAULT_SPECS, False))
# A compilation takes seconds: one method is compiled in the fast tests.
COMPILED_FAST = ["mudd"]
COMPILED_PARALLEL = ["mudd", "hyper", "attnres", "mgr"]
# Each method and these variants, whose gradients are of other operations than their method's, and a
# method of each kind of state as a parallel block.
OTHER_READS = [
    "attnres(block_size=3)",
    "hyper(streams=2, dynamic=False)",
    "mhc(single_pass=True)",
    "mudd(normed=True)",
]
compiled = pytest.mark.parametrize(
    ("spec", "parallel"),
    cases(COMPILED_FAST, False)
    + cases(
        [s for s in DEFAULT_SPECS + OTHER_READS if s not in COMPILED_FAST], False, pytest.mark.slow
    )
    + cases(COMPILED_PARALLEL, True, pytest.mark.slow),
)


every_fused = pytest.mark.parametrize(
    ("spec", "parallel"),
    [
        case
        for case in cases(TESTED_SPECS, False) + cases(DEFAULT_SPECS, True)
        if issubclass(crosslayer.make(case.values[0]).method, FusedNormConnection)
    ],
)


def chain(spec: str, parallel: bool, dim: int = 6, layers: int = 4) -> list[crosslayer.Connection]:
    """The connections alone, in float64 with perturbed weights."""
    make = crosslayer.make(spec)
    norm = lambda port: nn.RMSNorm(dim, eps=1e-6)  # noqa: E731
    sites = [make(site, dim, norm).double() for site in crosslayer.plan(layers, parallel)]
    return [perturb_weights(site) for site in sites]


def sublayer(k: int, inputs: tuple[Tensor, ...]) -> Tensor:
    """A sub-layer that treats every token alone and distinguishes its inputs."""
    return sum(torch.tanh((i + k + 1) * x.roll(i, -1)) for i, x in enumerate(inputs))


class SublayerModule(nn.Module):
    """`sublayer` as a module of a `Stack`."""

    def __init__(self, k: int):
        super().__init__()
        self.k = k

    def forward(self, *inputs: Tensor) -> Tensor:
        return sublayer(self.k, inputs)


def run(sites: list[crosslayer.Connection], x: Tensor) -> Tensor:
    state = sites[0].init(x)
    for k, site in enumerate(sites[:-1]):
        inputs, state = site.read(state)
        state = site.write(state, sublayer(k, inputs))
    return sites[-1].readout(state)


@pytest.fixture(autouse=True)
def same_start():
    """Every test starts from one seed and leaves torch's defaults as they were."""
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch._dynamo.reset()


# ---- the class


def is_own(method: type) -> bool:
    """Whether crosslayer brings it. Other packages may have other habits."""
    return method.__module__.startswith("crosslayer.connections.")


def is_of_this_process(spec: str) -> bool:
    """Whether `register_connection` alone has made the method known."""
    name = crosslayer.make(spec).name
    is_installed = name in {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}
    return not is_own(crosslayer.make(name).method) and not is_installed


@pytest.mark.parametrize("name", DEFAULT_SPECS)
def test_class_is_documented(name):
    method = crosslayer.make(name).method
    doc = inspect.cleandoc(vars(method).get("__doc__") or "")
    assert "Paper:" in doc or not is_own(method), (
        f"{method.__name__} needs a docstring: what it is in one line, and `Paper: Title (Authors, "
        "year), arXiv 0000.00000`"
    )
    for option in crosslayer.spec.default_options(method):
        assert f"    {option}: " in doc, f"`Args:` of {method.__name__} must explain {option!r}"


@pytest.mark.parametrize("name", [n for n in DEFAULT_SPECS if is_own(crosslayer.make(n).method)])
def test_class_is_abstract_or_final(name):
    """What two methods of crosslayer share is a function; none is a base class of another."""
    method = crosslayer.make(name).method
    for base in method.__mro__[1:]:
        assert not base.__module__.startswith("crosslayer.connections."), f"it inherits {base}"
    assert method.name == name


@pytest.mark.parametrize("name", DEFAULT_SPECS)
def test_class_overrides_no_method_of_a_module(name):
    """A method called `apply` or `half` would be called by torch, for something else."""
    method = crosslayer.make(name).method
    of_module = {key for key in vars(nn.Module) if not key.startswith("__")} - {"extra_repr"}
    assert not of_module & vars(method).keys(), "rename what has the name of a method of nn.Module"


@pytest.mark.parametrize("name", DEFAULT_SPECS)
def test_the_gate_field_is_declared(name):
    """Fields of the state that stay float32 in a bf16 model are coefficients."""
    make = crosslayer.make(name)
    sites = [make(site, 6, lambda port: nn.Identity()) for site in crosslayer.plan(4)]
    state = sites[0].init(torch.randn(2, 3, 6).bfloat16())
    coefficients = set()
    for k, site in enumerate(sites):
        inputs, state = site.read(state)
        for field, value in state._asdict().items():
            if any(leaf is not None and leaf.dtype == torch.float32 for leaf in tree_leaves(value)):
                coefficients.add(field)
        state = site.write(state, sublayer(k, inputs))
    if not coefficients:
        assert not make.method.gate_field
        return
    assert make.method.gate_field in coefficients, (
        f"the state has coefficients {coefficients}: gate_field must name the one that weights the "
        "pending write, so that diagnostics log it"
    )


# ---- the state


@every_method
def test_every_token_is_alone(spec, parallel):
    sites = chain(spec, parallel)
    x = torch.randn(2, 6, 6, dtype=torch.float64)
    order = torch.randperm(6)
    out = run(sites, x)
    torch.testing.assert_close(out[:, order], run(sites, x[:, order]), rtol=0, atol=1e-12)
    # nor does a token see another sequence
    of_one_token = run(sites, x.reshape(12, 1, 6))
    torch.testing.assert_close(out, of_one_token.view_as(out), rtol=0, atol=1e-12)


@every_method
def test_two_inputs_by_turns(spec, parallel):
    """Two inputs that one model reads alternately, site by site, do not see each other."""
    sites = chain(spec, parallel)
    x = torch.randn(2, 1, 4, 6, dtype=torch.float64)
    alone = [run(sites, one_input) for one_input in x]
    states = [sites[0].init(one_input) for one_input in x]
    for k, site in enumerate(sites[:-1]):
        for i in range(2):
            inputs, states[i] = site.read(states[i])
            states[i] = site.write(states[i], sublayer(k, inputs))
    for state, expected in zip(states, alone, strict=True):
        assert torch.equal(sites[-1].readout(state), expected)


@every_sequential
def test_causal(spec, parallel):
    model = tiny_gpt(spec, parallel).double()
    ids = token_ids()
    torch.testing.assert_close(model(ids)[:, :4], model(ids[:, :4]), rtol=0, atol=1e-12)


@every_variant
def test_state_cuts_bitwise(spec, parallel):
    model = tiny_gpt(spec, parallel)
    ids = token_ids()
    expected = model(ids)
    for cut in range(len(model.blocks)):
        state = model.readout.init(model.embed_tokens(ids))
        for block in model.blocks[:cut]:
            state = block(state)
        assert hasattr(state, "_fields"), "a state is a NamedTuple"
        leaves, structure = tree_flatten(state)
        assert all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves), (
            "a state contains tensors, tuples and None"
        )
        viewed = [leaf._base if leaf is not None and leaf._is_view() else leaf for leaf in leaves]
        assert not any(isinstance(tensor, nn.Parameter) for tensor in viewed), (
            "FSDP would free a parameter that travels in the state, or a view of one: put a clone "
            "in instead"
        )
        cloned = [leaf if leaf is None else leaf.clone() for leaf in leaves]
        state = tree_unflatten(cloned, structure)
        for block in model.blocks[cut:]:
            state = block(state)
        assert torch.equal(model.head(model.readout.readout(state)), expected)


@every_sequential
def test_forward_stores_nothing(spec, parallel):
    model = tiny_gpt(spec, parallel)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    pickled = pickle.dumps(model)
    model(token_ids())
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        for key, value in vars(module).items():
            assert value is before[name][key], f"{name}.{key} changed in forward"
    assert pickle.dumps(model) == pickled, "a container of a module changed in forward"


# ---- recomputation and compilation


@every_method
def test_gradient_checkpointing_is_bitwise(spec, parallel):
    model = tiny_gpt(spec, parallel)
    ids = token_ids()
    loss, gradients = loss_and_gradients(model, ids)
    model.checkpointing = True
    again, recomputed = loss_and_gradients(model, ids)
    assert torch.equal(loss, again) and equal_tensors(gradients, recomputed)


@every_sequential
def test_read_recomputes_bitwise(spec, parallel):
    model = tiny_gpt(spec, parallel)
    ids = token_ids()
    loss, gradients = loss_and_gradients(model, ids)
    for connection in find_connections(model):
        read = connection.read
        connection.read = lambda state, read=read: checkpoint(read, state, use_reentrant=False)
    again, recomputed = loss_and_gradients(model, ids)
    assert torch.equal(loss, again) and equal_tensors(gradients, recomputed)


@every_fused
def test_fused_norms_are_those_of_the_ports(spec, parallel):
    """`fused_read` with the ports' norms gives what `read` gives with the norms as modules."""
    sites = chain(spec, parallel)
    x = torch.randn(2, 6, 6, dtype=torch.float64)
    state = sites[0].init(x)
    fused_sites = 0
    for k, site in enumerate(sites):
        inputs, state_after = site.read(state)
        norms = site.fused_norm_specs()
        if norms:
            fused_sites += 1
            assert len(norms) == len(site.ports)
            fused_inputs, fused_state = site.fused_read(state, norms)
            fused = [*fused_inputs, *tree_leaves(fused_state)]
            for a, b in zip(fused, [*inputs, *tree_leaves(state_after)], strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        if k < len(sites) - 1:
            state = site.write(state_after, sublayer(k, inputs))
    assert fused_sites, "no site fuses its norms"


@compiled
def test_one_graph(spec, parallel):
    model = tiny_gpt(spec, parallel, layers=2)
    ids = token_ids()
    loss, gradients = loss_and_gradients(model, ids)
    model.compile(fullgraph=True, backend="aot_eager")
    again, compiled = loss_and_gradients(model, ids)
    torch.testing.assert_close(again, loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(compiled, gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["attnres", "hyper", "mgr"])
def test_dynamic_shapes_compile(spec):
    """A training step whose floats are no constants of the graph."""
    model = tiny_gpt(spec, layers=1)
    model.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (7, 5):
        compiled = loss_and_gradients(model, token_ids(length=length))
        eager = tiny_gpt(spec, layers=1)
        torch.testing.assert_close(
            compiled, loss_and_gradients(eager, token_ids(length=length)), rtol=1e-5, atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
# Inductor's gradient of a sum over 8 columns was once wrong: 6 and 2 streams make other sums.
@pytest.mark.parametrize(
    "spec",
    [
        "mudd",
        "attnres(block_size=3)",
        "mgr(streams=2)",
        "hyper(streams=6)",
        "mhc(streams=2, iterations=3)",
    ],
)
def test_inductor(spec):
    model = tiny_gpt(spec, layers=2)
    ids = token_ids()
    loss, gradients = loss_and_gradients(model, ids)
    model.compile(fullgraph=True)
    again, compiled = loss_and_gradients(model, ids)
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(compiled, gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@compiled
def test_blocks_compile_to_few_graphs(spec, parallel):
    """Compiled block by block there is one graph for each structure of state and parameters.

    No integer that differs between layers is compiled in, except attributes of a connection.
    """
    from torch._dynamo.testing import CompileCounter

    model = tiny_gpt(spec, parallel, layers=4)
    counter = CompileCounter()
    ids = token_ids()
    state = model.readout.init(model.embed(ids))
    structures = set()
    for block in model.blocks:
        strides = tuple(leaf is not None and leaf.stride() for leaf in tree_leaves(state))
        shapes = tuple((n, p.shape) for n, p in block.named_parameters())
        integer_attributes = tuple(
            tuple(value for value in vars(connection).values() if isinstance(value, int))
            for connection in block.connections
        )
        structures.add((strides, shapes, integer_attributes))
        state = block(state)
        block.compile(fullgraph=True, backend=counter)
    model(ids)
    assert counter.frame_count <= len(structures), (
        f"{len(structures)} graphs are needed and {counter.frame_count} were compiled: a number or "
        "a tuple of numbers that differs between sites is compiled in"
    )


@pytest.fixture(scope="session")
def sharded_errors(request, tmp_path_factory):
    """What `shard_and_train` found for each selected case, in one pair of processes."""
    collected = [
        (item.callspec.params["spec"], item.callspec.params["parallel"])
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_two_rank_fsdp2"
    ]
    selected = [case for case in collected if not is_of_this_process(case[0])]
    folder = str(tmp_path_factory.mktemp("fsdp"))
    torch.multiprocessing.spawn(two_ranks.shard_and_train, (folder, selected), nprocs=2)
    with open(f"{folder}/errors.json") as file:
        return json.load(file)


@pytest.mark.slow
@pytest.mark.xdist_group("fsdp")
@every_option
def test_two_rank_fsdp2(spec, parallel, sharded_errors):
    if is_of_this_process(spec):
        pytest.skip("other processes know installed methods alone: name it as an entry point")
    errors = sharded_errors[f"{spec}-{parallel}"]
    assert not errors["exception"], errors["exception"]
    assert errors["gradients"] < 1e-5
    assert errors["reset parameters"] == []


@every_option
def test_mixing_weights_are_those_of_the_read(spec, parallel):
    """Multiplied over depth, they give every input. A method need not have them."""
    pytest.importorskip("transformers")
    from crosslayer.inspect import unfold_connections

    if crosslayer.make(spec).method.mixing_weights is crosslayer.Connection.mixing_weights:
        pytest.skip("the method has no mixing_weights")
    sublayers = [SublayerModule(k) for k in range(6)]
    stack = perturb_weights(crosslayer.Stack(spec, sublayers, 6, parallel=parallel))
    unfolded = unfold_connections(stack, [{"embedding": torch.randn(2, 5, 6)}])
    assert unfolded.error < 2e-5
    assert len(unfolded.sources) == 7
    # no input contains an output that comes after it
    for row, label in zip(unfolded.mean, unfolded.inputs, strict=True):
        if label.startswith("0."):
            assert row[2:].abs().max() == 0


# ---- parameters


@every_option
def test_no_parameter_is_dead(spec, parallel):
    model = tiny_gpt(spec, parallel)
    _, gradients = loss_and_gradients(model, token_ids())
    alive = {name for name, gradient in gradients.items() if gradient.abs().max() > 0}
    assert alive == {name for name, p in model.named_parameters() if p.requires_grad}


@every_variant
def test_parameters_follow_the_conventions(spec, parallel):
    torch.manual_seed(5)
    random_state = torch.get_rng_state()
    make = crosslayer.make(spec)

    def norm(port):
        return nn.RMSNorm(6)

    with torch.device("meta"):
        for site in crosslayer.plan(4, parallel):
            assert all(p.is_meta for p in make(site, 6, norm).parameters())
    sites = [make(site, 6, norm) for site in crosslayer.plan(4, parallel)]
    assert torch.equal(random_state, torch.get_rng_state()), (
        "building a connection must not change the global random state: use assign_normal"
    )
    names = {name for site in sites for name, _ in site.named_parameters(recurse=False)}
    if spec in DEFAULT_SPECS:
        assert make.method.weight_decay_params <= names
    for site in sites:
        parameters = dict(site.named_parameters(recurse=False))
        for p in parameters.values():
            assert p.dim() >= 1 and p.dtype == torch.float32, "use float32_parameter"
        initial = {name: p.detach().clone() for name, p in parameters.items()}
        perturb_weights(site)
        site.reset_parameters()
        assert equal_tensors(initial, {name: p.detach() for name, p in parameters.items()}), (
            "reset_parameters must restore the initial values"
        )


@every_variant
def test_weight_decay_keeps_the_initial_function(spec, parallel):
    """Weight decay shrinks the generators of coefficients, not the static part.

    Where the parameters that decay are zero, the model is the one training starts from. DenseFormer
    and its baseline are the exceptions: their authors' code decays α and the gains.
    """
    model = tiny_gpt(spec, parallel, shaken=False)
    ids = token_ids()
    initial = model(ids)
    groups = crosslayer.param_groups(model, 1e-3, 0.1)
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    with torch.no_grad():
        for connection in find_connections(model):
            for parameter in connection.parameters(recurse=False):
                if id(parameter) in decayed:
                    parameter.zero_()
    decays_static_part = crosslayer.make(spec).name in ("denseformer", "skip_gain")
    assert torch.allclose(model(ids), initial, rtol=1e-6, atol=1e-6) != decays_static_part


@every_sequential
def test_copies_pickles_and_saves_bitwise(spec, parallel):
    model = tiny_gpt(spec, parallel)
    ids = token_ids()
    file = io.BytesIO()
    loss_and_gradients(model, ids)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    expected_loss, expected_gradients = loss_and_gradients(model, ids)
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = tiny_gpt(spec, parallel, shaken=False)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        loss, gradients = loss_and_gradients(twin, ids)
        assert torch.equal(loss, expected_loss) and equal_tensors(gradients, expected_gradients)


# ---- what is computed


@every_sequential
def test_training_and_evaluation_compute_the_same(spec, parallel):
    sites = chain(spec, parallel)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    outputs = [run([site.train(mode) for site in sites], x) for mode in (True, False)]
    assert torch.equal(*outputs)


@every_start
def test_starts_as_prenorm_where_it_says_so(spec, parallel):
    prenorm = tiny_gpt("prenorm", parallel, eps=0.0, shaken=False).double()
    model = tiny_gpt(without_eps(spec), parallel, eps=0.0, shaken=False).double()
    for key in prenorm.state_dict().keys() & model.state_dict().keys():
        assert torch.equal(prenorm.state_dict()[key], model.state_dict()[key]), (
            "building a connection must not change the backbone's weights"
        )
    error = (model(token_ids()) - prenorm(token_ids())).abs().max()
    functions = {connection.initial_function for connection in find_connections(model)}
    if functions <= set(PRENORM_FUNCTIONS):
        assert error < 1e-12, (
            "it does not start as pre-norm: mend reset_parameters, or declare "
            '`initial_function = "other"`, in __init__ where that depends on options'
        )
    else:
        assert error > 1e-3, (
            "it starts as pre-norm: declare initial_function as one of "
            + ", ".join(map(repr, PRENORM_FUNCTIONS))
        )


@every_sequential
def test_starts_bitwise_as_prenorm_where_it_says_so(spec, parallel):
    prenorm = tiny_gpt("prenorm", parallel, shaken=False)(token_ids())
    is_bitwise = torch.equal(tiny_gpt(spec, parallel, shaken=False)(token_ids()), prenorm)
    declared = crosslayer.make(spec).method.initial_function
    assert is_bitwise == (declared == "bitwise prenorm"), (
        f"its first logits are {'' if is_bitwise else 'not '}bitwise those of pre-norm: declare "
        f"another initial_function than {declared!r}"
    )


@every_variant
def test_scales_nothing_else_than_it_says(spec, parallel):
    """At initialisation, where no norm removes a scale."""
    function = initial_function(spec)
    if function not in PRENORM_FUNCTIONS or function == "prenorm up to scales":
        return
    *inputs, hidden = first_reads(without_eps(spec))
    *prenorm_inputs, prenorm_hidden = first_reads("prenorm")
    assert all(map(torch.allclose, inputs, prenorm_inputs)), (
        'it scales inputs of sub-layers: declare `initial_function = "prenorm up to scales"`'
    )
    if function != "prenorm up to scale of readout":
        assert torch.allclose(hidden, prenorm_hidden), (
            'it scales the readout: declare `initial_function = "prenorm up to scale of readout"`'
        )


@every_variant
def test_is_postnorm_where_it_says_so(spec, parallel):
    """x ← Norm(x + F(x)), the embedding normed too, bit for bit."""
    if initial_function(spec) != "bitwise postnorm":
        return
    norm = nn.RMSNorm(6)
    h = norm(torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(4)))
    expected = []
    for k in range(4):
        expected.append(h)
        h = norm(h + sublayer(k, (h,)))
    assert all(map(torch.equal, first_reads(spec, nn.RMSNorm, torch.float32), [*expected, h]))


def initial_function(spec: str) -> str:
    """What a model with this connection computes at first; "other" where its sites differ."""
    sites = [crosslayer.make(spec)(site, 6, lambda port: nn.RMSNorm(6)) for site in SITES]
    functions = {site.initial_function for site in sites}
    return functions.pop() if len(functions) == 1 else "other"


def first_reads(
    spec: str, norm: type[nn.Module] = nn.Identity, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """What each sub-layer reads at its first port at initialisation, and the readout."""
    sites = [crosslayer.make(spec)(site, 6, lambda port: norm(6)).to(dtype) for site in SITES]
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(4)).to(dtype)
    state = sites[0].init(x)
    reads = []
    for k, site in enumerate(sites[:-1]):
        inputs, state = site.read(state)
        reads.append(inputs[0])
        state = site.write(state, sublayer(k, inputs[:1]))
    return [*reads, sites[-1].readout(state)]


@every_variant
def test_gradcheck(spec, parallel):
    sites = chain(spec, parallel, dim=6, layers=2)
    x = torch.randn(1, 2, 6, dtype=torch.float64, requires_grad=True)
    parameters = [p for site in sites for p in site.parameters() if p.requires_grad]
    assert torch.autograd.gradcheck(lambda x, *_: run(sites, x), (x, *parameters), fast_mode=True)


@every_variant_slow
def test_second_derivatives(spec, parallel):
    """A Hessian-vector product, through `create_graph` and through `torch.func`, equals the
    difference of two gradients.
    """
    sites = chain(spec, parallel, dim=6, layers=2)
    x, v = torch.randn(2, 1, 2, 6, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return run(sites, x).square().sin().sum()

    def gradient(x: Tensor, create_graph: bool = False) -> Tensor:
        return torch.autograd.grad(loss(x), x, create_graph=create_graph)[0]

    step = 1e-5
    above, below = ((x + s * v).requires_grad_() for s in (step, -step))
    expected = (gradient(above) - gradient(below)) / (2 * step)
    x.requires_grad_()
    (twice,) = torch.autograd.grad(gradient(x, create_graph=True), x, v)
    _, transformed = torch.func.jvp(torch.func.grad(loss), (x.detach(),), (v,))
    for product in (twice, transformed):
        assert (product - expected).norm() < 1e-5 * expected.norm()


@every_variant_slow
def test_vectorised_jacobian(spec, parallel):
    """All rows of a Jacobian in one backward pass: every gradient has one more axis."""
    sites = chain(spec, parallel, layers=2)
    x = torch.randn(1, 2, 6, dtype=torch.float64, requires_grad=True)
    inputs = [x, *(p for site in sites for p in site.parameters() if p.requires_grad)]
    y = run(sites, x).flatten()
    options = {"retain_graph": True, "allow_unused": True}
    rows = [torch.autograd.grad(row, inputs, **options) for row in y]
    basis = torch.eye(len(y), dtype=y.dtype)
    jacobians = torch.autograd.grad(y, inputs, basis, is_grads_batched=True, allow_unused=True)
    for jacobian, of_rows in zip(jacobians, zip(*rows, strict=True), strict=True):
        if jacobian is not None:
            torch.testing.assert_close(jacobian, torch.stack(of_rows))


@every_sequential
def test_vmap_over_the_batch(spec, parallel):
    sites = chain(spec, parallel)
    x = torch.randn(2, 1, 3, 6, dtype=torch.float64)
    mapped = torch.func.vmap(lambda x: run(sites, x))(x)
    torch.testing.assert_close(mapped, torch.stack([run(sites, y) for y in x]), rtol=0, atol=1e-12)


@every_variant_slow
def test_an_empty_batch_has_zero_gradients(spec, parallel):
    sites = chain(spec, parallel, layers=2)
    for batch, length in ((0, 3), (2, 0)):
        x = torch.zeros(batch, length, 6, dtype=torch.float64)
        leaves = [x.requires_grad_(), *(p for site in sites for p in site.parameters())]
        leaves = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = torch.autograd.grad(
            run(sites, x).sum(), leaves, allow_unused=True, materialize_grads=True
        )
        assert not any(gradient.any() for gradient in gradients)


@every_option
def test_a_zero_token_has_finite_gradients(spec, parallel):
    """A padding token's embedding is zero, and so may be all that sub-layers write for it."""
    sites = chain(spec, parallel)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    x[0, 1] = 0
    leaves = [x.requires_grad_(), *(p for site in sites for p in site.parameters())]
    y = run(sites, x)
    assert y.isfinite().all()
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in gradients)


@every_option
def test_memory_traffic_is_what_read_moves(spec, parallel):
    """At least the streams that `read` depends on, at most these and everything it returns.

    In elements of D a token; one memory is counted once.
    """
    dim = 24  # more than any number of coefficients
    make = crosslayer.make(spec)
    sites = [make(site, dim, lambda port: nn.RMSNorm(dim)) for site in crosslayer.plan(4, parallel)]
    x = torch.randn(2, 3, dim)

    def streams(tree) -> list[Tensor]:
        return [
            leaf for leaf in tree_leaves(tree) if leaf is not None and leaf.numel() >= x.numel()
        ]

    def elements(tensors: list[Tensor]) -> float:
        distinct = {}
        for tensor in tensors:
            is_repeated = 0 in tensor.stride()  # n equal streams in one memory
            size = 1.0 if is_repeated else tensor.numel() / x.numel()
            distinct[tensor.data_ptr()] = max(size, distinct.get(tensor.data_ptr(), 0.0))
        return sum(distinct.values())

    state = sites[0].init(x)
    for k, site in enumerate(sites):
        perturb_weights(site)
        state = tree_map(lambda t: t if t is None else t.detach().requires_grad_(), state)
        inputs, state_after = site.read(state)
        before = streams(state)
        new = [t for t in streams((inputs, state_after)) if not any(t is old for old in before)]
        gradients = torch.autograd.grad(
            sum(t.sum() for t in new), before, allow_unused=True, materialize_grads=False
        )
        used = [t for t, gradient in zip(before, gradients, strict=True) if gradient is not None]
        least = elements(used)
        most = elements(used) + elements(new)
        assert least <= site.memory_traffic() <= most, (
            f"memory_traffic() is {site.memory_traffic()} at site {k}, but `read` moves between "
            f"{least} and {most}"
        )
        if k < len(sites) - 1:
            state = site.write(state_after, sublayer(k, inputs).detach())


# ---- precision


def in_float32(function, *state):
    """The result of `function` computed in float32 throughout and rounded to bf16 where it is."""
    wide = tree_map(lambda x: x.float() if isinstance(x, Tensor) else x, state)
    return tree_map(
        lambda x, like: x.to(like.dtype) if isinstance(x, Tensor) else x,
        function(*wide),
        function(*state),
    )


@every_method
def test_a_bf16_model_keeps_coefficients_in_float32(spec, parallel):
    exact = tiny_gpt(spec, parallel).double()
    model = copy.deepcopy(exact).float().bfloat16()
    for connection in find_connections(model):
        assert all(p.dtype == torch.float32 for p in connection.parameters(recurse=False))
        assert all(p.dtype == torch.bfloat16 for p in connection.norms.parameters())
    logits = model(token_ids())
    assert logits.dtype == torch.bfloat16, (
        "the streams became wider than the model: cast to the stream's dtype after a product with "
        "a float32 coefficient"
    )
    prenorm = tiny_gpt("prenorm", parallel).double()
    rounded = copy.deepcopy(prenorm).float().bfloat16()(token_ids()).double()
    rounding = (rounded - prenorm(token_ids())).norm()
    error = (logits.double() - exact(token_ids())).norm()
    assert error < 4 * rounding, "a connection may not lose more than bf16 itself does"


@every_variant
def test_bf16_error_is_at_most_twice_the_float32_internal_reference(spec, parallel):
    """The reference reads every bf16 state in float32 throughout and rounds its results alone."""
    dim = 48
    make = crosslayer.make(spec)
    sites = [make(site, dim, lambda port: nn.Identity()) for site in crosslayer.plan(4, parallel)]
    exact = [perturb_weights(site.double()) for site in sites]
    sites = [copy.deepcopy(site).float() for site in exact]
    x = torch.randn(4, 32, dim).bfloat16()

    def reference(sites, x):
        state = sites[0].init(x)
        for k, site in enumerate(sites[:-1]):
            inputs, state = in_float32(site.read, state)
            state = site.write(state, sublayer(k, inputs))
        return in_float32(sites[-1].readout, state)

    truth = run(exact, x.double())
    error = (run(sites, x).double() - truth).norm()
    reference_error = (reference(sites, x).double() - truth).norm()
    assert error <= 2 * reference_error


@every_variant
def test_float16_has_the_range_of_prenorm(spec, parallel):
    """A sum of streams does not overflow before the norm that follows it."""
    make = crosslayer.make(spec)
    x = torch.full((1, 1, 6), 5e4, dtype=torch.float16, requires_grad=True)
    for eps in (1e-6, None):
        norm = lambda port: nn.RMSNorm(6, eps=eps)  # noqa: E731
        sites = [make(site, 6, norm).half() for site in crosslayer.plan(4, parallel)]
        out = run(sites, x)
        assert out.isfinite().all()
        assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


@every_variant
def test_a_model_of_any_default_dtype(spec, parallel):
    """Under a float64 default all is float64; under a bf16 default initial values stay float32."""
    usual = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert tiny_gpt(spec, parallel)(token_ids()).dtype == torch.float64
        torch.set_default_dtype(torch.bfloat16)
        half = tiny_gpt(spec, parallel, shaken=False)
    finally:
        torch.set_default_dtype(usual)
    full = tiny_gpt(spec, parallel, shaken=False)
    for one, other in zip(find_connections(half), find_connections(full), strict=True):
        for name, value in one.named_parameters(recurse=False):
            expected = other._parameters[name]
            assert value.dtype == expected.dtype, f"{name}: use float32_parameter"
            assert torch.equal(value, expected), name


@every_sequential
def test_autocast_leaves_coefficients_in_float32(spec, parallel):
    model = tiny_gpt(spec, parallel)
    ids = token_ids()
    first = model.blocks[0].connections[0]
    with torch.autocast("cpu", torch.bfloat16):
        inputs, _ = first.read(model.readout.init(model.embed(ids)))
    expected, _ = first.read(model.readout.init(model.embed(ids)))
    assert all(torch.equal(x, y) for x, y in zip(inputs, expected, strict=True))


@every_variant
def test_half_precision_outputs_are_summed_in_the_embeddings_dtype(spec, parallel):
    """Under autocast sub-layers return bf16: the streams lose no more than those outputs did.

    The writes are exact in bf16, so summed in float32 they are what float32 writes would be.
    """
    sites = [site.float() for site in chain(spec, parallel, layers=5)]
    x = torch.randn(2, 8, 6)
    states = [sites[0].init(x), sites[0].init(x)]
    with torch.autocast("cpu", torch.bfloat16):
        for k, site in enumerate(sites[:-1]):
            inputs, states[0] = site.read(states[0])
            _, states[1] = site.read(states[1])
            y = sublayer(k, inputs).bfloat16()
            states = [site.write(states[0], y), site.write(states[1], y.float())]
        half, full = (sites[-1].readout(state) for state in states)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, full, rtol=1e-5, atol=1e-6)


@every_sequential
def test_stream_dtype_is_the_dtype_of_the_streams(spec, parallel):
    """Float32 streams in a bf16 model: they are those of a float32 model with the same writes."""
    sites = [site.float() for site in chain(f"{spec}(stream_dtype='float32')", parallel)]
    bf16_sites = [copy.deepcopy(site).bfloat16() for site in sites]
    for site, bf16_site in zip(sites, bf16_sites, strict=True):
        site.norms.load_state_dict(bf16_site.norms.state_dict())
    x = torch.randn(2, 8, 6).bfloat16()
    bf16_state = bf16_sites[0].init(x)
    state = sites[0].init(x.float())
    for k, (bf16_site, site) in enumerate(zip(bf16_sites[:-1], sites[:-1], strict=True)):
        inputs, bf16_state = bf16_site.read(bf16_state)
        _, state = site.read(state)
        assert all(x.dtype == torch.bfloat16 for x in inputs)
        torch.testing.assert_close(bf16_state, state, rtol=1e-5, atol=1e-6)
        y = sublayer(k, inputs)
        bf16_state = bf16_site.write(bf16_state, y)
        state = site.write(state, y.float())


# ---- the registry


def test_a_new_file_is_a_new_method(tmp_path, monkeypatch):
    (tmp_path / "ninth.py").write_text(
        "from crosslayer.connections.prenorm import PreNorm\nclass Ninth(PreNorm):\n    pass\n"
    )
    path = [*crosslayer.connections.__path__, str(tmp_path)]
    monkeypatch.setattr(crosslayer.connections, "__path__", path)
    assert "ninth" in crosslayer.available()
    assert torch.equal(tiny_gpt("ninth")(token_ids()), tiny_gpt("prenorm")(token_ids()))
