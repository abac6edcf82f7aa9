"""What a connection's read depends on besides its state, for the backward pass of `recompute`."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from .connection import Connection
from .method_checks import method_name
from .ops import dispatch


class ForwardConditions:
    """What a connection's read depended on in the forward pass, besides the state."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.kernel_devices = dispatch.kernel_devices
        self.parameters = {
            name: (parameter, parameter._version, parameter.requires_grad)
            for name, parameter in _registered_parameters(connection)
        }

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore what can be restored, for a read in the backward pass.

        Raises:
            RuntimeError: a parameter has changed since.
        """
        parameters = dict(_registered_parameters(self.connection))
        for name, (parameter, version, _) in self.parameters.items():
            # FSDP2 puts others in the places of a norm's weights while the norm runs
            is_other = parameters.get(name) is not parameter and not name.startswith("norms.")
            if is_other or parameter._version != version:
                raise RuntimeError(
                    f"{name} of {site_name(self.connection)} has changed since the forward pass, "
                    "and recompute needs it unchanged in the backward pass"
                )
        devices = dispatch.kernel_devices
        requires_grad = {name: parameter.requires_grad for name, parameter in parameters.items()}
        try:
            dispatch.kernel_devices = self.kernel_devices
            for parameter, _, required_grad in self.parameters.values():
                parameter.requires_grad_(required_grad)
            yield
        finally:
            dispatch.kernel_devices = devices
            for name, parameter in parameters.items():
                parameter.requires_grad_(requires_grad[name])


def _registered_parameters(connection: Connection) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a connection and of the norms that it owns, by name.

    `functional_call` has tensors in their places.
    """
    for path, module in connection.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{path}.{name}".lstrip("."), parameter


def is_called_functionally(connection: Connection) -> bool:
    """Whether plain tensors are in the places of parameters, which go after the forward pass.

    `torch.func.functional_call` and `FullyShardedDataParallel` put them there, the latter as
    attributes if `use_orig_params=False`.
    """
    for value in vars(connection).values():
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return not all(isinstance(p, nn.Parameter) for _, p in _registered_parameters(connection))


def site_name(connection: Connection) -> str:
    """What messages call a site."""
    return f"{method_name(connection)}, {connection.site.place}"
