"""The public interface: names, specs, what they print, and how they fail."""

import pickle
import subprocess
import sys
from enum import Enum, IntEnum
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import crosslayer
from crosslayer import ConnectionSpec, make
from crosslayer.connection import Connection, find_connections
from crosslayer.connections._dense import DepthAverages
from crosslayer.recompute import enable_recompute
from crosslayer.sites import plan_layers
from crosslayer.spec import split_specs
from crosslayer.testing.tiny_model import perturb_weights, tiny_gpt, token_ids
from tests.hf.backbones import llama


def build(spec: str | ConnectionSpec, index: int = 0, layers: int = 3) -> Connection:
    """The connection of one site, 8 wide."""
    return make(spec)(crosslayer.plan(layers)[index], 8, lambda port: nn.RMSNorm(8))


def test_public_names():
    assert all(hasattr(crosslayer, name) for name in crosslayer.__all__)
    assert len(crosslayer.__all__) <= 14
    with pytest.raises(AttributeError, match="has no attribute 'conect'"):
        _ = crosslayer.conect


@pytest.mark.slow
def test_completion_shows_the_public_names():
    """And packages once they are imported, which need no import of their own."""
    code = "import crosslayer; print(dir(crosslayer) == sorted(crosslayer.__all__)); "
    code += "crosslayer.inspect.measure_scales; print('inspect' in dir(crosslayer))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "True"]


# ---- specs


@pytest.mark.parametrize(
    "text",
    ["mudd", "mudd(dilation=2)", "mudd(ways='k v r', dynamic=False)", " hyper ( streams = 2 ) "],
)
def test_a_string_and_back(text):
    spec = make(text)
    assert make(str(spec)) == spec == pickle.loads(pickle.dumps(spec))
    connection = build(spec, 2)
    assert isinstance(connection, spec.method)
    assert connection.name == spec.name and connection.options == spec.options


def test_options_by_keyword():
    spec = make("mudd", dilation=2)
    assert spec == make("mudd(dilation=2)") == make(spec) == make(make("mudd"), dilation=2)
    assert str(spec) == "mudd(dilation=2)" and hash(spec) == hash(make("mudd(dilation=2)"))
    assert spec != make("mudd") and len({spec, make("mudd(dilation=2)"), make("mudd")}) == 2
    assert make("mudd(period=2)", dilation=2).options == {"period": 2, "dilation": 2}
    # Options need not be hashable, and a spec made from another does not change it.
    matrix = make("hyper", streams=1, matrix=[[0, 1], [1, 1]])
    assert hash(matrix) == hash(make(str(matrix)))
    base = make("hyper(streams=2)")
    make(base, tanh=False)
    assert base == make("hyper(streams=2)")


def test_equal_options_in_another_order_are_one_spec():
    a, b = make("mudd", dilation=2, period=3), make("mudd", period=3, dilation=2)
    assert a == b and hash(a) == hash(b)


def test_a_dtype_of_torch_is_written_by_its_name():
    spec = make("mudd", stream_dtype=torch.bfloat16)
    assert str(spec) == "mudd(stream_dtype='bfloat16')"


class Streams(IntEnum):
    TWO = 2


Ways = Enum("Ways", {"READ": "k v r"}, type=str)


def test_numbers_and_enums_of_others_are_written_as_pythons():
    spec = make("hyper", streams=Streams.TWO, matrix=[[np.float64(0.5), 1.0]], dynamic=True)
    assert str(spec) == "hyper(streams=2, matrix=[[0.5, 1.0]], dynamic=True)"
    assert str(make("highway", bias=np.float64(-2))) == "highway(bias=-2.0)"
    for ways in (Ways.READ, np.str_("k v r")):
        assert str(make("mudd", ways=ways)) == "mudd(ways='k v r')"
    rows = ((0, np.float32(1)), [np.int64(1), np.float64(0.5)])
    spec = make("hyper", streams=1, matrix=rows)
    assert str(make(str(spec))) == str(spec) == "hyper(streams=1, matrix=((0, 1.0), [1, 0.5]))"


