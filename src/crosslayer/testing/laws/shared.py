"""What the laws share: the cases of each law, and the connections of a model alone."""

import pytest
import torch
from torch import Tensor, nn

import crosslayer
from crosslayer.fused_norms import FusedNormConnection
from crosslayer.testing.tiny_model import (
    DEFAULT_SPECS,
    TESTED_SPECS,
    TESTED_VARIANTS,
    perturb_weights,
)

ORDERS = {False: "sequential", True: "parallel"}


def make_cases(specs: list[str], parallel: bool, *marks: pytest.MarkDecorator) -> list:
    """(spec, parallel) of each spec, as test cases."""
    return [pytest.param(s, parallel, marks=marks, id=f"{s}-{ORDERS[parallel]}") for s in specs]


# Most laws: every method, as a sequential and as a parallel block.
every_method = pytest.mark.parametrize(
    ("spec", "parallel"), make_cases(DEFAULT_SPECS, False) + make_cases(DEFAULT_SPECS, True)
)
# Laws that options can break: every variant too.
every_option = pytest.mark.parametrize(
    ("spec", "parallel"), make_cases(TESTED_SPECS, False) + make_cases(DEFAULT_SPECS, True)
)
# Laws that an option may break in a parallel block and not in a sequential one: every variant as
# both.
every_variant_twice = pytest.mark.parametrize(
    ("spec", "parallel"), make_cases(TESTED_SPECS, False) + make_cases(TESTED_SPECS, True)
)
# Laws that parallel blocks cannot break.
every_variant = pytest.mark.parametrize(("spec", "parallel"), make_cases(TESTED_SPECS, False))
every_variant_slow = pytest.mark.parametrize(
    ("spec", "parallel"),
    make_cases(DEFAULT_SPECS, False) + make_cases(TESTED_VARIANTS, False, pytest.mark.slow),
)
every_sequential = pytest.mark.parametrize(("spec", "parallel"), make_cases(DEFAULT_SPECS, False))
# A compilation takes seconds: one method is compiled in the fast tests.
COMPILED_FAST = ["mudd"]
# Methods that are compiled as a parallel block too.
COMPILED_PARALLEL = ["mudd", "hyper", "attnres", "mgr"]
# Variants that call other operations than their methods do by default.
OTHER_READS = [
    "attnres(block_size=3)",
    "hyper(streams=2, dynamic=False)",
    "mhc(single_pass=True)",
    "mudd(normed=True)",
]
every_compiled = pytest.mark.parametrize(
    ("spec", "parallel"),
    make_cases(COMPILED_FAST, False)
    + make_cases(
        [s for s in DEFAULT_SPECS + OTHER_READS if s not in COMPILED_FAST], False, pytest.mark.slow
    )
    + make_cases(COMPILED_PARALLEL, True, pytest.mark.slow),
)
# Methods whose last operation may apply the norms.
every_fused = pytest.mark.parametrize(
    ("spec", "parallel"),
    [
        case
        for case in make_cases(TESTED_SPECS, False) + make_cases(DEFAULT_SPECS, True)
        if issubclass(crosslayer.make(case.values[0]).method, FusedNormConnection)
    ],
)


def make_connections(
    spec: str, parallel: bool, dim: int = 6, layers: int = 4
) -> list[crosslayer.Connection]:
    """The connections alone, in float64 with perturbed weights."""
    make = crosslayer.make(spec)
    norm = lambda port: nn.RMSNorm(dim, eps=1e-6)  # noqa: E731
    sites = [make(site, dim, norm).double() for site in crosslayer.plan(layers, parallel)]
    return [perturb_weights(site) for site in sites]


def sublayer_output(k: int, inputs: tuple[Tensor, ...]) -> Tensor:
    """A sub-layer that treats every token alone and distinguishes its inputs."""
    return sum(torch.tanh((i + k + 1) * x.roll(i, -1)) for i, x in enumerate(inputs))


def run_connections(sites: list[crosslayer.Connection], x: Tensor) -> Tensor:
    """The readout of the connections around `sublayer_output`, from an embedding x [B T D]."""
    state = sites[0].init(x)
    for k, site in enumerate(sites[:-1]):
        inputs, state = site.read(state)
        state = site.write(state, sublayer_output(k, inputs))
    return sites[-1].readout(state)


@pytest.fixture(autouse=True)
def same_start():
    """Every test starts from one seed and leaves torch's defaults as they were."""
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch._dynamo.reset()


def is_own(method: type) -> bool:
    """Whether crosslayer brings it. Other packages may have other habits."""
    return method.__module__.startswith("crosslayer.connections.")
