"""Methods that other packages bring, and what a connection may contain."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import crosslayer
from crosslayer import methods
from crosslayer.connection import float32_parameter
from crosslayer.connections.prenorm import PreNorm
from tests.support.tiny import gpt, tokens

PACKAGE = '''
from crosslayer.connection import float32_parameter
from crosslayer.connections.prenorm import PreNorm

class Base(PreNorm):
    pass

class Halved(Base):
    """Half of each output is added."""
    starts_as_prenorm = False

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


def install(folder, *entries):
    """A package with these entry points, as pip would leave it."""
    (folder / "halving.py").write_text(PACKAGE)
    info = folder / "halving-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text("\n".join(["[crosslayer.connections]", *entries]))


def run_in_new_process(folder, *arguments, code=0):
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


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
    command = ("-m", "crosslayer", "cost", "--connections", "prenorm", "halved", *sizes)
    assert "halved" in run_in_new_process(tmp_path, *command)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("halved = halving:Nothing", "halved.*halving:Nothing, fails.*no attribute 'Nothing'"),
        ("halved = absent.module:Halved", "halved.*absent.module:Halved, fails.*No module named"),
        ("halved = halving:float32_parameter", "must be a class derived from crosslayer.Conn"),
    ],
)
def test_a_package_that_brings_something_else(tmp_path, monkeypatch, entry, message):
    install(tmp_path, entry)
    monkeypatch.syspath_prepend(tmp_path)
    methods._entry_points.cache_clear()
    try:
        with pytest.raises(ValueError, match=message):
            crosslayer.make("halved")
    finally:
        methods._entry_points.cache_clear()


def test_an_entry_point_does_not_replace_a_method(tmp_path, monkeypatch):
    install(tmp_path, "hyper = halving:Halved")
    monkeypatch.syspath_prepend(tmp_path)
    methods._entry_points.cache_clear()
    with pytest.warns(UserWarning, match="halving:Halved is not used: .* 'hyper' already"):
        assert crosslayer.make("hyper").method.__module__ == "crosslayer.connections.hyper"
        crosslayer.available()
    methods._entry_points.cache_clear()


@pytest.mark.usefixtures("no_registered_method")
def test_a_registered_method():
    with pytest.raises(ValueError, match="unknown connection 'tripled'"):
        crosslayer.make("tripled")
    crosslayer.register_connection("tripled", Tripled)
    model, plain = gpt("tripled"), gpt("prenorm")
    assert "tripled" in crosslayer.available() and "tripled" in repr(model.blocks[0])
    assert not torch.equal(model(tokens()), plain(tokens()))
    with pytest.raises(ValueError, match="crosslayer has a connection 'hyper' already"):
        crosslayer.register_connection("hyper", Tripled)
    with pytest.raises(ValueError, match="must be an identifier, like 'laurel', got 'a b'"):
        crosslayer.register_connection("a b", Tripled)
    with pytest.raises(TypeError, match="must be a class derived from"):
        crosslayer.register_connection("other", nn.Linear)


def test_a_file_with_a_base_class(tmp_path, monkeypatch):
    (tmp_path / "halved.py").write_text(PACKAGE)
    (tmp_path / "two.py").write_text(PACKAGE + "\nclass Other(PreNorm):\n    pass\n")
    (tmp_path / "_helpers.py").write_text("")
    path = [*crosslayer.connections.__path__, str(tmp_path)]
    monkeypatch.setattr(crosslayer.connections, "__path__", path)
    assert crosslayer.make("halved").method.__name__ == "Halved"
    assert "_helpers" not in crosslayer.available()
    with pytest.raises(TypeError, match=r"two\.py must define one Connection, got Halved, Other"):
        crosslayer.make("two")


class WithBuffer(PreNorm):
    def __init__(self, site, dim, norm):
        super().__init__(site, dim, norm)
        self.register_buffer("table", torch.ones(dim))


class WithModule(PreNorm):
    def __init__(self, site, dim, norm):
        super().__init__(site, dim, norm)
        self.mix = nn.Linear(dim, dim)


class WithPorts(PreNorm):
    def __init__(self, site, dim, norm):
        super().__init__(site, dim, norm, ports=("q", "v") if site.index == 0 else None)


class WithUnknownAnnotation(PreNorm):
    def __init__(
        self, site, dim, norm, rank=4, sizes: tuple[int, ...] = (1,), kind: set | None = None
    ):
        super().__init__(site, dim, norm)
        self.w = float32_parameter(rank)


@pytest.mark.usefixtures("no_registered_method")
@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        (WithBuffer, TypeError, "WithBuffer has 'table': .* no other modules and no buffers"),
        (WithModule, TypeError, "WithModule has 'mix': .* no other modules and no buffers"),
        (
            WithPorts,
            ValueError,
            r"ports must be \('attn',\) or .*'q', 'k', 'v'\), got \('q', 'v'\)",
        ),
    ],
)
def test_what_a_connection_may_not_contain(method, error, message):
    crosslayer.register_connection("mine", method)
    with pytest.raises(error, match=message):
        crosslayer.Stack("mine", [nn.Identity(), nn.Identity()], 4)


@pytest.mark.usefixtures("no_registered_method")
def test_options_of_any_annotation():
    crosslayer.register_connection("mine", WithUnknownAnnotation)
    assert crosslayer.make("mine(rank=2, sizes=(1, 2, 3))").options["sizes"] == (1, 2, 3)
    with pytest.raises(ValueError, match="sizes must be a list, each item a whole number"):
        crosslayer.make("mine(sizes=(1, 'a'))")
    with pytest.raises(ValueError, match="kind must be set or None, got 3"):
        crosslayer.make("mine(kind=3)")


def test_a_method_that_lacks_a_part():
    class Nothing(PreNorm):
        mix_inputs = crosslayer.Connection.mix_inputs

    class TooFew(PreNorm):
        def mix_inputs(self, state):
            return (state.h, state.h), state

    site = crosslayer.plan(1)[0]
    state = Nothing(site, 4, lambda port: nn.RMSNorm(4)).init(torch.ones(1, 1, 4))
    with pytest.raises(NotImplementedError, match="Nothing needs mix_inputs"):
        Nothing(site, 4, lambda port: nn.RMSNorm(4)).read(state)
    with pytest.raises(ValueError, match=r"one input or of 1, .* ports \('attn',\), got 2"):
        TooFew(site, 4, lambda port: nn.RMSNorm(4)).read(state)
    with pytest.raises(TypeError, match="weight_decay_params must contain names, got a string"):

        class Misspelt(PreNorm):
            weight_decay_params = "weight"
