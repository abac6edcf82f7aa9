"""The `mhc-lite` repository's mHC and mHC-lite modules, one for each sub-layer.

Repository: FFTYYY/mhc-lite, the code of arXiv 2601.05732. Its `ManifoldConstrainedHyperConnections`
is mHC as the paper has it, over all streams, and its `MHCLite` is "mhc_lite"; n is
`num_residual_streams`. In its models the modules are transformer.h.{l}.hc_attn and .hc_mlp.

                    mHC                 mHC-lite
    static_alpha    [n, n+1]            [n + n!]            b_pre | b_res
    dynamic_alpha_fn  [nD, n(n+1)]      [nD, n + n!]        W_pre | W_res
    static_beta [n], dynamic_beta_fn [nD, n]                b_post, W_post
    pre_branch_scale [1], residual_scale [1], h_post_scale ()
    norm.gamma [nD]                                         the norm multiplies by 1 + γ

mHC's alpha has a row for each source: its pre, then its row of R. Here "mhc" has no γ, so that
fn = ((1 + γ) W)ᵀ, in float64: with γ, which is kept as unused, saving is exact. Once a float32
module has rounded fn, W is exact to 1.2e-7 of its value. Parameters without a γ are saved with
γ = 0. Sinkhorn's last normalisation is over destinations, without eps, and the streams are summed.
The norm divides by max(‖x‖, 1e-12), which `norm_eps=1e-24` equals except for inputs as small. Not
readable, and refused: `num_fracs` and `num_input_views` above 1,
`add_branch_out_to_residual=False`.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..spec import ConnectionSpec, all_options, make
from .rows import (
    SCALAR_TO_VECTOR,
    ConnectionParameters,
    TensorChange,
    TensorRow,
    TensorTuple,
    check_module_shapes,
    check_names,
    check_prefixes,
    convert_tensors,
    join_sites,
    reverse_rows,
    rows_of_modules,
    select_modules,
    short_spec,
    split_sites,
)

# What the repository fixes, as options of "mhc".
MHC_OPTIONS = {"order": "dst last", "readout": "sum", "eps": 0.0, "norm_eps": 1e-24}


def _join_bias(alpha: Tensor, beta: Tensor) -> TensorTuple:
    pre, res = alpha.split([1, len(alpha)], 1)
    return (torch.cat([pre.flatten(), beta, res.flatten()]),)


def _split_bias(base: Tensor) -> TensorTuple:
    n = _streams_of_rows(base)
    pre, beta, res = base.split([n, n, n * n])
    return torch.cat([pre[:, None], res.unflatten(0, (n, n))], 1), beta.clone()


def _join_scales(pre: Tensor, post: Tensor, res: Tensor) -> TensorTuple:
    return (torch.cat([pre, post.reshape(1), res]),)


def _split_scales(scale: Tensor) -> TensorTuple:
    pre, post, res = scale.split(1)
    return pre.clone(), post.reshape(()).clone(), res.clone()


def _join_projections(alpha: Tensor, beta: Tensor, gamma: Tensor) -> TensorTuple:
    n = beta.shape[1]
    pre, res = alpha.T.unflatten(0, (n, n + 1)).split([1, n], 1)
    W = torch.cat([pre.flatten(0, 1), beta.T, res.flatten(0, 1)])  # [n²+2n, nD]
    return W.double() * (1 + gamma.double()), gamma


def _split_projections(fn: Tensor, gamma: Tensor) -> TensorTuple:
    W = (fn.double() / (1 + gamma.double())).to(gamma.dtype)
    n = _streams_of_rows(W)
    pre, beta, res = W.split([n, n, n * n])
    alpha = torch.cat([pre[:, None], res.unflatten(0, (n, n))], 1)  # [n n+1 nD]
    return alpha.flatten(0, 1).T.contiguous(), beta.T.contiguous(), gamma


def _streams_of_rows(rows: Tensor) -> int:
    """n of n²+2n rows."""
    return math.isqrt(len(rows) + 1) - 1


_MHC_ROWS: tuple[TensorRow, ...] = (
    TensorRow("static_alpha static_beta", "base", TensorChange(_join_bias, _split_bias)),
    TensorRow(
        "pre_branch_scale h_post_scale residual_scale",
        "scale",
        TensorChange(_join_scales, _split_scales),
    ),
    TensorRow(
        "dynamic_alpha_fn dynamic_beta_fn norm.gamma",
        "fn gamma",
        TensorChange(_join_projections, _split_projections),
    ),
)
_LITE_ROWS: tuple[TensorRow, ...] = (
    TensorRow("static_alpha", "static_alpha"),
    TensorRow("static_beta", "static_beta"),
    TensorRow("dynamic_alpha_fn", "dynamic_alpha_fn"),
    TensorRow("dynamic_beta_fn", "dynamic_beta_fn"),
    TensorRow("pre_branch_scale", "pre_branch_scale"),
    TensorRow("residual_scale", "residual_scale"),
    TensorRow("h_post_scale", "h_post_scale", SCALAR_TO_VECTOR),
    TensorRow("norm.gamma", "gamma"),
)


def load_connections(
    tensors: Mapping[str, Tensor], prefixes: Sequence[str], sinkhorn_iters: int = 20
) -> ConnectionParameters:
    """The parameters of the repository's modules as those of `make("mhc")` or `make("mhc_lite")`.

    Args:
        tensors: a state dict; names that start with none of the prefixes are ignored.
        prefixes: of the modules in the order of depth, each with its dot, like
            ["transformer.h.0.hc_attn.", "transformer.h.0.hc_mlp.", …].
        sinkhorn_iters: of the repository's mHC.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape, or a γ is −1.
    """
    of_modules = select_modules(tensors, prefixes)
    first_alpha = of_modules.get(prefixes[0] + "static_alpha")
    is_lite = first_alpha is not None and first_alpha.ndim == 1
    rows = rows_of_modules(_LITE_ROWS if is_lite else _MHC_ROWS, prefixes)
    check_names([name for row in rows for name in row.source.split()], of_modules)
    n = of_modules[prefixes[0] + "static_beta"].numel()
    _check_modules(of_modules, prefixes, n, is_lite)
    sites = split_sites(convert_tensors(rows, of_modules), len(prefixes) + 1)
    if is_lite:
        return ConnectionParameters(short_spec("mhc_lite", streams=n), sites, {})
    gammas = {f"{k}.gamma": site.pop("gamma") for k, site in enumerate(sites[:-1])}
    spec = short_spec("mhc", streams=n, iterations=sinkhorn_iters, **MHC_OPTIONS)
    return ConnectionParameters(spec, sites, gammas)


def save_connections(
    parameters: ConnectionParameters, prefixes: Sequence[str]
) -> dict[str, Tensor]:
    """The inverse of `load_connections`, bitwise except for W after a float32 module (see above).

    Raises:
        ValueError: the repository has no such connection, or the number of prefixes is not that of
            the sub-layers.
    """
    spec = make(parameters.spec)
    if not _is_of_repository(spec):
        raise ValueError(
            f"the repository has only 'mhc_lite' and {str(make('mhc', **MHC_OPTIONS))!r}, "
            f"got {str(spec)!r}"
        )
    sites = parameters.sites[:-1]
    check_prefixes(prefixes, sublayers=len(sites))
    with torch.no_grad():
        tensors = join_sites(sites)
        rows = _LITE_ROWS
        if spec.name == "mhc":
            rows = _MHC_ROWS
            for k, site in enumerate(sites):
                tensors[f"{k}.gamma"] = torch.zeros_like(site["fn"][0])
            tensors |= parameters.unused
        return convert_tensors(reverse_rows(rows_of_modules(rows, prefixes)), tensors)


def _is_of_repository(spec: ConnectionSpec) -> bool:
    """Whether a spec differs from the repository's in the streams and iterations alone."""
    if spec.name != "mhc":
        return spec.name == "mhc_lite"
    given = all_options(spec)
    fixed = all_options(make("mhc", **MHC_OPTIONS))
    free = ("streams", "iterations", "stream_dtype")
    return all(given[name] == value for name, value in fixed.items() if name not in free)


def _check_modules(
    tensors: Mapping[str, Tensor], prefixes: Sequence[str], n: int, is_lite: bool
) -> None:
    """Raise a ValueError for a tensor whose shape or values the parameters here cannot have."""
    width = tensors[prefixes[0] + "norm.gamma"].numel()
    columns = n + math.factorial(n) if is_lite else n * (n + 1)
    shapes: dict[str, tuple[int, ...]] = {
        "static_alpha": (columns,) if is_lite else (n, n + 1),
        "static_beta": (n,),
        "dynamic_alpha_fn": (width, columns),
        "dynamic_beta_fn": (width, n),
        "pre_branch_scale": (1,),
        "residual_scale": (1,),
        "h_post_scale": (),
        "norm.gamma": (width,),
    }
    remark = ": fractions and several input views have no counterpart here"
    check_module_shapes(tensors, prefixes, shapes, remark)
    for prefix in prefixes:
        gamma = prefix + "norm.gamma"
        if not is_lite and (tensors[gamma] == -1).any():
            raise ValueError(f"{gamma!r} is -1 in places, where saving could not restore W")
