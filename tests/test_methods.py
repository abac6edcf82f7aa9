"""Methods that other packages bring, and what a connection may contain."""

import importlib
import linecache
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import crosslayer
from crosslayer import methods
from crosslayer.cli.main import main
from crosslayer.connections.prenorm import PreNorm, SingleStream
from crosslayer.float32_parameters import assign_normal, assign_value, float32_parameter
from crosslayer.method_checks import first_tensor
from crosslayer.testing.tiny_model import tiny_gpt, token_ids
from crosslayer.train.method_code import code_digest

PACKAGE = '''
from crosslayer.float32_parameters import float32_parameter
from crosslayer.connections.prenorm import PreNorm

class Base(PreNorm):
    pass

class Halved(Base):
    """Half of each output is added."""
    initial_function = "other"

    def write(self, state, y):
        return super().write(state, 0.5 * y)
'''
METADATA = "Metadata-Version: 2.1\nName: halving\nVersion: 1.0\n"


class Tripled(PreNorm):
    def write(self, state, y):
        return super().write(state, 3 * y)


@pytest.fixture
def no_registered_method(monkeypatch):
    monkeypatch.setattr(methods, "_registered", {})
    monkeypatch.setattr(Tripled, "name", "")


@pytest.fixture
def read_packages_again(monkeypatch):
    """The entry points of packages are read anew in the test, and after it."""
    methods._entry_points.cache_clear()
    yield
    monkeypatch.undo()
    sys.modules.pop("halving", None)
    methods._entry_points.cache_clear()


def install(folder, *entries, package="halving"):
    """A package with these entry points, as pip would leave it."""
    (folder / "halving.py").write_text(PACKAGE)
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA.replace("halving", package))
    (info / "entry_points.txt").write_text("\n".join(["[crosslayer.connections]", *entries]))


def run_in_new_process(folder, *arguments, code=0):
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_an_installed_package_brings_a_method(tmp_path):
    """Its models are saved in one process and loaded in another, and the command line knows it."""
    install(tmp_path, "halved = halving:Halved")
    save = """
import crosslayer, torch
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).eval()
model = crosslayer.connect(model, "halved")
model.save_pretrained("model")
torch.save(model(torch.arange(5)[None]).logits, "logits.pt")
"""
    load = """
import crosslayer, torch
model = crosslayer.from_pretrained("model")
print("halved" in crosslayer.available(), type(model.model.norm.connection).__module__)
print(torch.equal(model(torch.arange(5)[None]).logits, torch.load("logits.pt")))
"""
    run_in_new_process(tmp_path, "-c", save)
    assert run_in_new_process(tmp_path, "-c", load).split()[:3] == ["True", "halving", "True"]
    sizes = ("--layers=2", "--dim=8", "--heads=2", "--vocab=32", "--context=8", "--batch=1")
    command = ("-m", "crosslayer", "cost", "--arms", "prenorm", "halved", *sizes)
    assert "halved" in run_in_new_process(tmp_path, *command)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("h, y, weights = state", "not enough values to unpack (expected 3, got 2) (mine.py, line"),
        ("import einopz", "einopz is not installed (mine.py, line 6)"),
        ("raise ValueError('h is odd')", "h is odd"),
    ],
)
@pytest.mark.usefixtures("no_registered_method")
def test_the_command_line_says_where_a_method_fails(tmp_path, monkeypatch, capsys, code, message):
    (tmp_path / "mine.py").write_text(f"""
from crosslayer.connections.prenorm import PreNorm

class Mine(PreNorm):
    def mix_inputs(self, state):
        {code}
""")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    crosslayer.register_connection("mine", importlib.import_module("mine").Mine)
    (tmp_path / "text.txt").write_text("one two three " * 400)
    sizes = ["--layers=2", "--dim=8", "--heads=2", "--context=8", "--batch=1", "--steps=2"]
    command = ["train", f"--data={tmp_path / 'text.txt'}", "--arm=mine", *sizes]
    assert main([*command, f"--out={tmp_path / 'out'}"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "crosslayer:" in line]
    assert message in line and ("line" in line) == ("line" in message)


@pytest.mark.slow
def test_the_laws_cover_an_installed_package(tmp_path):
    """In a folder without crosslayer's clone."""
    install(tmp_path, "halved = halving:Halved")
    module = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "crosslayer.testing.laws")
    printed = run_in_new_process(tmp_path, *module, "-k", "halved and (alone or starts or dead)")
    assert re.search(r"\n8 passed, \d+ deselected", printed), printed


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("halved = halving:Nothing", "halved.*halving:Nothing, fails.*no attribute 'Nothing'"),
        ("halved = absent.module:Halved", "halved.*absent.module:Halved, fails.*No module named"),
        ("halved = halving:float32_parameter", "must be a class derived from crosslayer.Conn"),
    ],
)
@pytest.mark.usefixtures("read_packages_again")
def test_a_package_that_brings_something_else(tmp_path, monkeypatch, entry, message):
    install(tmp_path, entry)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=message):
        crosslayer.make("halved")