def test_former_names():
    assert make("gains") == make("skip_gain") and make("residual_dual") == make("resi_dual")
    assert ConnectionSpec("gains").method is make("skip_gain").method
    with pytest.raises(ValueError, match=r"unknown connection 'muud' \(did you mean 'mudd'"):
        _ = ConnectionSpec("muud").method


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "denseforme",
            r"^unknown connection 'denseforme' \(did you mean 'denseformer'\?\); known: altup, ",
        ),
        ("xyz", "^unknown connection 'xyz'; known: altup, attnres"),
        (
            "hyper(stream=2)",
            r"^unknown option 'stream' of 'hyper' \(did you mean 'streams'\?\); its options: str",
        ),
        ("prenorm(x=1)", "^unknown option 'x' of 'prenorm'; its options: stream_dtype=None$"),
        (
            "mudd(2)",
            r"^cannot read the connection 'mudd\(2\)': expected .* a name with options by keyword",
        ),
        ("mudd(dilation=)", "^cannot read the connection"),
        ("mudd(period=2, **{'dilation': 2})", "^cannot read the connection"),
        ("mudd(dilation=__import__('os'))", "^mudd: dilation must be a number, a string, a list"),
        ("mudd(dilation=1, dilation=2)", "^mudd: the option 'dilation' is given twice$"),
        ("mudd(dilation=" + "[" * 999 + "]" * 999 + ")", "^cannot read the connection"),
        ("mudd(dilation=" + "-" * 5000 + "1)", "^(mudd: dilation|cannot read the connection)"),
        ("mudd(dilation={[1]: 2})", "^mudd: dilation must be a number"),
        ("mudd(dynamic='no')", "^mudd: dynamic must be True or False, got 'no'$"),
        ("mudd(dynamic=1)", "^mudd: dynamic must be True or False, got 1$"),
        ("mudd(dilation=True)", "^mudd: dilation must be a whole number, got True$"),
        ("mudd(period='lst')", r"^mudd: period must be .* or one of 'last', got 'lst' \(did you"),
        ("mudd(window=[[1]])", r"^mudd: window must be a whole number or None, got \[\[1\]\]$"),
        ("hyper(beta=1e999)", "^hyper: beta must be a finite number, got inf$"),
        ("hyper(beta=1" + "0" * 400 + ")", "^hyper: beta must be a finite number, got 100"),
        (
            "prenorm(stream_dtype=32)",
            "^prenorm: stream_dtype must be one of 'float32', .* or None, got 32$",
        ),
        ("os.system", "^cannot read the connection"),
        ("mudd#dilation=2", "^cannot read the connection 'mudd#dilation=2'"),
        ("", "^cannot read the connection"),
        ("mudd\ud800", r"^cannot read the connection 'mudd\\ud800'"),
        (None, "^cannot read the connection None"),
    ],
)
def test_bad_strings(text, message):
    with pytest.raises(ValueError, match=message):
        make(text)


