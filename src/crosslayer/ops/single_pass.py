"""A site of n streams in one pass, for coefficients that are known before the pass begins.

`write_norm_project` and `width_connection` read and write the streams twice: the second needs
coefficients that the first computes. In a single-pass method a site mixes the streams with the
coefficients of the site before it, so both are one op.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..norms import NormSpec, apply_norm, inverse_rms, rms_norm, upcast_to_float32
from .dispatch import kernel_op
from .manual_backward import definition_gradients, run_function, separate_outputs
from .products import mix_streams, project_back, project_manual_grad, row_dots, stream_gram
from .streams import collapse_streams


@kernel_op
def single_pass_connection(
    H: Tensor,
    y: Tensor,
    beta: Tensor,
    res: Tensor | None,
    pre: Tensor,
    W: Tensor,
    eps: float = 1e-6,
    norm: NormSpec | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix the streams and add the pending write; read an input from them, and project their norm.

    H'_c = Σ_s res[s, c] H_s + beta_c y,   x = norm(Σ_c pre_c H'_c),   z = RMS(vec(H')) W

    Moves (2n + 2)·D elements a token, and W.

    Args:
        H: [B T n D].
        y: the pending write [B T D].
        beta: its weight in each stream, [B T n]; float32.
        res: [B T n n], rows the source; float32; None for the identity.
        pre: [B T n] float32.
        W: [nD K] float32.
        eps: of the RMS norm.
        norm: the norm of x; None for no norm.

    Returns:
        x [B T D] and H' [B T n D] in H's dtype, and z [B T K] float32.
    """
    x, written, z = run_function(_SinglePassConnection, H, y, beta, res, pre, W, eps)
    if norm is not None and H.dtype == torch.float16:
        return collapse_streams(written, pre, norm), written, z
    return apply_norm(x, norm), written, z


class _SinglePassConnection(Function):
    """g = dz r,   c = ⟨dz, z⟩ r²/nD,   G_c = dH'_c + pre_c dx + g W_cᵀ − c H'_c

    dH_s = Σ_c res[s, c] G_c,   dy = Σ_c β_c G_c,   dres[s, c] = ⟨H_s, G_c⟩,   dβ_c = ⟨y, G_c⟩
    dpre_c = ⟨dx, H'_c⟩,   dW = Σ_tokens vec(H')ᵀ g
    """

    @staticmethod
    def definition(
        H: Tensor,
        y: Tensor,
        beta: Tensor,
        res: Tensor | None,
        pre: Tensor,
        W: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixed = upcast_to_float32(H) if res is None else mix_streams(upcast_to_float32(H), res)
        written = torch.addcmul(mixed, beta[..., None], y[..., None, :]).to(H.dtype)
        x = mix_streams(written, pre[..., None]).squeeze(-2)
        return x, written, project_manual_grad(rms_norm(written.flatten(-2), eps), W)

    @staticmethod
    def forward(
        ctx: Any,
        H: Tensor,
        y: Tensor,
        beta: Tensor,
        res: Tensor | None,
        pre: Tensor,
        W: Tensor,
        eps: float,
    ) -> tuple[Tensor, ...]:
        ctx.eps = eps
        x, written, z = _SinglePassConnection.definition(H, y, beta, res, pre, W, eps)
        r = inverse_rms(upcast_to_float32(written).flatten(-2), eps)
        ctx.save_for_backward(H, y, beta, res, pre, W, written, z, r)
        return separate_outputs(x, written, z)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dwritten: Tensor, dz: Tensor) -> Any:
        H, y, beta, res, pre, W, written, z, r = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph
            inputs = (H, y, beta, res, pre, W, ctx.eps)
            return definition_gradients(_SinglePassConnection.definition, inputs, dx, dwritten, dz)
        v = upcast_to_float32(written).flatten(-2)
        g = dz * r[..., None]
        c = (dz * z).sum(-1, keepdim=True) * (r * r)[..., None] / len(W)
        G = project_back(g, W).addcmul_(c, v, value=-1).view(H.shape)
        G = G.addcmul_(pre[..., None], upcast_to_float32(dx)[..., None, :]).add_(dwritten)
        dW = (g.reshape(-1, g.shape[-1]).mT @ v.reshape(-1, v.shape[-1])).mT
        dy = mix_streams(G, beta[..., None]).squeeze(-2)
        dbeta = row_dots(y[..., None, :], G)
        dpre = row_dots(dx[..., None, :], written)
        dH = G
        dres = None
        if res is not None:
            dH = mix_streams(G, res.mT)
            dres = stream_gram(H, G)
        return dH.to(H.dtype), dy.to(y.dtype), dbeta, dres, dpre, dW, None
