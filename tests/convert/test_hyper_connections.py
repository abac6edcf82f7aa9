"""The `hyper-connections` package's parameters: round trips, and the package's own numbers."""

import pytest
import torch
from torch import nn

import crosslayer
from crosslayer.convert import fill_connections, hyper_connections, read_connections
from crosslayer.testing.tiny_model import equal_tensors, perturb_weights
from tests.support.chain import D, flat, randn, run, sublayer


def package() -> type[nn.Module]:
    return pytest.importorskip("hyper_connections").HyperConnections


@pytest.mark.parametrize("tanh", [True, False], ids=["tanh", "linear"])
@pytest.mark.parametrize("n", [1, 4])
def test_hyper_connections(n, tanh):
    modules = nn.ModuleDict(
        {f"hc{k}": package()(n, dim=D, layer_index=k, tanh=tanh) for k in range(3)}
    )
    perturb_weights(modules, 0.3)
    prefixes, theirs = [f"hc{k}." for k in range(3)], modules.state_dict()
    ours = hyper_connections.load_connections(theirs, prefixes, tanh)
    assert equal_tensors(hyper_connections.save_connections(ours, prefixes), theirs)
    make = crosslayer.make(ours.spec)
    sites = [make(site, D, lambda port: nn.Identity()) for site in flat(3)]
    fill_connections(sites, ours)
    back = hyper_connections.save_connections(
        ours._replace(sites=read_connections(sites)), prefixes
    )
    for name, t in theirs.items():
        torch.testing.assert_close(
            back[name], t, rtol=0, atol=1.2e-7 if name.endswith("gamma") else 0
        )

    # so small that an eps of 1e-6 would show
    x = torch.randn(2, 3, D, dtype=torch.float64) * 1e-3
    residuals = x.repeat_interleave(n, 0)  # theirs keep the streams within the batch
    for k, module in enumerate(modules.double().values()):
        h, add = module(residuals)
        residuals = add(sublayer(k, h))
    expected = residuals.unflatten(0, (2, n)).sum(1)
    sites = [site.double() for site in sites]
    fill_connections(sites, ours)  # 1 + γ in float64
    torch.testing.assert_close(run(sites, x), expected, rtol=1e-12, atol=1e-15)


def tensors_of_hyper_connections(n: int = 2, prefix: str = "hc.") -> dict[str, torch.Tensor]:
    shapes = {
        "static_alpha": (n, n + 1),
        "static_beta": (n,),
        "dynamic_alpha_fn": (D, n + 1),
        "dynamic_beta_fn": (D,),
        "dynamic_alpha_scale": (),
        "dynamic_beta_scale": (),
        "norm.gamma": (D,),
    }
    return {prefix + name: randn(*shape) for name, shape in shapes.items()}


def test_gamma_is_saved_exactly():
    """1 + γ would lose the last bits of a small γ in float32."""
    theirs = tensors_of_hyper_connections()
    theirs["hc.norm.gamma"][:4] = torch.tensor([1e-7, -3e-9, 0.1, 7e-4])
    assert equal_tensors(
        hyper_connections.save_connections(
            hyper_connections.load_connections(theirs, ["hc."]), ["hc."]
        ),
        theirs,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"static_alpha": (4, 6)},
            r"'hc\.static_alpha' has the shape \(4, 6\), expected \(2, 3\): fractions, several",
        ),
        (
            {"dynamic_beta_fn": (D, 2)},
            r"'hc\.dynamic_beta_fn' has the shape \(12, 2\), expected \(12,\): fractions",
        ),
        (
            {"norm.gamma": (D, 1, 1)},
            r"'hc\.norm\.gamma' has the shape \(12, 1, 1\), expected \(12,\): fractions",
        ),
        (
            {"static_beta": None},
            "'hc.' has no static_beta: add_branch_out_to_residual=False has no counterpart",
        ),
        ({"norm.gamma": None}, "a tensor is missing: 'hc.norm.gamma'"),
        (
            {"pre_branch_scale": (1,)},
            "'hc.pre_branch_scale' is of ManifoldConstrainedHyperConnections, which has no",
        ),
        ({"extra": (1,)}, "a tensor is unknown: 'hc.extra'"),
    ],
)
def test_tensors_without_counterpart(changes, message):
    changed = {
        f"hc.{name}": None if shape is None else randn(*shape) for name, shape in changes.items()
    }
    theirs = {n: t for n, t in (tensors_of_hyper_connections() | changed).items() if t is not None}
    with pytest.raises(ValueError, match=message):
        hyper_connections.load_connections(theirs, ["hc."])


@pytest.mark.parametrize(
    "variant", [{"num_fracs": 2}, {"num_input_views": 2}, {"add_branch_out_to_residual": False}]
)
def test_variants_without_counterpart(variant):
    with pytest.raises(ValueError, match="no counterpart here"):
        hyper_connections.load_connections(
            package()(2, dim=D, **variant).state_dict(prefix="hc."), ["hc."]
        )


def test_the_mhc_of_the_package_has_no_counterpart():
    mhc = pytest.importorskip("hyper_connections").mHC(2, dim=D)
    with pytest.raises(
        ValueError, match="is of ManifoldConstrainedHyperConnections, which has no counterpart"
    ):
        hyper_connections.load_connections(mhc.state_dict(prefix="hc."), ["hc."])


def test_specs_that_the_package_has_not():
    ours = hyper_connections.load_connections(tensors_of_hyper_connections(), ["hc."])
    other_eps = "hyper(stats='rmsnorm', eps=1e-6)"
    for spec in ("hyper", "hyper(dynamic=False)", other_eps, "frac", "mhc"):
        with pytest.raises(
            ValueError, match=r"the package has only \"hyper\(stats='rmsnorm', eps="
        ):
            hyper_connections.save_connections(ours._replace(spec=spec), ["hc."])
    with pytest.raises(ValueError, match="expected a prefix for each of 1 sub-layers, got 2"):
        hyper_connections.save_connections(ours, ["a.", "b."])
