import contextlib
import gc
import os
from pathlib import Path

# before torch is imported: two workers on two cores, a thread each
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

# The longest. They begin first, so that no process works on one of them when the others are done.
LONGEST = (
    "test_two_ranks_equal_one",
    "test_killed_at_random_moments",
    "test_connections_in_the_interpreter",
    "test_compiles_for_gpus",
    "test_gpu_campaign_at_toy_size",
    "test_compiled",
    "test_every_command",
    "test_every_kernel_in_the_interpreter",
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: getattr(item, "originalname", "") not in LONGEST)


def pytest_collection_finish():
    """Garbage is collected less often, and not among the modules: a tenth of the suite's time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


# hypothesis takes some values from the source of whatever modules are imported by then. Without
# them the examples are the same in every run. Older versions take none.
with contextlib.suppress(ImportError):
    from hypothesis.internal.conjecture import providers

    providers._get_local_constants = lambda: providers._local_constants


@pytest.fixture
def extra_data() -> Path:
    """The folder of real texts, tokenizers and images, where there is one."""
    folder = os.environ.get("CROSSLAYER_DATA")
    if not folder:
        pytest.skip("CROSSLAYER_DATA is not set")
    return Path(folder)


@pytest.fixture
def no_progress_bars():
    """Those of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


pytest.register_assert_rewrite("crosslayer.testing.laws")

from crosslayer.testing.laws import same_start  # noqa: E402, F401
