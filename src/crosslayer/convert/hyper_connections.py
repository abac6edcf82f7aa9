"""The `hyper-connections` package's `HyperConnections` modules, one a sub-layer.

Package: lucidrains/hyper-connections, after arXiv 2409.19606, Algorithm 2; n is its `num_residual_streams`.

    static_alpha [n, n+1]   dynamic_alpha_fn [D, n+1]   dynamic_alpha_scale ()    as ours, but that scales are 0-d
    static_beta [n]         dynamic_beta_fn [D]         dynamic_beta_scale ()
    norm.gamma [D]          its RMSNorm multiplies by 1 + γ, which is our norm_weight

It has no eps to speak of in that norm where ours has 1e-6. γ + 1 is given in float64, so that the way back is exact;
once rounded to float32 in a module, γ comes back to 6e-8. Not ours, and refused: `num_fracs` and `num_input_views`
above 1, `add_branch_out_to_residual=False`, `channel_first`, stream embeddings, and the package's own mHC, whose
weights see one stream where mHC's see all.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..spec import default_options, make
from .rows import Change, Connections, Row, convert, expand, joined, split, turned

NARROWED = Change(lambda s: (s.reshape(1),), lambda s: (s.reshape(()),))
GAMMA = Change(lambda g: (g.double() + 1,), lambda w: ((w.double() - 1).float(),))
ROWS = (
    *(Row(f"{{prefix}}{n}", f"{{site}}.{n}") for n in ("static_alpha", "static_beta")),
    *(Row(f"{{prefix}}{n}", f"{{site}}.{n}") for n in ("dynamic_alpha_fn", "dynamic_beta_fn")),
    *(
        Row(f"{{prefix}}{n}", f"{{site}}.{n}", NARROWED)
        for n in ("dynamic_alpha_scale", "dynamic_beta_scale")
    ),
    Row("{prefix}norm.gamma", "{site}.norm_weight", GAMMA),
)
# a tensor that only a variant has which is not ours
FOREIGN = {"pre_branch_scale": "ManifoldConstrainedHyperConnections", "stream_embed": "StreamEmbed"}


def load(tensors: Mapping[str, Tensor], prefixes: Sequence[str], tanh: bool = True) -> Connections:
    """The parameters of a row of `HyperConnections(n, dim=D, tanh=tanh)` as ours.

    Args:
        tensors: a state dict, of which the names beneath the prefixes are read and no others.
        prefixes: of the modules in the order of depth, each with its dot, like ["layers.0.attn.", "layers.0.ff.", …].

    Raises:
        ValueError: a tensor is missing or foreign, or the modules are of a variant that is not ours.
    """
    if not prefixes:
        raise ValueError("expected the prefixes of one module at least, got none")
    found = {name: t for name, t in tensors.items() if name.startswith(tuple(prefixes))}
    for name in found:
        if (variant := FOREIGN.get(name.rsplit(".", 1)[-1])) is not None:
            raise ValueError(f"{name!r} is of {variant}, which has no counterpart here")
    for prefix in prefixes:
        if prefix + "static_alpha" in found and prefix + "static_beta" not in found:
            raise ValueError(
                f"{prefix!r} has no static_beta: add_branch_out_to_residual=False has no counterpart here"
            )
    states = split(convert(rows(prefixes), found), len(prefixes) + 1)
    n, dim = len(states[0]["static_alpha"]), len(states[0]["dynamic_alpha_fn"])
    shapes = {
        "static_alpha": (n, n + 1), "dynamic_alpha_fn": (dim, n + 1), "static_beta": (n,), "dynamic_beta_fn": (dim,),
        "norm.gamma": (dim,),
    }  # fmt: skip
    for name, shape in (
        (prefix + name, shape) for prefix in prefixes for name, shape in shapes.items()
    ):
        if found[name].shape != shape:
            raise ValueError(
                f"{name!r} has the shape {tuple(found[name].shape)}, expected {shape}: fractions, several input views "
                "and channels first have no counterpart here"
            )
    return Connections(
        f"hyper(streams={n}, stats='rmsnorm'{'' if tanh else ', tanh=False'})", states, {}
    )


def save(connections: Connections, prefixes: Sequence[str]) -> dict[str, Tensor]:
    """The way back, to the last bit but for γ (see above).

    Raises:
        ValueError: the arm is not `hyper(stats='rmsnorm')`, dynamic, or there is not one prefix a sub-layer.
    """
    factory = make(connections.arm)
    given = default_options(factory.method) | factory.options
    if factory.name != "hyper" or given["stats"] != "rmsnorm" or not given["dynamic"]:
        raise ValueError(
            f"the package has \"hyper(stats='rmsnorm')\" alone, got {connections.arm!r}"
        )
    if len(prefixes) != len(connections.states) - 1:
        raise ValueError(
            f"expected a prefix for each of {len(connections.states) - 1} sub-layers, got {len(prefixes)}"
        )
    with torch.no_grad():
        return convert(turned(rows(prefixes)), joined(connections.states))


def rows(prefixes: Sequence[str]) -> list[Row]:
    return [
        row
        for site, prefix in enumerate(prefixes)
        for row in expand(ROWS, prefix=prefix, site=site)
    ]
