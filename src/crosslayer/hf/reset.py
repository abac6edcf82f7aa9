"""Set the connections of a model to their initial values, once the model itself has its own."""

from torch import nn

from ..connection import find_connections
from ..partitioned import gathered_parameters
from .host_norms import OwnedNorm
from .layers import ConnectedLayer
from .output_weights import scale_output_weights


def reset_connections(model: nn.Module) -> None:
    """Set all parameters of a model's connections to their initial values, in place.

    For a model of your own that was connected on the meta device, or whose weights you initialise
    after `connect`. Call it once, right after the model's own initialisation: the norms that a
    connection owns, of k and v for example, are copies of the model's, and `output_scale`
    multiplies the model's weights. `init_weights` of a model of transformers does all of this.

    Args:
        model: connected. FSDP2 may have sharded it, the connections included.

    Raises:
        ValueError: the model has no connections, or parameters on the meta device.
    """
    connections = find_connections(model)
    if not connections:
        raise ValueError("the model has no connections to reset; call crosslayer.connect first")
    on_meta = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if on_meta is not None:
        raise ValueError(
            f"{on_meta} is on the meta device; call model.to_empty(device=…) and initialise the "
            "model first"
        )
    for connection in connections:
        with gathered_parameters(connection.parameters(recurse=False), changes=True):
            connection.reset_parameters()
        for norm in connection.norms:
            if isinstance(norm, OwnedNorm):
                tensors = (*norm.named_parameters(), *norm.named_buffers())
                norm.copy_from_host([name for name, _ in tensors])
    scale_output_weights(m for m in model.modules() if isinstance(m, ConnectedLayer))