def test_bad_keywords():
    with pytest.raises(ValueError, match=r"^unknown option 'dilaton' .*did you mean 'dilation'"):
        make("mudd", dilaton=2)
    with pytest.raises(ValueError, match="the option 'dilation' is given twice, as 2 and 3"):
        make("mudd(dilation=2)", dilation=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "mudd(ways='q k k')",
            "at most once, with spaces between mixtures, like 'q k v r' or 'qkvr', got 'q k k'",
        ),
        ("mudd(ways='q x')", "ways must name each of"),
        ("mudd(ways='')", "ways must name each of"),
        ("mudd(period=1.5)", "period must be a whole number or one of 'last', got 1.5"),
        ("hyper(dynamic=False, tanh=False)", "tanh=False and dynamic=False exclude each other"),
        ("hyper(dynamic=False, stats='rmsnorm')", "stats='rmsnorm' and dynamic=False exclude"),
        ("frac(dynamic=False, tanh=False)", "tanh would change nothing"),
        ("hyper(streams=1, matrix=[[5, 1], [1, 1]])", "first number of matrix must be 0, .* got 5"),
        ("mudd(dynamic=False, gelu='tanh')", "gelu='tanh' and dynamic=False exclude each other"),
        ("mudd(dynamic=False, expand_last=True)", "expand_last=True and dynamic=False exclude"),
        ("mhc(residual='identity', order='dst last')", "order='dst last' and residual='identity'"),
        ("hyper(streams=True)", "streams must be a whole number, got True"),
        ("attnres(block_size=-1)", "block_size must be a whole number of at least 1, got -1"),
        ("mudd(ways='q k v', period='last')", "period='last' needs the way r, got ways='q k v'"),
        ("mudd(dilation=2, window=2)", "dilation=2 leaves one of the last 2 blocks .* the last 3"),
        ("hyper(streams=257)", "streams must be at most 256, got 257"),
        ("hyper(matrix=[])", r"matrix must be 5 by 5 for streams=4.*got \[\]"),
        ("hyper(matrix=[1, 2])", r"matrix must be 5 by 5 for streams=4.*got \[1, 2\]"),
        ("hyper(matrix=[[0, 1], [1]], streams=1)", "matrix must be 2 by 2 for streams=1"),
        ("hyper(matrix=[['a', 1], [1, 1]], streams=1)", "a number of matrix must .*, got 'a'"),
        ("hyper(beta='x')", "hyper: beta must be a finite number, got 'x'"),
        ("hyper(frozen=3)", "frozen must be one of '', 'B', 'WC', 'B WC', got 3"),
        ("hyper(frozen='C')", "frozen must be one of '', 'B', 'WC', 'B WC', got 'C'"),
        ("highway(bias='a')", "highway: bias must be a finite number, got 'a'"),
        ("denseformer(last_k='x')", "last_k must be a whole number or None, got 'x'"),
        (
            "denseformer(dilation='last')",
            "dilation must be a whole number, got 'last'",
        ),
        ("mudd(window='last')", "window must be a whole number or None, got 'last'"),
        ("mudd(normed=True, period=2)", "normed=True excludes dilation and period"),
        ("mudd(normed='pre', dilation=2)", "normed='pre' excludes dilation and period"),
        ("frac(fractions=0)", "fractions must be a whole number of at least 1, got 0"),
        ("frac(fractions=3)", "fractions must divide the width 8, got 3"),
        ("mhc(readout='max')", "readout must be one of 'head', 'sum', 'mean', got 'max'"),
        ("mhc(single_pass=True, readout='sum')", "exclude each other"),
        ("mhc_lite(streams=6)", "streams must be at most 5"),
        (
            "mudd(stream_dtype='int8')",
            "^mudd: stream_dtype must be one of 'float32', .* or None, got 'int8'$",
        ),
        (
            "hyper(stream_dtype='float16')",
            "^hyper: stream_dtype must be one of 'float32', 'bfloat16' or None, got 'float16'",
        ),
        ("mgr(gate='soft')", "gate must be one of 'competitive', 'independent', got 'soft'"),
        (
            "mgr(eq14='literal')",
            "eq14='literal' and gate='competitive' exclude each other: eq14 would change nothing",
        ),
        ("mgr(eq14='litteral')", r"got 'litteral' \(did you mean 'literal'\?\)"),
        ("mhc(order='src')", "order must be one of 'src last', 'dst last', got 'src'"),
        ("mgr(gate='independent', eq14='literal', bias=1)", "bias and eq14 exclude each other"),
        (
            "hyper(streams=1, matrix=[[0, 1e999], [1, 1]])",
            "must be a finite number, got inf",
        ),
        ("mgr(streams=6)", "Eq. 14 has no bias for 6 streams and 1 gated sub-layers"),
    ],
)
def test_bad_options(text, message):
    with pytest.raises(ValueError, match=message):
        [build(text, site.index) for site in crosslayer.plan(3)]


def test_split_specs():
    assert split_specs("a, b(x=1, y='p q') c(z=\"('(\"),d") == [
        "a",
        "b(x=1, y='p q')",
        'c(z="(\'(")',
        "d",
    ]
    nested = "hyper(streams=1, matrix=((0, 1), (1, 1)))"
    assert split_specs(f"{nested} mudd") == [nested, "mudd"]


