"""Ranked singular values of a model's matrices.

Paper: DenseFormer (Pagliardini et al., 2024), arXiv 2402.02622, Figure 13.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..hf.attach import find_backbone


@dataclass
class SingularValues:
    """Singular values from the largest to the smallest, their mean over blocks.

    Attributes:
        names: of the matrices within a block, like "mlp.down_proj", and "embedding".
        values: of each, [min(rows, columns)].
    """

    names: list[str]
    values: list[Tensor]


@torch.no_grad()
def measure_singular_values(model: nn.Module) -> SingularValues:
    """Singular values of the matrices that every block has, and of the embedding.

    Args:
        model: of a family that `connect` knows, connected or not. It is not run.
    """
    backbone, wiring = find_backbone(model)
    matrices: dict[str, list[Tensor]] = {}
    layers = wiring.find_layers(backbone)
    for layer in layers:
        for name, parameter in layer.named_parameters():
            is_matrix = parameter.dim() == 2 and parameter.is_floating_point()  # not packed
            if is_matrix and not name.startswith("connections."):
                matrices.setdefault(name.removesuffix(".weight"), []).append(parameter)
    names = []
    values = []
    for name, blocks in matrices.items():
        if len(blocks) == len(layers) and len({block.shape for block in blocks}) == 1:
            names.append(name)
            values.append(_mean_singular_values(blocks))
    embedding = _token_embedding(backbone)
    if embedding is not None:
        names.append("embedding")
        values.append(_mean_singular_values([embedding]))
    return SingularValues(names, values)


def _token_embedding(backbone: Any) -> Tensor | None:
    """The matrix of a backbone's token embedding; None where it has none."""
    try:
        embedding = backbone.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # a stack, or an encoder of embeddings
        return None
    weight: Tensor | None = getattr(embedding, "weight", None)
    return weight


def _mean_singular_values(matrices: list[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for matrix in matrices:
        wide = matrix.double()
        if len(wide) > wide.shape[1]:
            wide = wide.mT
        # The eigenvalues of the smaller Gram matrix are their squares, and much cheaper. In float64
        # values below 1e-8 of the largest are rounding.
        squares = torch.linalg.eigvalsh(wide @ wide.mT).flip(0)
        total = total + squares.clamp_min(0).sqrt().cpu()
    return total / len(matrices)