@pytest.mark.parametrize(
    ("name", "packages", "problem"),
    [
        ("hyper", ["halving"], "crosslayer has a connection of this name"),
        ("gains", ["halving"], "crosslayer has a connection of this name"),
        ("halved", ["halving", "thirding"], "(thirding|halving) has a connection of this name"),
        ("two-gate", ["halving"], "a name has ASCII letters, digits and _ alone"),
    ],
)
@pytest.mark.usefixtures("read_packages_again")
def test_an_entry_point_that_is_not_used(tmp_path, monkeypatch, name, packages, problem):
    for package in packages:
        install(tmp_path, f"{name} = halving:Halved", package=package)
    monkeypatch.syspath_prepend(tmp_path)
    message = f"'{name}' of the package (halving|thirding) is not used: {problem}"
    with pytest.warns(UserWarning, match=message):
        assert crosslayer.make("hyper").method.__module__ == "crosslayer.connections.hyper"
        assert crosslayer.available().count(name) == (name in ("hyper", "halved"))


@pytest.mark.usefixtures("no_registered_method")
def test_a_registered_method():
    with pytest.raises(ValueError, match="unknown connection 'tripled'"):
        crosslayer.make("tripled")
    crosslayer.register_connection("tripled", Tripled)
    model, plain = tiny_gpt("tripled"), tiny_gpt("prenorm")
    assert "tripled" in crosslayer.available() and "tripled" in repr(model.blocks[0])
    assert not torch.equal(model(token_ids()), plain(token_ids()))
    with pytest.raises(ValueError, match="crosslayer has a connection 'hyper' already"):
        crosslayer.register_connection("hyper", Tripled)
    with pytest.raises(TypeError, match="must be a class derived from"):
        crosslayer.register_connection("other", nn.Linear)
    with pytest.raises(ValueError, match="Tripled is the connection 'tripled' already"):
        crosslayer.register_connection("other", Tripled)
    with pytest.raises(ValueError, match="PreNorm is the connection 'prenorm' already"):
        crosslayer.register_connection("other", PreNorm)
    crosslayer.register_connection("tripled", Tripled)  # as a cell of a notebook that runs again


@pytest.mark.parametrize("spec", ["prenorm", "postnorm", "resi_dual"])
def test_an_output_of_another_shape_is_no_broadcast(spec):
    first = crosslayer.make(spec)(crosslayer.plan(layers=1)[0], 4, lambda port: nn.RMSNorm(4))
    _, state = first.read(first.init(torch.randn(2, 3, 4)))
    with pytest.raises(ValueError, match=r"of the stream's shape, \[2 3 4\], got \[1 3 4\]"):
        first.write(state, torch.randn(1, 3, 4))


def test_a_state_may_be_named_in_quotes():
    class Quoted(crosslayer.Connection["Later"]):
        pass

    assert Quoted.__name__ == "Quoted"


def test_values_are_assigned_outside_of_autograd():
    """`reset_parameters` need not say so."""
    parameter = float32_parameter(2)
    assign_value(parameter, [1.0, 2.0])
    assign_normal(parameter, 0.02, crosslayer.plan(1)[0])
    assert parameter.requires_grad and parameter.grad_fn is None


def test_a_file_with_a_base_class(tmp_path, monkeypatch):
    other = "from crosslayer.connections.highway import Highway\n"
    (tmp_path / "halved.py").write_text(other + PACKAGE)
    (tmp_path / "two.py").write_text(PACKAGE + "\nclass Other(PreNorm):\n    pass\n")
    (tmp_path / "_helpers.py").write_text("")
    path = [*crosslayer.connections.__path__, str(tmp_path)]
    monkeypatch.setattr(crosslayer.connections, "__path__", path)
    assert crosslayer.make("halved").method.__name__ == "Halved"
    assert str(tmp_path / "halved.py") in methods.method_files()
    assert "_helpers" not in crosslayer.available()
    with pytest.raises(TypeError, match=r"two\.py must define one Connection, got Halved, Other"):
        crosslayer.make("two")


