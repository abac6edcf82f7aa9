"""`Stack`: the loop over sites and sub-layers as a module, for your own model."""

import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, cast

from torch import Tensor, nn

from .connection import Connection
from .recompute import RecomputeMode, enable_recompute, recompute_inputs
from .sites import plan
from .spec import ConnectionSpec, check_norm_factory, make
from .validation import format_shape


class Stack(nn.Module):
    """Sub-layers joined by a connection, from the embedding to the output of the final norm.

        stack = crosslayer.Stack("mudd", [attention_0, mlp_0, attention_1, mlp_1], dim=512)
        hidden = stack(embedding, mask=mask)

    Args:
        spec: like "mudd(dilation=2)", or what `make` returns.
        sublayers: attention and MLP modules in the order of depth: attention, MLP, attention, MLP,
            … An MLP is called with one [B T D], and an attention with one, or with three, for q, k
            and v, at the sites where the method mixes them separately. `mudd` does so after the
            first layer, so give k and v defaults. Each returns [B T D]. The connections own the
            norms, so sub-layers have no norm before them and add no residual.
        dim: D, the width.
        norm: takes the width and returns a norm, like `nn.RMSNorm` or `nn.LayerNorm`, unlike the
            `norm` of a spec, which takes a port. Called once for each input of each sub-layer, and
            for each norm of the readout: one, or two with `resi_dual`.
        parallel: every sub-layer is a parallel block, called with the inputs of its attention, one
            or three, and then with that of its MLP: `forward(self, *inputs)`.
        recompute: None, "streams" or "inversion": recompute states in the backward pass (see
            `crosslayer.recompute`).

    Shapes: embedding [B T D] -> hidden state [B T D].

    Raises:
        ValueError: the spec is unknown, has the option `output_scale` or does not support
            `recompute`; `norm` is a module; `sublayers` is empty, has something else than modules
            or an odd number of sub-layers that are not parallel, or one of them does not take as
            many inputs as the connection has for it.
    """

    def __init__(
        self,
        spec: str | ConnectionSpec,
        sublayers: Iterable[nn.Module],
        dim: int,
        norm: Callable[[int], nn.Module] = nn.RMSNorm,
        parallel: bool = False,
        recompute: RecomputeMode | None = None,
    ):
        super().__init__()
        self.dim = dim
        try:
            self.sublayers = nn.ModuleList(sublayers)
        except TypeError:
            raise ValueError(
                f"Stack: sublayers must be a list of modules, got {sublayers!r}"
            ) from None
        count = len(self.sublayers)
        if count == 0:
            raise ValueError("Stack: sublayers must be attention and MLP of a layer or more, got 0")
        if not parallel and count % 2:
            raise ValueError(
                "Stack: sublayers must be attention, MLP, attention, MLP, …, an even number of "
                f"them, got {count}"
            )
        check_norm_factory(norm, "nn.RMSNorm")
        sites = plan(count if parallel else count // 2, parallel)
        make_connection = make(spec)
        self.connections = nn.ModuleList(
            make_connection(site, dim, lambda port: norm(dim)) for site in sites
        )
        for number, (connection, sublayer) in enumerate(
            zip(self._sites(), self.sublayers, strict=False)
        ):
            _check_inputs(number, sublayer, connection)
        if any(connection.output_scale != 1 for connection in self._sites()):
            raise ValueError(
                f"Stack does not know the output projections of its sub-layers: leave output_scale "
                f"out of {make_connection} and scale their initial weights yourself"
            )
        self.recompute = recompute
        if recompute is not None:
            enable_recompute(self._sites(), recompute)

    def _sites(self) -> list[Connection[Any]]:
        # in quotes: torch.compile cannot trace a generic alias
        return cast("list[Connection[Any]]", list(self.connections))

    def forward(self, embedding: Tensor, **attention_options: Any) -> Tensor:
        """The hidden state after the final norm.

        Args:
            embedding: [B T D].
            attention_options: passed to every attention or parallel block, but to no MLP.

        Returns:
            [B T D].

        Raises:
            ValueError: `embedding` has another shape.
        """
        *sites, readout = self._sites()
        if embedding.dim() != 3 or embedding.shape[-1] != self.dim:
            raise ValueError(
                f"embedding must be [B T {self.dim}], got {format_shape(embedding.shape)}"
            )
        state = sites[0].init(embedding)
        for connection, sublayer in zip(sites, self.sublayers, strict=True):
            inputs, state = connection(state)
            options = {} if connection.ports == ("mlp",) else attention_options
            with recompute_inputs(inputs, state) if self.recompute else nullcontext():
                y = sublayer(*inputs, **options)
            state = connection.write(state, y)
        return readout.readout(state)


def _check_inputs(number: int, sublayer: nn.Module, connection: Connection[Any]) -> None:
    """Raise a ValueError for a sub-layer that does not take a connection's inputs by position."""
    try:
        inspect.signature(sublayer.forward).bind_partial(*connection.ports)
    except ValueError:  # it has no signature
        return
    except TypeError:
        raise ValueError(
            f"Stack: sub-layer {number}, a {type(sublayer).__name__}, is called with the inputs "
            f"{', '.join(connection.ports)} of {connection.name}, and its forward does not take "
            f"{len(connection.ports)}"
        ) from None
