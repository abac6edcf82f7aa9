import gc
import os

# before torch is imported: two workers on two cores, a thread each
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch


def pytest_collection_finish():
    """Garbage is collected less often, and not among the modules: a tenth of the suite's time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def same_start():
    """Every test starts from one seed and leaves torch's defaults as they were."""
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch._dynamo.reset()