def built_with(change):
    """A method that does `change(self)` when it is built."""

    class Mine(PreNorm):
        def __init__(self, site, dim, norm):
            super().__init__(site, dim, norm)
            change(self)

    return Mine


def with_parameter(name, *shape):
    return built_with(lambda self: setattr(self, name, nn.Parameter(torch.ones(shape))))


class WithoutSuper(PreNorm):
    def __init__(self, site, dim, norm):
        pass


def reading(mix_inputs, initial_state=PreNorm.initial_state):
    """A method with these functions in place of pre-norm's."""
    return type("Mine", (PreNorm,), {"mix_inputs": mix_inputs, "initial_state": initial_state})


class Traveller(NamedTuple):
    h: Tensor
    y: Tensor | None = None
    gain: Tensor | None = None


class ParameterInState(PreNorm):
    def __init__(self, site, dim, norm):
        super().__init__(site, dim, norm)
        self.gain = float32_parameter(1)

    def reset_parameters(self):
        nn.init.ones_(self.gain)

    def initial_state(self, x):
        return Traveller(x)

    def mix_inputs(self, state):
        return (state.h,), Traveller(state.h, gain=self.gain)


class ViewInState(ParameterInState):
    def mix_inputs(self, state):
        return (state.h,), Traveller(state.h, gain=self.gain[None])


class WithPorts(PreNorm):
    def __init__(self, site, dim, norm):
        super().__init__(site, dim, norm, ports=("q", "v") if site.index == 0 else None)


OWN_ATTRIBUTES = (
    "site",
    "dim",
    "is_readout",
    "ports",
    "fractions",
    "weighs_channels",
    "options",
    "stream_dtype",
)


class WithUnknownAnnotation(PreNorm):
    def __init__(
        self,
        site,
        dim,
        norm,
        rank=4,
        sizes: tuple[int, ...] = (1,),
        scales: Sequence[float] = (),
        names: list = (),
        table: dict = (),
        kind: set | None = None,
    ):
        super().__init__(site, dim, norm)
        self.w = float32_parameter(rank)


