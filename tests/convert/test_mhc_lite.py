"""The `mhc-lite` repository's modules: round trips, and a loop of their mathematics in float64."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import crosslayer
from crosslayer.convert import fill_connections, mhc_lite, read_connections
from crosslayer.testing.tiny_model import equal_tensors
from tests.support.chain import D, flat, randn, run, sublayer

GOLDEN = Path(__file__).parent.parent / "golden"
SUBLAYERS = 3
ITERATIONS = 2  # few, so that the order of the normalisations shows
PREFIXES = ["transformer.h.0.hc_attn.", "transformer.h.0.hc_mlp.", "transformer.h.1.hc_attn."]


def module_tensors(lite: bool, n: int) -> dict[str, torch.Tensor]:
    """The state dict of the repository's modules, with random values, and an unrelated tensor."""
    columns = n + math.factorial(n) if lite else n * (n + 1)
    found = {"transformer.wte.weight": randn(3, D)}
    for prefix in PREFIXES:
        shapes = {
            "static_alpha": (columns,) if lite else (n, n + 1),
            "static_beta": (n,),
            "dynamic_alpha_fn": (n * D, columns),
            "dynamic_beta_fn": (n * D, n),
            "pre_branch_scale": (1,),
            "residual_scale": (1,),
            "h_post_scale": (),
            "norm.gamma": (n * D,),
        }
        found |= {prefix + name: randn(*shape) for name, shape in shapes.items()}
    return found


def loop(theirs: dict[str, torch.Tensor], lite: bool, n: int, x: torch.Tensor) -> torch.Tensor:
    """The published modules on one token after the other."""
    rows = []
    for token in x.flatten(0, -2):
        H = [token] * n
        for k, prefix in enumerate(PREFIXES):
            t = {name.removeprefix(prefix): v.double() for name, v in theirs.items()}
            v = torch.cat(H)
            v = v / max(v.norm().item(), 1e-12) * math.sqrt(len(v)) * (t["norm.gamma"] + 1)
            alpha, beta = v @ t["dynamic_alpha_fn"], v @ t["dynamic_beta_fn"]
            if lite:
                pre = t["pre_branch_scale"] * alpha[:n] + t["static_alpha"][:n]
                res = t["residual_scale"] * alpha[n:] + t["static_alpha"][n:]
                R = torch.zeros(n, n, dtype=torch.float64)
                for weight, order in zip(
                    res.softmax(0), itertools.permutations(range(n)), strict=True
                ):
                    for source, destination in enumerate(order):
                        R[source, destination] += weight
            else:
                alpha = alpha.view(n, n + 1)
                pre = t["pre_branch_scale"] * alpha[:, 0] + t["static_alpha"][:, 0]
                R = (t["residual_scale"] * alpha[:, 1:] + t["static_alpha"][:, 1:]).exp()
                for _ in range(ITERATIONS):
                    R = R / R.sum(0)
                    R = R / R.sum(1, keepdim=True)
            post = 2 * (t["h_post_scale"] * beta + t["static_beta"]).sigmoid()
            y = sublayer(k, sum(w * h for w, h in zip(pre.sigmoid(), H, strict=True)))
            H = [post[d] * y + sum(R[s, d] * H[s] for s in range(n)) for d in range(n)]
        rows.append(sum(H))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize(("lite", "n"), [(False, 4), (False, 2), (True, 4)])
def test_round_trips_and_streams(lite, n):
    theirs = module_tensors(lite, n)
    ours = mhc_lite.load_connections(theirs, PREFIXES, ITERATIONS)
    of_modules = {name: t for name, t in theirs.items() if "hc_" in name}
    assert equal_tensors(mhc_lite.save_connections(ours, PREFIXES), of_modules)

    make = crosslayer.make(ours.spec)
    sites = [make(site, D, lambda port: torch.nn.Identity()) for site in flat(SUBLAYERS)]
    fill_connections(sites, ours)
    back = mhc_lite.save_connections(ours._replace(sites=read_connections(sites)), PREFIXES)
    for name, tensor in of_modules.items():
        rtol = 2.4e-7 if "_fn" in name and not lite else 0  # fn was rounded to float32
        torch.testing.assert_close(back[name], tensor, rtol=rtol, atol=0)
    sites = [site.double() for site in sites]
    fill_connections(sites, ours)
    x = torch.randn(2, 3, D, dtype=torch.float64) * 1e-3  # an eps of 1e-6 would show
    torch.testing.assert_close(run(sites, x), loop(theirs, lite, n, x), rtol=1e-11, atol=1e-14)


