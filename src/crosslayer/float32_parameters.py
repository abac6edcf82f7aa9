"""Parameters that are used in float32, whoever has cast them, and their initial values."""

import functools
import hashlib
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from .sites import Site
from .validation import HALF_DTYPES


class Float32Parameters(nn.Module):
    """A module whose own parameters stay float32, or wider, in a model of half precision.

    Its child modules are cast as usual. Where others have cast the own parameters, like FSDP's
    mixed precision or a loader, attributes return them in float32.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "reset_parameters" in vars(cls):
            of_class: Any = cls
            of_class.reset_parameters = _reset_in_float32(of_class.reset_parameters)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, Tensor) and value.dtype in HALF_DTYPES:
            return value.float()
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # `FullyShardedDataParallel` puts plain tensors in the place of parameters, as attributes
        # that `__getattr__` does not see.
        is_parameter = isinstance(value, nn.Parameter)
        if isinstance(value, Tensor) and not is_parameter and value.dtype in HALF_DTYPES:
            value = value.float()
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add or replace a parameter. In place of a frozen one it is frozen, too.

        transformers replaces all parameters of a model that it loads by ones that learn.
        """
        replaced = self._parameters.get(name)
        if replaced is not None and param is not None and not replaced.requires_grad:
            param.requires_grad_(False)
        super().register_parameter(name, param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `model.bfloat16()` casts the norms, which belong to the host; the own parameters stay
        # float32, where nothing else has cast them.
        def apply_in_float32(t: Tensor) -> Tensor:
            new = fn(t)
            casts_down = new.dtype in HALF_DTYPES and t.dtype not in HALF_DTYPES
            return t.to(new.device, torch.float32) if casts_down else new

        if recurse:
            for name, child in self.named_children():
                # torch.nn.utils.parametrize moves own parameters into this child
                child._apply(apply_in_float32 if name == "parametrizations" else fn)
        return super()._apply(apply_in_float32, recurse=False)


def _reset_in_float32(reset_parameters: Callable[[Any], None]) -> Callable[[Any], None]:
    """Let a reset reach parameters that others have cast, of which `__getattr__` returns copies."""

    @functools.wraps(reset_parameters)
    def reset(connection: Any) -> None:
        copies = {
            name: parameter.detach().float()
            for name, parameter in connection._parameters.items()
            if parameter is not None and parameter.dtype in HALF_DTYPES
            if name not in vars(connection)  # within the reset of a subclass
        }
        vars(connection).update(copies)
        try:
            reset_parameters(connection)
        finally:
            for name in copies:
                del vars(connection)[name]
        with torch.no_grad():
            for name, copy in copies.items():
                connection._parameters[name].copy_(copy)

    return reset


def float32_parameter(*shape: int) -> nn.Parameter:
    """An uninitialised connection parameter: float32, or float64 if that is torch's default.

    Raises:
        TypeError: the shape has no dimension.
    """
    if not shape:
        raise TypeError("FSDP cannot shard a parameter without a dimension: float32_parameter(1)")
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    return nn.Parameter(torch.empty(*shape, dtype=dtype))


@torch.no_grad()
def assign_value(parameter: Any, value: Tensor | list[Any] | float) -> None:
    """Set a parameter in place. Of one that FSDP2 has sharded, each rank sets its shard.

    Args:
        parameter: of any device; nothing happens on the meta device.
        value: of the whole parameter's shape, or one that is expanded to it, such as a number.
    """
    value = torch.as_tensor(value, dtype=parameter.dtype, device=parameter.device)
    value = value.expand(parameter.shape)
    if hasattr(parameter, "placements"):  # a DTensor, whose module takes a while to import
        from torch.distributed.tensor import distribute_tensor

        # all ranks have the value, so none sends it
        mesh = parameter.device_mesh
        placements = parameter.placements
        value = distribute_tensor(value, mesh, placements, src_data_rank=None)
    parameter.copy_(value)


@torch.no_grad()
def assign_normal(parameter: Tensor, std: float, site: Site, name: str = "") -> None:
    """Fill with N(0, std²), seeded by torch's seed, the site and the name.

    The global random state does not change.

    Args:
        parameter: of any device; nothing happens on the meta device.
        std: the standard deviation.
        site: the site of the parameter's connection.
        name: tells apart the parameters of one site, which would get equal numbers otherwise.
    """
    if parameter.is_meta:
        return
    # a digest, not a sum: site 2 with seed 0 is not site 0 with seed 2
    seeded_by = f"{torch.initial_seed()} {site.index} {name}".rstrip()
    digest = hashlib.sha256(seeded_by.encode()).digest()
    seed = int.from_bytes(digest[:8], "little", signed=True)
    generator = torch.Generator(parameter.device).manual_seed(seed)
    value = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    assign_value(parameter, value.normal_(std=std, generator=generator))