@pytest.mark.usefixtures("no_registered_method")
@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        (
            built_with(lambda self: self.register_buffer("table", torch.ones(4))),
            TypeError,
            "Mine has 'table': .* no other modules and no buffers",
        ),
        (
            built_with(lambda self: setattr(self, "mix", nn.Linear(4, 4))),
            TypeError,
            "Mine has 'mix': .* no other modules and no buffers",
        ),
        (
            WithPorts,
            ValueError,
            r"ports must be \('attn',\) or .*'q', 'k', 'v'\), got \('q', 'v'\)",
        ),
        (
            built_with(lambda self: setattr(self, "decay", [torch.ones(4)])),
            TypeError,
            "Mine has a tensor in self.decay, .* Make a constant tensor in mix_inputs, or",
        ),
        (
            with_parameter("output_scale", 1),
            TypeError,
            "Mine sets self.output_scale, which every connection has",
        ),
        (
            reading(lambda self, state: ((state.h,), Traveller(state.h, gain=3))),
            TypeError,
            "the field 'gain' of its state is a int; a state contains tensors, tuples of them",
        ),
        (
            built_with(lambda self: setattr(self, "initial_function", "pre-norm")),
            ValueError,
            "Mine.initial_function must be one of 'bitwise prenorm', 'prenorm', .*, got 'pre-norm'",
        ),
        (WithoutSuper, TypeError, r"WithoutSuper.__init__ must call super\(\).__init__\(site, dim"),
        (
            built_with(lambda self: setattr(self, "init", 0.1)),
            TypeError,
            "sets self.init, which is a method of every connection",
        ),
        *(
            (
                built_with(lambda self, key=key: setattr(self, key, "")),
                TypeError,
                f"sets self.{key}, which every connection has",
            )
            for key in OWN_ATTRIBUTES
        ),
        (with_parameter("g", 1), TypeError, "has the parameter 'g' and no method reset_parameters"),
        (with_parameter("g"), TypeError, "parameter 'g' has no dimension, which FSDP cannot shard"),
        (
            built_with(lambda self: float32_parameter()),
            TypeError,
            "cannot shard a parameter without a dimension",
        ),
        *(
            (
                built_with(lambda self, limits=limits: setattr(self, "gate_limits", limits)),
                TypeError,
                r"gate_limits must be None or two numbers, the smaller one first, got",
            )
            for limits in ([0, 1], (1.0,), (1.0, 0.0), ("a", "b"))
        ),
        (
            built_with(lambda self: setattr(self, "norms", nn.ModuleList())),
            TypeError,
            "has 0 norms, and its ports are attn; leave norms as",
        ),
        (
            ParameterInState,
            TypeError,
            "the field 'gain' of its state is a parameter, which FSDP frees",
        ),
        (ViewInState, TypeError, "the field 'gain' of its state is a view of a parameter"),
        (
            reading(lambda self, state: (state.h, state)),
            TypeError,
            r"must return a tuple of inputs and .*, got \(Tensor, SingleStream\)",
        ),
        (
            reading(lambda self, state: ((state.h,), None)),
            TypeError,
            "Mine: its state NoneType must be a NamedTuple with a field `y",
        ),
        (
            reading(lambda self, state: ((state.h,), state)),
            TypeError,
            "must return a state without a write, .* its y is still there",
        ),
        (reading(lambda self, state: None), TypeError, "must return a tuple of inputs.*, got None"),
        (
            reading(lambda self, state: (state, (state.h,))),
            TypeError,
            r"got \(SingleStream, \(Tensor\)\)",
        ),
        (
            reading(lambda self, state: ((state.h, state.h), state)),
            ValueError,
            "must return one input for all ports, or one for each of attn, got 2",
        ),
        (
            reading(lambda self, state: ((state.h.mean(1, keepdim=True),), SingleStream(state.h))),
            ValueError,
            r"inputs of the stream's shape, \[1 3 4\], got \[1 1 4\]",
        ),
        (
            reading(lambda self, state: ((state.h[..., :2],), state)),
            ValueError,
            r"inputs of the stream's shape, \[1 3 4\], got \[1 3 2\]",
        ),
        (
            reading(PreNorm.mix_inputs, lambda self, x: (x, None)),
            TypeError,
            "its state tuple must be a NamedTuple with a field `y",
        ),
        (
            reading(PreNorm.mix_inputs, lambda self, x: Traveller(x, gain=3)),
            TypeError,
            "the field 'gain' of its state is a int; a state contains tensors, tuples of them",
        ),
        (
            reading(PreNorm.mix_inputs, lambda self, x: SingleStream(None)),
            TypeError,
            "its state SingleStream must begin with a tensor, got NoneType",
        ),
    ],
)
def test_a_wrong_method_is_named(method, error, message):
    """Each of these built, ran and trained, or failed far from its cause."""
    crosslayer.register_connection("mine", method)
    with pytest.raises(error, match=message):
        stack = crosslayer.Stack("mine", [Doubled(), Doubled()], 4)
        stack(torch.randn(1, 3, 4))


class Doubled(nn.Module):
    def forward(self, x):
        return torch.cat([x, x], 1)[:, :3]  # of another length, if x has one token


def test_a_sublayers_output_is_a_tensor():
    stack = crosslayer.Stack("prenorm", [nn.Identity(), nn.Identity()], 4)
    state = stack.connections[0].init(torch.randn(1, 3, 4))
    with pytest.raises(TypeError, match="takes the output of a sub-layer, a tensor, got a tuple"):
        stack.connections[0].write(state, (torch.randn(1, 3, 4), None))


def test_the_first_tensor_of_a_state():
    x = torch.ones(1)
    for state in ((x, None), ((x, x), None), (((x,),), None), ((), x)):
        assert first_tensor(state) is x


@pytest.mark.usefixtures("no_registered_method")
def test_a_parameter_may_be_absent():
    method = built_with(lambda self: self.register_parameter("bias", None))
    crosslayer.register_connection("mine", method)
    crosslayer.make("mine")(crosslayer.plan(1)[0], 4, lambda port: nn.RMSNorm(4))


def test_a_norm_may_have_buffers():
    crosslayer.make("prenorm")(crosslayer.plan(1)[0], 4, lambda port: nn.BatchNorm1d(4))


