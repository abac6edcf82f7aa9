"""Whether an attention's q, k and v are those of their own inputs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from crosslayer.hf.projections import find_projections
from crosslayer.hf.qkv import QKVInputs, split_qkv_inputs


def check_split_inputs(
    attention: nn.Module, project: Callable[[Any], Sequence[Tensor]], dim: int
) -> None:
    """Give three inputs to an attention's projections.

    Args:
        attention: it is changed.
        project: q, k and v by the attention's projections, as its own code divides them.
        dim: width of the inputs.
    """
    inputs = torch.randn(3, 2, 5, dim).unbind()
    expected = [project(x)[index] for index, x in enumerate(inputs)]
    projections, fused = find_projections(attention)
    assert projections
    split_qkv_inputs(attention, projections, fused)
    for actual, wanted in zip(project(QKVInputs(inputs)), expected, strict=True):
        torch.testing.assert_close(actual, wanted)