def test_blocks_averaged_later_in_layers_of_different_lengths():
    one, two = [("mlp",)], [("attn",), ("mlp",)]
    sites = plan_layers([one, one, two, two])
    first = sites[1]
    assert first.layer == 1 and first.layers == 4
    every_fourth = DepthAverages(dilation=1, period=4, window=None)
    assert every_fourth.blocks_averaged_later(first) == {0, 1, 2, 3, 4}
    every_fifth = DepthAverages(dilation=1, period=5, window=None)
    assert not every_fifth.blocks_averaged_later(first)


def test_normed_sources_need_a_mixture_where_a_layer_begins():
    sites = plan_layers([[("q", "k", "v"), ("mlp",)], [("mlp",)], [("q", "k", "v"), ("mlp",)]])
    with pytest.raises(ValueError, match="needs the way r where a layer has no attention, as at s"):
        make("mudd", normed=True, ways="q k v")(sites[2], 8, lambda port: nn.RMSNorm(8))
    make("mudd", normed=True, ways="q k v r")(sites[2], 8, lambda port: nn.RMSNorm(8))


def test_plan():
    assert [
        (s.index, s.layer, s.ports, s.opens_layer, s.layers, s.depth) for s in crosslayer.plan(2)
    ] == [
        (0, 0, ("attn",), True, 2, 4),
        (1, 0, ("mlp",), False, 2, 4),
        (2, 1, ("attn",), True, 2, 4),
        (3, 1, ("mlp",), False, 2, 4),
        (4, 2, ("out",), True, 2, 4),
    ]
    assert [s.ports for s in crosslayer.plan(1, parallel=True)] == [("attn", "mlp"), ("out",)]
    assert [s.repeat for s in plan_layers([[("mlp",), ("attn",), ("mlp",)]])] == [0, 0, 1, 0]
    with pytest.raises(ValueError, match="layers must be a whole number of at least 1, got 0"):
        crosslayer.plan(0)


def test_connections_are_found_in_the_order_of_depth():
    model = nn.ModuleList(build("prenorm", index) for index in (2, 0, 1))
    assert [connection.site.index for connection in find_connections(model)] == [0, 1, 2]


SITE = crosslayer.plan(1)[0]
NO_MODEL = "^connect takes a model, got a str; load one with AutoModelForCausalLM"
NO_FUNCTION = r"^norm must be a function that makes a norm, like .*RMSNorm.*, got RMSNorm\(\(8,\)"


def stack_of_two(**options) -> crosslayer.Stack:
    return crosslayer.Stack("prenorm", [nn.Linear(8, 8), nn.Linear(8, 8)], **{"dim": 8, **options})


