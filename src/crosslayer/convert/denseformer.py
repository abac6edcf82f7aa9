"""The `denseformer` package's `DWAModules`: alphas.{i−1}.weight [1, ⌊i/k⌋ + 1] after block i, where p divides i.

Paper and package: DenseFormer (Pagliardini et al., 2024), arXiv 2402.02622; the sources stand in the order of depth in
both. How many blocks there are, and the dilation k, cannot be told from the tensors.
"""

from collections.abc import Mapping

from torch import Tensor

from ..spec import make
from ..validation import check_positive
from .rows import Change, Connections, Row, convert, expand, joined, split, turned

ROW = Row(
    "alphas.{i}.weight",
    "{site}.alpha",
    Change(lambda w: (w.squeeze(0),), lambda a: (a.unsqueeze(0),)),
)


def load(
    tensors: Mapping[str, Tensor],
    blocks: int,
    dilation: int = 1,
    period: int = 1,
    sublayers: int = 2,
) -> Connections:
    """`DWAModules(blocks, dilation, period).state_dict()` as the parameters of ours.

    Args:
        sublayers: the sites of a block: 2, or 1 where attention and MLP run side by side.

    Raises:
        ValueError: an alpha is missing, one is of no block, or its shape is another than the dilation says.
    """
    check_positive(blocks=blocks, dilation=dilation, period=period, sublayers=sublayers)
    for i in range(period, blocks + 1, period):
        given = tensors.get(f"alphas.{i - 1}.weight")
        if given is not None and given.shape != (1, i // dilation + 1):
            raise ValueError(
                f"'alphas.{i - 1}.weight' has the shape {tuple(given.shape)}, "
                f"expected {(1, i // dilation + 1)} for dilation={dilation}"
            )
    states = split(convert(rows(blocks, period, sublayers), tensors), blocks * sublayers + 1)
    options = {"dilation": dilation, "period": period}
    given_options = ", ".join(f"{name}={value}" for name, value in options.items() if value != 1)
    return Connections(
        f"denseformer({given_options})" if given_options else "denseformer", states, {}
    )


def save(connections: Connections) -> dict[str, Tensor]:
    """The way back, to the last bit.

    Raises:
        ValueError: the arm is none that the package has.
    """
    factory = make(connections.arm)
    period = factory.options.get("period", 1)
    if (
        factory.name != "denseformer"
        or factory.options.get("last_k") is not None
        or not isinstance(period, int)
    ):
        raise ValueError(f"the package has dilation and period alone, got {connections.arm!r}")
    sites = len(connections.states) - 1
    # every block opens with one site, and the first average stands where block `period` has ended
    first = next((k for k, state in enumerate(connections.states) if state), period)
    sublayers = first // period
    return convert(turned(rows(sites // sublayers, period, sublayers)), joined(connections.states))


def rows(blocks: int, period: int, sublayers: int) -> list[Row]:
    depths = range(period, blocks + 1, period)
    return [row for i in depths for row in expand([ROW], i=i - 1, site=i * sublayers)]
