"""Parameters that DeepSpeed's ZeRO stage 3 has partitioned: each rank keeps a part of them, and
the parameter itself is an empty vector until it is gathered.

DeepSpeed is no dependency: where there are such parameters it has been imported.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def parameter_shape(parameter: Tensor) -> torch.Size:
    """The shape of a parameter, also where it is partitioned."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


@contextmanager
def gathered_parameters(parameters: Iterable[Tensor], changes: bool = False) -> Iterator[None]:
    """Gather those parameters that are partitioned and not gathered yet, on all ranks.

    Args:
        parameters: of a model.
        changes: they are changed meanwhile. All ranks then keep what the first one has.
    """
    partitioned = [p for p in parameters if p.shape != parameter_shape(p)]
    if not partitioned:
        yield
        return
    deepspeed: Any = sys.modules["deepspeed"]
    with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0 if changes else None):
        yield


@contextmanager
def without_partitioning() -> Iterator[None]:
    """Make usual tensors, also while DeepSpeed partitions all that is built (`zero.Init`).

    `zero.Init` also casts every new tensor to one dtype.
    """
    partitioning: Any = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if partitioning is None:
        yield
        return
    partitioning.shutdown_init_context()
    try:
        yield
    finally:
        partitioning.restore_init_context()