def write_twice(spec: str) -> None:
    connection = make(spec)(SITE, 8, lambda port: nn.RMSNorm(8))
    _, state = connection.read(connection.init(torch.zeros(1, 2, 8)))
    y = torch.zeros(1, 2, 8)
    connection.write(connection.write(state, y), y)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: crosslayer.connect("mudd", nn.Linear(8, 8)), NO_MODEL),
        (lambda: crosslayer.connect("EleutherAI/x", "mudd"), NO_MODEL),
        (lambda: make("mudd")(0, 8, nn.RMSNorm), "^site must come from crosslayer.plan, got 0$"),
        (lambda: make("mudd")(SITE, 8, nn.RMSNorm(8)), NO_FUNCTION),
        (lambda: stack_of_two(norm=nn.RMSNorm(8)), NO_FUNCTION),
        (lambda: make("mudd")(SITE, 8, None), "^norm must be a function .*RMSNorm.*, got None$"),
        (
            lambda: make("mudd")(SITE, 8, nn.RMSNorm),
            r"^norm must take the name of a port, like lambda port: nn.RMSNorm\(8\), got the class",
        ),
        (
            lambda: make("mudd(dilation=2)")(SITE, 8, lambda: nn.RMSNorm(8)),
            r"^norm must take the name of a port, .*; it raised: .* takes 0 positional arguments",
        ),
        (
            lambda: make("mudd(stream_dtype='float32')")(SITE, 8, lambda port: nn.Identity()),
            r"^stream_dtype needs norms with a weight, .* got Identity\(\)$",
        ),
        (
            lambda: make("prenorm(stream_dtype='float32')")(
                crosslayer.plan(1, parallel=True)[0],
                8,
                {"attn": nn.RMSNorm(8), "mlp": nn.Identity()}.get,
            ),
            r"^stream_dtype needs norms with a weight, .* got Identity\(\)$",
        ),
        (lambda: write_twice("prenorm"), "^write was called twice without a read in between"),
        (
            lambda: build("mgr").write(
                build("mgr").init(torch.zeros(2, 3, 8)), torch.zeros(2, 1, 8)
            ),
            r"^write takes an output of the stream's shape, \[2 3 8\], got \[2 1 8\]",
        ),
        (lambda: crosslayer.plan("2"), "^layers must be a whole number of at least 1, got '2'$"),
        (lambda: crosslayer.plan(True), "^layers must be a whole number of at least 1, got True$"),
        (
            lambda: make("prenorm")(SITE, 2**31, lambda port: nn.RMSNorm(8)),
            "^dim must be at most 2147483647, got 2147483648$",
        ),
        (
            lambda: stack_of_two(recompute="layers"),
            "^recompute must be one of streams, inversion, got 'layers'$",
        ),
        (
            lambda: stack_of_two()(torch.zeros(2, 16, 64)),
            r"^embedding must be \[B T 8\], got \[2 16 64\]$",
        ),
        (lambda: stack_of_two()(torch.zeros(2, 8)), r"must be \[B T 8\], got \[2 8\]$"),
        (lambda: stack_of_two(parallel="no"), "^parallel must be True or False, got 'no'$"),
        (lambda: stack_of_two(dim=-8), "^dim must be a whole number of at least 1, got -8$"),
        (
            lambda: crosslayer.Stack("mudd", nn.Linear(8, 8), 8),
            "^Stack: sublayers must be a list of modules, got Linear",
        ),
        (lambda: crosslayer.connect(stack_of_two(), "mudd"), "^the model has a crosslayer.Stack"),
        (lambda: crosslayer.disconnect(None), "^disconnect takes a model, got a NoneType$"),
        (lambda: crosslayer.from_pretrained(None), "^path must be .*, got None$"),
        (lambda: crosslayer.use_kernels("off"), "^enabled must be True or False .*, got 'off'$"),
        (
            lambda: crosslayer.param_groups(nn.Linear(8, 8), -1, 0.1),
            "^lr must be a number of at least 0, got -1$",
        ),
        (
            lambda: crosslayer.param_groups(nn.Linear(8, 8), 0.1, float("inf")),
            "^weight_decay must be a number of at least 0, got inf$",
        ),
        (
            lambda: crosslayer.param_groups(nn.Linear(8, 8), 0.1, 0.1, True),
            "^connection_lr_scale must be a number of at least 0, got True$",
        ),
        (
            lambda: crosslayer.param_groups(nn.Linear(8, 8), 0.1, 0.1, embedding_lr_scale=-1),
            "^embedding_lr_scale must be a number of at least 0, got -1$",
        ),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (None, TypeError, "of floating-point numbers, got a NoneType$"),
        (torch.zeros(2, 8, dtype=torch.long), TypeError, "got int64; embed token ids first$"),
        (torch.zeros(2, 3, 4), ValueError, r"^init takes the embedding, \[B T 8\] .*\[2 3 4\]$"),
        (torch.zeros(()), ValueError, r"got \[\]$"),
    ],
)
def test_init_takes_an_embedding(x, error, message):
    with pytest.raises(error, match=message):
        build("prenorm").init(x)


