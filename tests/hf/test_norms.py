"""What kernels take of a host's norms to run them themselves is what these are."""

import pytest
import torch
from bodies import LANGUAGE, VISION, build

import crosslayer
from crosslayer.connection import following
from crosslayer.costs import connections
from crosslayer.ops import follow

# norms of their own kinds, or none before a sub-layer
OTHERS = {"gemma2", "gemma3", "olmo", "olmo2", "dit"}


@pytest.mark.parametrize("family", [*LANGUAGE, *VISION])
def test_a_known_norm_is_what_it_is_taken_for(family):
    torch.manual_seed(0)
    model = crosslayer.connect(build(family), "mudd" if family in LANGUAGE else "prenorm")
    known = 0
    for site in connections(model):
        for norm in site.norms:
            taken = following(norm)
            if taken is not None:
                torch.nn.init.normal_(taken.weight)
                x = torch.randn(2, 3, len(taken.weight))
                torch.testing.assert_close(follow(x, taken), norm(x), rtol=1e-6, atol=1e-6)
                known += 1
    assert bool(known) == (family not in OTHERS)
