"""One string names an arm everywhere."""

import pickle
import subprocess
import sys

import pytest
from torch import nn

import crosslayer
from crosslayer.spec import split_specs


def test_public_names():
    assert crosslayer.__all__ == [
        "Connection",
        "Site",
        "__version__",
        "available",
        "connect",
        "disconnect",
        "from_pretrained",
        "make",
        "param_groups",
        "plan",
    ]
    assert all(hasattr(crosslayer, name) for name in crosslayer.__all__)


def test_import_is_light():
    heavy = {
        "transformers",
        "lightning",
        "jsonargparse",
        "rich",
        "matplotlib",
        "datasets",
        "safetensors",
        "triton",
    }
    code = f"""import sys, torch
before = set(sys.modules)
import crosslayer
crosslayer.make("mudd"), crosslayer.plan(2), crosslayer.available()
print(sorted({{name.split(".")[0] for name in set(sys.modules) - before}} & {heavy}))"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_available():
    assert {
        "attnres",
        "denseformer",
        "skip_gain",
        "hyper",
        "mgr",
        "mudd",
        "postnorm",
        "prenorm",
    } <= set(crosslayer.available())


@pytest.mark.parametrize(
    "arm",
    ["mudd", "mudd(dilation=2)", "mudd(ways='k v r', dynamic=False)", " hyper ( streams = 2 ) "],
)
def test_a_string_and_back(arm):
    factory = crosslayer.make(arm)
    assert crosslayer.make(str(factory)) == factory == pickle.loads(pickle.dumps(factory))
    connection = factory(crosslayer.plan(3)[2], 8, lambda port: nn.RMSNorm(8))
    assert isinstance(connection, crosslayer.Connection) and isinstance(connection, factory.method)


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        (
            "denseforme",
            r"^unknown connection 'denseforme' \(did you mean 'denseformer'\?\); known: altup, .*resi_dual$",
        ),
        ("xyz", "^unknown connection 'xyz'; known: altup, attnres"),
        (
            "hyper(stream=2)",
            r"^unknown option 'stream' of 'hyper' \(did you mean 'streams'\?\); its options: streams=4,",
        ),
        ("prenorm(x=1)", "^unknown option 'x' of 'prenorm'; its options: stream_dtype=None$"),
        ("mudd(2)", r"^cannot read the connection 'mudd\(2\)': expected a name, or like"),
        ("mudd(dilation=)", "^cannot read the connection"),
        ("mudd(**{'dilation': 2})", "^cannot read the connection"),
        ("mudd(dilation=__import__('os'))", "^cannot read the connection"),
        ("os.system", "^cannot read the connection"),
        ("", "^cannot read the connection"),
    ],
)
def test_bad_strings(arm, message):
    with pytest.raises(ValueError, match=message):
        crosslayer.make(arm)


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        (
            "mudd(ways='q k k')",
            "ways must name each of q, k, v, r at most once, like 'q k v r' or 'qkvr', got 'q k k'",
        ),
        ("mudd(ways='q x')", "ways must name each of"),
        ("mudd(ways='')", "ways must name each of"),
        ("mudd(period=1.5)", "period must be a whole number of at least 1, got 1.5"),
        ("hyper(dynamic=False, tanh=False)", "tanh=False and dynamic=False exclude each other"),
        ("hyper(streams=True)", "streams must be a whole number of at least 1, got True"),
        ("attnres(block_size=-1)", "block_size must be a whole number of at least 1, got -1"),
        ("hyper(matrix=[])", r"cannot build hyper\(matrix=\[\]\) with these values"),
        ("hyper(matrix=[[0, 1], [1]], streams=1)", "matrix must be 2 by 2 for 1 streams"),
        ("hyper(beta='x')", "could not convert string to float: 'x'"),
        ("hyper(frozen=3)", "with these values"),
        ("hyper(frozen='C')", "frozen must be 'B', 'WC' or 'B WC', got 'C'"),
        ("highway(bias='a')", "with these values"),
        ("denseformer(last_k='x')", "last_k must be a whole number of at least 1, got 'x'"),
        (
            "denseformer(dilation='last')",
            "dilation must be a whole number of at least 1, got 'last'",
        ),
        ("mudd(window='last')", "window must be a whole number of at least 1, got 'last'"),
        ("mudd(normed=True, period=2)", "normed=True excludes dilation and period"),
        ("frac(fractions=0)", "fractions must be a whole number of at least 1, got 0"),
        ("frac(fractions=3)", "fractions must divide the width 8, got 3"),
        ("mhc(readout='max')", "readout must be one of head, sum, mean, got 'max'"),
        ("mhc(single_pass=True, readout='sum')", "exclude each other"),
        ("mhc_lite(streams=6)", "streams must be at most 5"),
        (
            "mudd(stream_dtype='int8')",
            "stream_dtype must be one of float32, bfloat16, float16, got 'int8'",
        ),
        ("mgr(gate='soft')", "gate must be one of competitive, independent, got 'soft'"),
        ("mgr(streams=6)", "Eq. 14 has no bias for 6 streams and 1 gated sub-layers"),
    ],
)
def test_bad_options(arm, message):
    with pytest.raises(ValueError, match=message):
        [crosslayer.make(arm)(site, 8, lambda port: nn.RMSNorm(8)) for site in crosslayer.plan(3)]


def test_separate():
    assert split_specs("a, b(x=1, y='p q') c(z=\"(\"),d") == [
        "a",
        "b(x=1, y='p q')",
        'c(z="(")',
        "d",
    ]


def test_plan():
    assert [
        (s.index, s.layer, s.ports, s.opens_layer, s.closes_layer, s.depth)
        for s in crosslayer.plan(2)
    ] == [
        (0, 0, ("attn",), True, False, 4),
        (1, 0, ("mlp",), False, True, 4),
        (2, 1, ("attn",), True, False, 4),
        (3, 1, ("mlp",), False, True, 4),
        (4, 2, ("out",), True, True, 4),
    ]
    assert [s.ports for s in crosslayer.plan(1, parallel=True)] == [("attn", "mlp"), ("out",)]
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        crosslayer.plan(0)


def test_no_attribute():
    with pytest.raises(AttributeError, match="has no attribute 'conect'"):
        _ = crosslayer.conect
