"""Post-norm residual: the stream is normed after every write.

Paper: Attention Is All You Need (Vaswani et al., 2017), arXiv 1706.03762, section 3.1.

    x ← Norm(x + y)        for every output y of a sub-layer; the embedding y_0 is normed too, as
                           in BERT

In a model that `connect` changes, the norm before sub-layer k moves behind the addition of
y_{k−1}, and the final norm behind the last addition. So each norm is applied exactly once. In a
parallel block the stream is the input of the attention, and the MLP applies its own norm to the
same sum. Not equivalent to pre-norm at initialisation: a pretrained pre-norm model that is
connected with it must be trained anew.
State: one stream.
Learned parameters: none.
Traffic: 3D elements per token and site.
"""

from typing import Any

from torch import Tensor
from torch.func import functional_call

from ..connection import Connection
from ..fused_norms import resolve_host_norm, stream_norm_spec
from ..mixing import MixingWeights, identity_weights
from ..norms import add_write
from .prenorm import SingleStream


class PostNorm(Connection[SingleStream]):
    """Post-norm residual: the stream is normed after every write.

    Paper: Attention Is All You Need (Vaswani et al., 2017), arXiv 1706.03762, section 3.1.
    """

    initial_function = "bitwise postnorm"
    norms_its_stream = True

    def initial_state(self, x: Tensor) -> SingleStream:
        return SingleStream(x)

    def mix_inputs(self, state: SingleStream) -> tuple[tuple[Tensor, ...], SingleStream]:
        h = add_write(*state)
        return (h,), SingleStream(h)

    def norm_mixed(
        self, inputs: tuple[Tensor, ...], state: SingleStream
    ) -> tuple[tuple[Tensor, ...], SingleStream]:
        normed, x = norm_stream(self, inputs)
        return normed, SingleStream(x)

    def state_parts(self, state: SingleStream) -> tuple[Tensor, ...]:
        return (state.h,)

    def mixing_weights(self, state: SingleStream) -> MixingWeights:
        # One written part a port, because a parallel block applies two norms to the same sum.
        ports = len(self.ports)
        columns = 1 if state.y is None else 2
        read = identity_weights(ports, state.h)
        write = read.new_ones(ports, columns, 1)
        norms = tuple(stream_norm_spec(norm) for norm in self.norms)
        return MixingWeights(write, read, read[:1], norms)

    def memory_traffic(self) -> float:
        # The layers' input is the stream itself, which is written once.
        is_inner = 0 < self.site.index < self.site.depth
        return super().memory_traffic() - is_inner


def norm_stream(
    connection: Connection[Any], inputs: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The normed inputs, and the first of them as the stream, in the streams' dtype.

    Both are one tensor, unless `stream_dtype` is wider than the sub-layer's dtype.
    """
    normed = connection.apply_port_norms(*inputs)
    if connection.stream_dtype is None or connection.is_readout:
        return normed, normed[0]
    host = resolve_host_norm(connection.norms[0])
    weights = {name: weight.to(inputs[0].dtype) for name, weight in host.named_parameters()}
    x = functional_call(host, weights, (inputs[0],))
    return (x.to(normed[0].dtype), *normed[1:]), x