@pytest.mark.usefixtures("no_registered_method")
def test_options_of_any_annotation():
    crosslayer.register_connection("mine", WithUnknownAnnotation)
    assert crosslayer.make("mine(rank=2, sizes=(1, 2, 3))").options["sizes"] == (1, 2, 3)
    with pytest.raises(ValueError, match="sizes must be a list, each item a whole number"):
        crosslayer.make("mine(sizes=(1, 'a'))")
    with pytest.raises(ValueError, match="scales must be a list, each item a finite number, got"):
        crosslayer.make("mine(scales=[1, 'a'])")
    with pytest.raises(ValueError, match="names must be a list, got 3"):
        crosslayer.make("mine(names=3)")
    with pytest.raises(ValueError, match="table must be a mapping, got 3"):
        crosslayer.make("mine(table=3)")
    with pytest.raises(ValueError, match="kind must be set or None, got 3"):
        crosslayer.make("mine(kind=3)")
    site = crosslayer.plan(1)[0]
    with pytest.raises(ValueError, match=r"cannot build mine\(rank='four'\) with these values \("):
        crosslayer.make("mine(rank='four')")(site, 4, lambda port: nn.RMSNorm(4))


@pytest.mark.usefixtures("no_registered_method")
def test_an_error_of_a_method_without_options_is_its_own():
    crosslayer.register_connection("mine", built_with(lambda self: self.absent))
    with pytest.raises(AttributeError, match="absent"):
        crosslayer.make("mine")(crosslayer.plan(1)[0], 4, lambda port: nn.RMSNorm(4))


class NeedsRank(PreNorm):
    def __init__(self, site, dim, norm, rank: int, **other):
        super().__init__(site, dim, norm)


class TakesStreamDtype(PreNorm):
    def __init__(self, site, dim, norm, stream_dtype: str = "float32"):
        super().__init__(site, dim, norm)


class TakesOptions(PreNorm):
    def __init__(self, site, dim, norm, options: str = ""):
        super().__init__(site, dim, norm)


@pytest.mark.usefixtures("no_registered_method")
def test_options_of_a_class():
    crosslayer.register_connection("ranked", NeedsRank)
    with pytest.raises(ValueError, match=r"ranked needs the option 'rank', like ranked\(rank=…\)"):
        crosslayer.make("ranked")
    with pytest.raises(ValueError, match="unknown option 'other' of 'ranked'"):
        crosslayer.make("ranked(rank=1, other=2)")
    for option, method in (("stream_dtype", TakesStreamDtype), ("options", TakesOptions)):
        crosslayer.register_connection(f"takes_{option}", method)
        with pytest.raises(TypeError, match=f"option '{option}' has a name that every connection"):
            crosslayer.make(f"takes_{option}")
    with pytest.raises(ValueError, match="got the class NeedsRank; it is called 'ranked'"):
        crosslayer.make(NeedsRank)
    with pytest.raises(ValueError, match=r'register_connection\("mine", Mine\)'):
        crosslayer.make(type("Mine", (NeedsRank,), {}))


@pytest.mark.usefixtures("no_registered_method")
@pytest.mark.parametrize("name", ["a b", "class", "None", "two-gate", "ﬁeld", 3])
def test_names_that_no_spec_could_have(name):
    with pytest.raises(ValueError, match="name must be of ASCII letters, digits and _"):
        crosslayer.register_connection(name, Tripled)


@pytest.mark.usefixtures("no_registered_method")
def test_former_names_are_taken():
    with pytest.raises(ValueError, match="'gains' is a former name of crosslayer's 'skip_gain'"):
        crosslayer.register_connection("gains", Tripled)


def test_a_method_that_lacks_a_part():
    class Nothing(PreNorm):
        mix_inputs = crosslayer.Connection.mix_inputs

    site = crosslayer.plan(1)[0]
    state = Nothing(site, 4, lambda port: nn.RMSNorm(4)).init(torch.ones(1, 1, 4))
    with pytest.raises(NotImplementedError, match="Nothing needs mix_inputs"):
        Nothing(site, 4, lambda port: nn.RMSNorm(4)).read(state)
    with pytest.raises(TypeError, match="Nothing needs mix_inputs"):
        crosslayer.register_connection("nothing", Nothing)
    for attribute in ("weight_decay_params", "test_variants"):
        for value in ("weight", {"weight"}, ["weight"], frozenset({1}), (1,)):
            with pytest.raises(TypeError, match=f"{attribute} must be a .* of strings, got "):
                type("Misspelt", (PreNorm,), {attribute: value})


