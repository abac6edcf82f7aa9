"""Models that DeepSpeed's ZeRO stage 3 has partitioned. DeepSpeed itself is not needed: a stand-in
leaves parameters empty, and fills them where it is asked to.
"""

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import crosslayer
from crosslayer.hf.registration import rebuild_connections
from crosslayer.partitioned import gathered_parameters, without_partitioning
from tests.hf.backbones import build, trained

calls: list[str] = []


@contextmanager
def gather(parameters: Sequence[Any], modifier_rank: int | None) -> Iterator[None]:
    """As DeepSpeed does: what is changed is lost unless a rank is named."""
    for parameter in parameters:
        parameter.data = parameter.whole.clone()
    yield
    for parameter in parameters:
        if modifier_rank is not None:
            parameter.whole = parameter.data
        parameter.data = parameter.data.new_empty(0)


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch):
    library: Any = ModuleType("deepspeed")
    library.zero = SimpleNamespace(GatheredParameters=gather)
    partitioning: Any = ModuleType("deepspeed.runtime.zero.partition_parameters")
    partitioning.shutdown_init_context = lambda: calls.append("shutdown")
    partitioning.restore_init_context = lambda: calls.append("restore")
    for module in (library, partitioning):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    calls.clear()


def partition(model: nn.Module) -> None:
    parameter: Any
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.whole = parameter.data
        parameter.data = parameter.data.new_empty(0)


def join(model: nn.Module) -> None:
    for parameter in model.parameters():
        if hasattr(parameter, "whole"):
            parameter.data = parameter.whole


def group_names(model: nn.Module) -> dict[str, tuple[str, float]]:
    """The optimizer group of each parameter, and its weight decay."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = crosslayer.param_groups(model, lr=1e-3, weight_decay=0.1)
    return {
        names[id(p)]: (group["name"], group["weight_decay"])
        for group in groups
        for p in group["params"]
    }


@pytest.mark.parametrize("spec", ["mudd", "hyper(output_scale='1/n')", "resi_dual"])
@pytest.mark.filterwarnings("ignore:connecting")
def test_a_partitioned_model_becomes_what_the_whole_one_does(spec):
    """The same connections, with the norms and scaled weights of the host, and the same groups."""
    torch.manual_seed(0)
    whole = trained("llama")
    partitioned = copy.deepcopy(whole)
    partition(partitioned)
    for model in (whole, partitioned):
        torch.manual_seed(1)
        crosslayer.connect(model, spec)
    assert group_names(partitioned) == group_names(whole)
    join(partitioned)
    torch.testing.assert_close(partitioned.state_dict(), whole.state_dict(), rtol=0, atol=0)
    ids = torch.arange(7)[None]
    torch.testing.assert_close(partitioned(ids).logits, whole(ids).logits, rtol=0, atol=0)


def test_connections_of_a_partitioned_model_have_its_dtype():
    """DeepSpeed takes parameters of one dtype only. A move to a device does not change it."""
    model = build("llama").bfloat16()
    partition(model)
    crosslayer.connect(model, "mudd").to("cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("make_model, warnings", [(build, 0), (trained, 1)])
def test_a_warning_is_given_for_trained_weights_alone(make_model, warnings, recwarn):
    model = make_model("llama")
    partition(model)
    crosslayer.connect(model, "mgr")
    assert len(recwarn) == warnings


def test_usual_tensors_are_made_while_a_model_is_partitioned():
    with pytest.raises(ZeroDivisionError), without_partitioning():
        assert calls == ["shutdown"]
        raise ZeroDivisionError
    assert calls == ["shutdown", "restore"]


def test_a_saved_model_is_connected_so():
    rebuild_connections(build("llama").model, {"crosslayer": "mudd"})
    assert calls == ["shutdown", "restore"]


def test_what_is_gathered_already_stays_so():
    model = nn.Linear(2, 2)
    partition(model)
    with gathered_parameters(model.parameters()):
        with gathered_parameters(model.parameters()):
            pass
        assert model.weight.shape == (2, 2)
    assert model.weight.numel() == 0