@pytest.mark.parametrize("name", ["prenorm", "hyper", "highway"])
def test_read_takes_a_state_of_its_method(name):
    with pytest.raises(TypeError, match=f"^{name} takes a state, a .*, got a NoneType"):
        build(name).read(None)
    with pytest.raises(TypeError, match=f"^{name} takes a state, a .*, got a NoneType"):
        build(name).write(None, torch.zeros(2, 3, 8))
    sites = [build("hyper", index).half() for index in range(7)]  # their op applies the norms
    enable_recompute(sites, "streams")
    message = r"^hyper takes a state, a Streams, got a SingleStream; start"
    with pytest.raises(TypeError, match=message):
        sites[0].read(build("prenorm").init(torch.zeros(2, 3, 8).half()))


def test_a_hidden_state_under_autocast_is_that_without():
    site = perturb_weights(build("hyper"))
    state = site.init(torch.randn(2, 3, 8))
    with torch.autocast("cpu", torch.bfloat16):
        hidden_state = site.hidden_state(state)
    assert torch.equal(hidden_state, site.hidden_state(state))


def test_connect_and_make_name_their_argument_spec():
    assert crosslayer.connect(llama(), spec="mudd").config.crosslayer == str(make(spec="mudd"))


# ---- what is printed


def test_a_connection_prints_its_options_and_parameters():
    text = repr(build("mudd(dilation=2)", index=4, layers=6))
    first_line = text.splitlines()[1].strip()
    # Blocks 0 and 2, each with four ways.
    assert first_line == "mudd(dilation=2), site 4 of 12, a [4, 2], W1 [8, 8], W2 [8, 8]"
    assert "prenorm, readout" in repr(build("prenorm", index=6))


def test_a_stack_and_a_connected_model_print_their_connections():
    sublayers = [nn.Linear(8, 8) for _ in range(4)]
    assert "skip_gain, site 1 of 4, gain [1]" in repr(crosslayer.Stack("skip_gain", sublayers, 8))
    model = crosslayer.connect(llama(), "attnres(block_size=2)")
    assert "attnres(block_size=2), site 1 of 6, query [32], key_norm [32]" in repr(model)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        assert f"NormReference({norm})" in repr(model)
    assert "FinalNormReference(norm)" in repr(model)


# ---- a method of one's own


class NoWrite(NamedTuple):
    h: Tensor


class Pending(NamedTuple):
    h: Tensor
    y: Tensor | None = None


def test_a_state_needs_a_field_for_the_write():
    with pytest.raises(TypeError, match="must be a NamedTuple with a field `y"):

        class Typed(Connection[NoWrite]):
            pass

    class Untyped(Connection):
        def initial_state(self, x):
            return NoWrite(x)

    connection = Untyped(crosslayer.plan(1)[0], 8, lambda port: nn.Identity())
    with pytest.raises(TypeError, match="Untyped: its state NoWrite must be a Named"):
        connection.init(torch.randn(1, 2, 8))
    with pytest.raises(TypeError, match="Untyped takes a state, got a NoneType; start with sites"):
        connection.read(None)


def test_a_former_attribute_is_named():
    with pytest.raises(TypeError, match="Gated: gate_fields is called gate_field, one name now"):

        class Gated(Connection[Pending]):
            gate_fields = ("y",)


def test_the_gate_field_is_a_field_of_the_state():
    with pytest.raises(TypeError, match=r"gate_field is 'gate', but the fields .* are h, y"):

        class Gated(Connection[Pending]):
            gate_field = "gate"


def test_a_class_outside_the_package_has_no_name():
    class Mine(Connection[Pending]):
        pass

    assert Mine.name == ""
    assert "Mine, site 1 of 2" in repr(Mine(crosslayer.plan(1)[1], 8, lambda port: nn.Identity()))


@pytest.mark.parametrize("spec", ["hyper", "mudd", "mgr"])
def test_stream_dtype_does_nothing_in_a_float64_model(spec):
    model = tiny_gpt(spec).double()
    with_option = tiny_gpt(f"{spec}(stream_dtype='float32')").double()
    with_option.load_state_dict(model.state_dict())
    assert torch.equal(with_option(token_ids()), model(token_ids()))