def test_mhc_lite_against_numbers_of_the_repository():
    file = load_file(GOLDEN / "mhc_lite_n4_3sublayers.safetensors")
    of_modules = {n.removeprefix("param/"): t for n, t in file.items() if n.startswith("param/hc")}
    prefixes = [f"hc{k}." for k in range(SUBLAYERS)]
    ours = mhc_lite.load_connections(of_modules, prefixes)
    assert equal_tensors(mhc_lite.save_connections(ours, prefixes), of_modules)
    width = file["input/x"].shape[-1]
    make = crosslayer.make(ours.spec)
    sites = [make(k, width, lambda port: torch.nn.Identity()).double() for k in flat(SUBLAYERS)]
    fill_connections(sites, ours)
    state = sites[0].init(file["input/x"].double())
    for k, site in enumerate(sites[:-1]):
        (h,), state = site.read(state)
        weight, bias = (file[f"param/layer{k}.{name}"].double() for name in ("weight", "bias"))
        state = site.write(state, torch.nn.functional.linear(h, weight, bias))
    torch.testing.assert_close(
        sites[-1].readout(state), file["f64/output/out"], rtol=1e-10, atol=1e-12
    )


def test_what_was_trained_here_is_saved_without_gamma():
    """A spec of the repository's kind, whose parameters have no γ."""
    make = crosslayer.make("mhc", streams=2, **mhc_lite.MHC_OPTIONS)
    sites = [make(site, D, lambda port: torch.nn.Identity()) for site in flat(SUBLAYERS)]
    ours = mhc_lite.ConnectionParameters(make, read_connections(sites), {})
    theirs = mhc_lite.save_connections(ours, PREFIXES)
    assert not theirs[PREFIXES[0] + "norm.gamma"].any()
    back = mhc_lite.load_connections(theirs, PREFIXES)
    assert back.spec == make
    for site, given in zip(back.sites, ours.sites, strict=True):
        assert all(torch.equal(tensor.float(), given[name]) for name, tensor in site.items())


@pytest.mark.parametrize("prefix", [PREFIXES[0], PREFIXES[2]])
@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "static_alpha",
            randn(8, 5),
            r"static_alpha' has the shape \(8, 5\), expected \(4, 5\): fr",
        ),
        ("static_beta", None, r"a tensor is missing: 'transformer\.h\..\.hc_attn\.static_beta'"),
        ("static_alpha", None, r"a tensor is missing: 'transformer\.h\..\.hc_attn\.static_alpha'"),
        ("norm.gamma", -torch.ones(4 * D), "norm.gamma' is -1 in places"),
        (
            "stream_embed",
            randn(4),
            r"a tensor is unknown: 'transformer\.h\..\.hc_attn\.stream_embed'",
        ),
    ],
)
def test_tensors_without_counterpart(name, tensor, message, prefix):
    theirs = module_tensors(False, 4) | {prefix + name: tensor}
    with pytest.raises(ValueError, match=message):
        mhc_lite.load_connections({n: t for n, t in theirs.items() if t is not None}, PREFIXES)


def test_modules_without_prefixes():
    with pytest.raises(ValueError, match="expected the prefixes of the modules, got none"):
        mhc_lite.load_connections(module_tensors(False, 4), [])


def test_the_dtype_of_streams_is_not_the_repositorys():
    ours = mhc_lite.load_connections(module_tensors(False, 4), PREFIXES)
    wider = ours._replace(spec=crosslayer.make(ours.spec, stream_dtype="float32"))
    assert equal_tensors(*(mhc_lite.save_connections(p, PREFIXES) for p in (wider, ours)))


def test_specs_that_the_repository_has_not():
    ours = mhc_lite.load_connections(module_tensors(False, 4), PREFIXES)
    for spec in ("mhc", "hyper", "mhc(readout='sum', order='dst last', norm_eps=1e-24)"):
        with pytest.raises(ValueError, match=r"the repository has only 'mhc_lite' and .mhc"):
            mhc_lite.save_connections(ours._replace(spec=spec), PREFIXES)
    with pytest.raises(ValueError, match="expected a prefix for each of 3 sub-layers, got 2"):
        mhc_lite.save_connections(ours, PREFIXES[:2])
