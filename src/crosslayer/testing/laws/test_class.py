"""The class of a connection: its docstring, its names, its registration."""

import inspect

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import crosslayer
from crosslayer.testing.tiny_model import (
    DEFAULT_SPECS,
    TESTED_VARIANTS,
    perturb_weights,
    tiny_gpt,
    token_ids,
)

from .shared import is_own, sublayer_output


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
        state = site.write(state, sublayer_output(k, inputs))
    if not coefficients:
        assert not make.method.gate_field
        return
    assert make.method.gate_field in coefficients, (
        f"the state has coefficients {coefficients}: gate_field must name the one that weights the "
        "pending write, or else the stream that it joins, so that diagnostics log it"
    )


@pytest.mark.parametrize("name", [*DEFAULT_SPECS, *TESTED_VARIANTS])
def test_gates_lie_within_their_limits(name):
    """Diagnostics call a gate saturated that stays near one of the `gate_limits`."""
    make = crosslayer.make(name)
    sites = [make(site, 6, lambda port: nn.Identity()) for site in crosslayer.plan(3)]
    for site in sites:
        perturb_weights(site, 3.0)
    state = sites[0].init(torch.randn(2, 3, 6))
    for k, site in enumerate(sites):
        inputs, state = site.read(state)
        gate = getattr(state, site.gate_field, None)
        if gate is not None and site.gate_limits is not None:
            low, high = site.gate_limits
            assert gate.min() >= low - 1e-6 and gate.max() <= high + 1e-6
        state = site.write(state, sublayer_output(k, inputs))


def test_a_new_file_is_a_new_method(tmp_path, monkeypatch):
    (tmp_path / "ninth.py").write_text(
        "from crosslayer.connections.prenorm import PreNorm\nclass Ninth(PreNorm):\n    pass\n"
    )
    path = [*crosslayer.connections.__path__, str(tmp_path)]
    monkeypatch.setattr(crosslayer.connections, "__path__", path)
    assert "ninth" in crosslayer.available()
    assert torch.equal(tiny_gpt("ninth")(token_ids()), tiny_gpt("prenorm")(token_ids()))
