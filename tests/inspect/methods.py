"""Which methods the analyses of matrices are tested on."""

import crosslayer
from crosslayer.connection import Connection


def has_mixing_weights(spec: str) -> bool:
    """Whether a method defines its read as matrices. A new one need not."""
    return crosslayer.make(spec).method.mixing_weights is not Connection.mixing_weights
