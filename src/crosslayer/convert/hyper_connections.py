"""The `hyper-connections` package's `HyperConnections` modules, one for each sub-layer.

Package: lucidrains/hyper-connections, after arXiv 2409.19606, Algorithm 2; n is its
`num_residual_streams`.

    static_alpha [n, n+1]   dynamic_alpha_fn [D, n+1]   dynamic_alpha_scale ()   here scales are [1]
    static_beta [n]         dynamic_beta_fn [D]         dynamic_beta_scale ()
    norm.gamma [D]          its RMSNorm multiplies by 1 + γ; norm_weight here is 1 + γ

The package's norm divides by max(‖x‖, 1e-12). `eps=1e-24` is equivalent, except for inputs that
small. 1 + γ is returned in float64, so that saving is exact. Once a float32 module has rounded it,
γ is exact to 6e-8. These have no counterpart here and are refused: `num_fracs` and
`num_input_views` above 1, `add_branch_out_to_residual=False`, `channel_first`, stream embeddings,
and the package's own mHC, whose weights see one stream where the paper's see all.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..spec import all_options, make
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


def _gamma_to_weight(gamma: Tensor) -> TensorTuple:
    return (gamma.double() + 1,)


def _weight_to_gamma(weight: Tensor) -> TensorTuple:
    return ((weight.double() - 1).float(),)


_GAMMA = TensorChange(_gamma_to_weight, _weight_to_gamma)
_ROWS = (
    TensorRow("static_alpha", "static_alpha"),
    TensorRow("static_beta", "static_beta"),
    TensorRow("dynamic_alpha_fn", "dynamic_alpha_fn"),
    TensorRow("dynamic_beta_fn", "dynamic_beta_fn"),
    TensorRow("dynamic_alpha_scale", "dynamic_alpha_scale", SCALAR_TO_VECTOR),
    TensorRow("dynamic_beta_scale", "dynamic_beta_scale", SCALAR_TO_VECTOR),
    TensorRow("norm.gamma", "norm_weight", _GAMMA),
)
_NORM_EPS = 1e-24
# a tensor that only a variant without counterpart has
_FOREIGN_VARIANTS = {
    "pre_branch_scale": "ManifoldConstrainedHyperConnections",
    "stream_embed": "StreamEmbed",
}


def load_connections(
    tensors: Mapping[str, Tensor], prefixes: Sequence[str], tanh: bool = True
) -> ConnectionParameters:
    """The parameters of `HyperConnections(n, dim=D, tanh=tanh)` modules as those of
    `make("hyper")`.

    Args:
        tensors: a state dict; names that start with none of the prefixes are ignored.
        prefixes: of the modules in the order of depth, each with its dot, like ["layers.0.attn.",
            "layers.0.ff.", …].
        tanh: of the package.

    Raises:
        ValueError: a tensor is missing or unknown, or the modules are a variant without
            counterpart.
    """
    of_modules = select_modules(tensors, prefixes)
    for name in of_modules:
        variant = _FOREIGN_VARIANTS.get(name.rsplit(".", 1)[-1])
        if variant is not None:
            raise ValueError(
                f"{name!r} is of {variant}, which has no counterpart here; "
                "crosslayer.convert.mhc_lite reads the mhc-lite repository's"
            )
    for prefix in prefixes:
        if prefix + "static_alpha" in of_modules and prefix + "static_beta" not in of_modules:
            raise ValueError(
                f"{prefix!r} has no static_beta: add_branch_out_to_residual=False has no "
                "counterpart here"
            )
    rows = rows_of_modules(_ROWS, prefixes)
    check_names([row.source for row in rows], of_modules)
    n = of_modules[prefixes[0] + "static_beta"].numel()
    _check_module_shapes(of_modules, prefixes, n)
    sites = split_sites(convert_tensors(rows, of_modules), len(prefixes) + 1)
    spec = short_spec("hyper", streams=n, stats="rmsnorm", tanh=tanh, eps=_NORM_EPS)
    return ConnectionParameters(spec, sites, {})


def save_connections(
    parameters: ConnectionParameters, prefixes: Sequence[str]
) -> dict[str, Tensor]:
    """The inverse of `load_connections`, bitwise except for γ (see above).

    Raises:
        ValueError: the spec is not `hyper(stats='rmsnorm', eps=1e-24)` or not dynamic, or the
            number of prefixes is not that of the sub-layers.
    """
    spec = make(parameters.spec)
    options = all_options(spec)
    of_package = {"stats": "rmsnorm", "eps": _NORM_EPS, "dynamic": True}
    if spec.name != "hyper" or any(options[name] != v for name, v in of_package.items()):
        raise ValueError(
            f"the package has only \"hyper(stats='rmsnorm', eps={_NORM_EPS})\", got {str(spec)!r}"
        )
    check_prefixes(prefixes, sublayers=len(parameters.sites) - 1)
    with torch.no_grad():
        rows = reverse_rows(rows_of_modules(_ROWS, prefixes))
        return convert_tensors(rows, join_sites(parameters.sites))


def _check_module_shapes(tensors: Mapping[str, Tensor], prefixes: Sequence[str], n: int) -> None:
    dim = tensors[prefixes[0] + "norm.gamma"].numel()
    shapes: dict[str, tuple[int, ...]] = {
        "static_alpha": (n, n + 1),
        "dynamic_alpha_fn": (dim, n + 1),
        "dynamic_alpha_scale": (),
        "static_beta": (n,),
        "dynamic_beta_fn": (dim,),
        "dynamic_beta_scale": (),
        "norm.gamma": (dim,),
    }
    remark = ": fractions, several input views and channels first have no counterpart here"
    check_module_shapes(tensors, prefixes, shapes, remark)
