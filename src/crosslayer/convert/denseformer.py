"""The `denseformer` package's `DWAModules`: alphas.{i−1}.weight [1, ⌊i/k⌋ + 1] after block i, where
p divides i.

Paper and package: DenseFormer (Pagliardini et al., 2024), arXiv 2402.02622. The sources are in the
order of depth in both. The tensors show neither the number of blocks nor the dilation k.
"""

from collections.abc import Mapping

from torch import Tensor

from ..spec import make
from ..validation import check_positive
from .rows import (
    DROP_FIRST_AXIS,
    ConnectionParameters,
    TensorRow,
    convert_tensors,
    expand_rows,
    join_sites,
    reverse_rows,
    short_spec,
    split_sites,
)

_ALPHA = TensorRow("alphas.{i}.weight", "{site}.alpha", DROP_FIRST_AXIS)


def load_connections(
    tensors: Mapping[str, Tensor],
    blocks: int,
    dilation: int = 1,
    period: int = 1,
    sublayers: int = 2,
) -> ConnectionParameters:
    """`DWAModules(blocks, dilation, period).state_dict()` as parameters of `make("denseformer")`.

    Args:
        tensors: the state dict.
        blocks: Transformer layers.
        dilation: k, of the package.
        period: p, of the package.
        sublayers: the sites of a block: 2, or 1 where attention and MLP run in parallel.

    Raises:
        ValueError: an alpha is missing, belongs to no block, or has a shape of another dilation.
    """
    check_positive(blocks=blocks, dilation=dilation, period=period, sublayers=sublayers)
    for i in range(period, blocks + 1, period):
        name = f"alphas.{i - 1}.weight"
        expected = (1, i // dilation + 1)
        if name in tensors and tensors[name].shape != expected:
            raise ValueError(
                f"{name!r} has the shape {tuple(tensors[name].shape)}, "
                f"expected {expected} for dilation={dilation}"
            )
    converted = convert_tensors(_alpha_rows(blocks, period, sublayers), tensors)
    spec = short_spec("denseformer", dilation=dilation, period=period)
    return ConnectionParameters(spec, split_sites(converted, blocks * sublayers + 1), {})


def save_connections(parameters: ConnectionParameters) -> dict[str, Tensor]:
    """The inverse of `load_connections`, bitwise.

    Raises:
        ValueError: the package cannot represent the spec.
    """
    spec = make(parameters.spec)
    period = spec.options.get("period", 1)
    has_last_k = spec.options.get("last_k") is not None
    if spec.name != "denseformer" or has_last_k or not isinstance(period, int):
        raise ValueError(f"the package has only dilation and period, got {str(spec)!r}")
    if not any(parameters.sites):  # the period is longer than the model
        return {}
    sites = len(parameters.sites) - 1
    # Block `period` is the first with an average, at the site that opens the block after it.
    first_average = next(k for k, site in enumerate(parameters.sites) if site)
    sublayers = first_average // period
    rows = _alpha_rows(sites // sublayers, period, sublayers)
    return convert_tensors(reverse_rows(rows), join_sites(parameters.sites))


def _alpha_rows(blocks: int, period: int, sublayers: int) -> list[TensorRow]:
    rows = []
    for i in range(period, blocks + 1, period):
        rows += expand_rows([_ALPHA], i=i - 1, site=i * sublayers)
    return rows