def test_streams_that_others_have_cast_are_refused():
    make = crosslayer.make("hyper(stream_dtype='float32')")
    first, second, _ = (make(site, 4, lambda _: nn.RMSNorm(4)) for site in crosslayer.plan(1))
    _, state = first.read(first.init(torch.ones(1, 2, 4)))
    state = first.write(state, torch.ones(1, 2, 4, dtype=torch.bfloat16))
    second.read(state)
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        cast = tree_map(lambda x: x if x is None else x.to(dtype), state)  # as FSDP2 does
        with pytest.raises(ValueError, match=rf"state has come in {name}.*cast_forward_inputs"):
            second.read(cast)


def test_code_digest_is_that_of_the_code_alone(tmp_path, monkeypatch):
    """Comments and docstrings do not change it; a constant or a helper of the same file does."""
    source = '"""A method."""\nfrom crosslayer.connections.prenorm import PreNorm as Base\n'
    source += 'EPS = 1\nclass Mine(Base):\n    """Mine."""\n'
    changed = {
        "same": source.replace("A method", "Words") + "# a comment\n",
        "without": source.replace('    """Mine."""', "    pass"),
        "other": source.replace("EPS = 1", "EPS = 2"),
    }
    monkeypatch.syspath_prepend(tmp_path)
    digests = {}
    for name, text in {"first": source, **changed}.items():
        (tmp_path / f"digested_{name}.py").write_text(text)
        digests[name] = code_digest(importlib.import_module(f"digested_{name}").Mine)
    assert digests["first"] == digests["same"] == digests["without"] != digests["other"]
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # it has no file
    in_a_notebook: dict = {"__name__": "__main__"}
    exec(source, in_a_notebook)
    assert code_digest(in_a_notebook["Mine"]) == ""
    exec(source, in_no_module := {"__name__": "in_no_module"})
    assert code_digest(in_no_module["Mine"]) == ""


def test_code_digest_of_a_class_in_a_notebook(monkeypatch):
    """A notebook keeps the text of its cells for tracebacks."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))

    def digest_of_cell(number: int, text: str) -> str:
        file = f"<cell {number}>"
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        notebook: dict = {"__name__": "__main__"}
        exec(compile(text, file, "exec"), notebook)
        return code_digest(notebook["Mine"])

    cell = (
        "from crosslayer.connections.prenorm import PreNorm\n"
        "class Mine(PreNorm):\n"
        "    part_label = 'S'\n"
        "    def initial_state(self, x):\n"
        "        return super().initial_state(2 * x)\n"
    )
    first = digest_of_cell(1, cell)
    assert first
    assert digest_of_cell(2, cell.replace("2 * x)", "2 * x)  # twice")) == first
    assert digest_of_cell(3, cell.replace("2 * x", "3 * x")) != first
    assert digest_of_cell(4, cell.replace("'S'", "'T'")) != first


def test_code_digest_sees_what_a_method_imports_from_its_package(tmp_path, monkeypatch):
    """Through another module too, and of its package alone."""
    digests = []
    monkeypatch.syspath_prepend(tmp_path)
    for name, eps, scale in (("lab_a", 1, 1), ("lab_b", 1, 1), ("lab_c", 2, 1), ("lab_d", 1, 2)):
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text(f"SCALE = {scale}\n")
        (package / "constants.py").write_text(f"EPS = {eps}\n")
        (package / "shared.py").write_text("from . import constants\nEPS = constants.EPS\n")
        source = "try:\n    from .shared import EPS\nexcept ImportError:\n    EPS = 0\n"
        source += "from . import SCALE\nfrom crosslayer.connections.prenorm import PreNorm\n"
        (package / "method.py").write_text(source + "class Mine(PreNorm):\n    pass\n")
        digests.append(code_digest(importlib.import_module(f"{name}.method").Mine))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_random_values_of_sites_and_seeds_are_independent():
    """Site 2 with seed 0 is not site 0 with seed 2, and torch's seed may be any it takes."""
    values = {}
    for seed in (0, 2, -1):
        torch.manual_seed(seed)
        for site in crosslayer.plan(2):
            values[seed, site.index] = weight = float32_parameter(3, 2)
            with torch.no_grad():
                assign_normal(weight, 1.0, site)
            again = float32_parameter(3, 2)
            with torch.no_grad():
                assign_normal(again, 1.0, site)
            assert torch.equal(weight, again)
            with torch.no_grad():
                assign_normal(again, 1.0, site, "another parameter")
            assert not torch.equal(weight, again)
    first = {weight[0, 0].item() for weight in values.values()}
    assert len(first) == len(values)
