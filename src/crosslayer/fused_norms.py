"""Fusing the norm of a sub-layer's input into the op before it, where kernels run.

Only methods whose last op has a kernel or sums streams need this file: they are a
`FusedNormConnection`. Every other connection is a plain `Connection`. Post-norm and ResiDual, whose
streams pass the sub-layers' norms, take only the description of a norm from here.
"""

from typing import Any, ClassVar, Generic

import torch
from torch import Tensor, nn

from .class_swap import original_class
from .connection import Connection, StateT
from .method_checks import first_tensor
from .norms import NormSpec
from .ops.dispatch import uses_kernel

# The norms that kernels can fuse: the name of their eps, and whether they subtract the mean. They
# are known by their forward: a subclass may only add how it is initialised, as torchtitan's does.
_FUSABLE_NORMS: dict[Any, tuple[str, bool]] = {
    nn.RMSNorm.forward: ("eps", False),
    nn.LayerNorm.forward: ("eps", True),
}


class FusedNormConnection(Connection[StateT], Generic[StateT]):
    """A connection whose last op can apply the ports' norms in its kernel.

    A subclass implements `fused_read`. `mix_inputs` follows from it, and `mix_and_norm` chooses
    between the two.
    """

    # Whether it reads a sum of its streams. In float16 the sum may overflow, so it is normed before
    # it is rounded; a port's own norm would get the rounded sum.
    sums_streams: ClassVar[bool] = False
    # Whether this site's last op makes the ports' inputs.
    can_fuse_norms: bool = True

    def fused_read(
        self, state: StateT, norms: tuple[NormSpec, ...]
    ) -> tuple[tuple[Tensor, ...], StateT]:
        """`mix_inputs`, with norms applied.

        Args:
            state: of the method.
            norms: one for each input that it returns, or none at all.

        Returns:
            The inputs, [B T D] each, and the state to write to.
        """
        raise NotImplementedError(f"{type(self).__name__} needs fused_read")

    def mix_inputs(self, state: StateT) -> tuple[tuple[Tensor, ...], StateT]:
        return self.fused_read(state, ())

    def mix_and_norm(self, state: StateT) -> tuple[tuple[Tensor, ...], StateT]:
        first = first_tensor(state)
        norms_wide_sum = self.sums_streams and first.dtype == torch.float16
        norms = self.fused_norm_specs() if norms_wide_sum or uses_kernel(first) else ()
        if norms:
            return self.fused_read(state, norms)
        if norms_wide_sum and self._ports_share_input and (norms := self._port_norm_specs()):
            reads = [self.fused_read(state, (norm,)) for norm in norms]
            return tuple(inputs[0] for inputs, _ in reads), reads[-1][1]
        return super().mix_and_norm(state)

    def fused_norm_specs(self) -> tuple[NormSpec, ...]:
        """The norms of all ports; empty where ports may share an input, or one cannot be fused.

        Then all of them run as modules.
        """
        return () if self._ports_share_input else self._port_norm_specs()

    @property
    def _ports_share_input(self) -> bool:
        """Whether two ports with a norm each may read one tensor, as in a parallel block.

        It holds for MUDD's ways "qkv r" there too, although their mixtures differ.
        """
        return len(self.ports) > 1 and len(self.ports) == len(self.site.ports)

    def _port_norm_specs(self) -> tuple[NormSpec, ...]:
        """The norm of each port; empty where kernels cannot fuse them.

        This site's op may not make the inputs, `stream_dtype` may be set, or one of the norms may
        be of an unknown class.
        """
        if not self.can_fuse_norms or self.stream_dtype is not None:
            return ()
        specs = []
        for norm in self.norms:
            spec = norm_spec_of(norm)
            if spec is None:
                return ()
            specs.append(spec)
        return tuple(specs)


def resolve_host_norm(norm: Any) -> Any:
    """The host's norm that a module refers to by its method `host_norm_module`, or the module."""
    return norm.host_norm_module() if hasattr(norm, "host_norm_module") else norm


def norm_spec_of(norm: Any) -> NormSpec | None:
    """The norm as kernels take it; None where a kernel cannot replace the module.

    That is a norm with hooks, of an unknown class, or with a weight that is no parameter.
    """
    host = resolve_host_norm(norm)
    if _has_hooks(norm) or _has_hooks(host):
        return None
    eps_name, centred = _FUSABLE_NORMS.get(original_class(host).forward, ("", False))
    if _is_transformers_rms_norm(host):
        eps_name = "variance_epsilon"
    weight = getattr(host, "weight", None)
    if not eps_name or type(weight) is not nn.Parameter:
        return None
    eps = getattr(host, eps_name)
    if eps is None:  # PyTorch's default is that of the dtype it computes in
        eps = torch.finfo(torch.promote_types(weight.dtype, torch.float32)).eps
    return NormSpec(weight, getattr(host, "bias", None), eps, centred)


def stream_norm_spec(norm: Any) -> NormSpec | None:
    """A norm of streams as weights and eps; None where a host has no norm at this place.

    Raises:
        ValueError: the norm has hooks, is of a class that is not known, or its weight is no
            parameter.
    """
    if isinstance(resolve_host_norm(norm), nn.Identity):
        return None
    spec = norm_spec_of(norm)
    if spec is None:
        raise ValueError(f"expected an RMSNorm or a LayerNorm without hooks, got {norm}")
    return spec


def _has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its class's `forward`."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks) or "forward" in module.__dict__


def _is_transformers_rms_norm(norm: nn.Module) -> bool:
    """Whether it is an RMSNorm of transformers that multiplies by its weight.

    Those that multiply by something else, like Gemma's 1 + weight, call their eps otherwise.
    """
    cls = original_class(norm)
    return (
        cls.__module__.startswith("transformers.models.")
        and cls.__name__.endswith("RMSNorm")
        and hasattr(norm, "variance_epsilon")
    )
