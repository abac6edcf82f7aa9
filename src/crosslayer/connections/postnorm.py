"""Post-norm residual: the stream is normed after every write.

Paper: Attention Is All You Need (Vaswani et al., 2017), arXiv 1706.03762.

    x ← Norm(x + y)        for every write y, the embedding's y_0 included, as in BERT

The norm that a pre-norm host keeps before sub-layer k is the norm after write k − 1, and the final norm is the one
after the last, so each of the host's norms has its place and none is applied twice. In a parallel block the stream is
what the attention reads, and the MLP reads the same sum through its own norm.
Computes another function than PreNorm from the start: not for a model that was trained with one.
State: one stream. Parameters: none. Traffic: 3D a token and boundary.
"""

from torch import Tensor

from .prenorm import PreNorm, Stream


class PostNorm(PreNorm):
    fuses = False  # its norms are in the stream
    starts_as_prenorm = False
    renorms = True

    def traffic(self) -> float:
        # what the layers read is the stream itself
        return super().traffic() - (0 < self.site.index < self.site.depth)

    def read(self, state: Stream) -> tuple[tuple[Tensor, ...], Stream]:
        xs, _ = super().read(state)
        return xs, Stream(xs[0])
