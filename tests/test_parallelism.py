"""Tensor, sequence and pipeline parallelism in two processes, as docs/parallelism.md describes."""

import json

import pytest
import torch

from tests import parallel_ranks


@pytest.mark.slow
def test_gradients_are_those_of_one_process(tmp_path):
    torch.multiprocessing.spawn(parallel_ranks.run_rank, (str(tmp_path),), nprocs=2)
    for rank in (0, 1):
        errors = json.loads((tmp_path / f"errors-{rank}.json").read_text())
        assert len(errors) == len(parallel_ranks.WAYS) * len(parallel_ranks.SPECS)
        assert {case: error for case, error in errors.items() if not error < 1e-4} == {}
