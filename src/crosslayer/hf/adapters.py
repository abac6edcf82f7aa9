"""Make PEFT refuse adapter checkpoints that would lose trained connections, or need absent ones."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from ..connection import Connection
from .weights import is_connection_key


@functools.cache
def _register_with_peft() -> None:
    from peft import PeftModel

    # PEFT has no hook for what an adapter's checkpoint contains.
    saving_method = refuse_to_drop_connections(PeftModel.save_pretrained)
    PeftModel.save_pretrained = saving_method  # type: ignore[method-assign]
    loading_method = _refuse_other_connections(PeftModel.load_adapter)
    PeftModel.load_adapter = loading_method  # type: ignore[method-assign]


def register_with_imported_peft() -> None:
    """Let PEFT, if it is imported, refuse to save and to load adapters without the connections that
    were trained with them. Importing it takes seconds, so crosslayer does not.
    """
    if "peft" in sys.modules:
        _register_with_peft()


_OTHER_CONNECTIONS = (
    "the adapter was trained together with connections that this model does not have: connect the "
    "model as it was in the adapter's training, then load the adapter"
)


def refuse_to_drop_connections(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `save` so that it raises a ValueError where trained connections would be lost."""

    @functools.wraps(save)
    def refusing_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        dropped = _dropped_parameters(self, kwargs.get("state_dict"))
        if dropped:
            raise ValueError(
                f"a checkpoint of PEFT's would lack the trained connections, like {dropped[0]}: "
                "save the whole model, `model.merge_and_unload().save_pretrained(folder)`, or "
                "connect before get_peft_model and name the connections in modules_to_save"
            )
        return save(self, *args, **kwargs)

    return refusing_save


def _refuse_other_connections(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `load` so that it refuses an adapter of connections that its host lacks."""

    @functools.wraps(load)
    def refusing_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = load(self, *args, **kwargs)
        except (KeyError, RuntimeError) as error:
            if is_connection_key(str(error)):  # parameters of another connection
                raise ValueError(_OTHER_CONNECTIONS) from error
            raise
        if any(map(is_connection_key, result.unexpected_keys)):
            raise ValueError(_OTHER_CONNECTIONS)
        return result

    return refusing_load


def _dropped_parameters(model: Any, state_dict: dict[str, Any] | None) -> list[str]:
    """The connections' own parameters that are trained and that no adapter's checkpoint has."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, Connection) and "modules_to_save" not in name.split("."):
            parameters = module.named_parameters(name, recurse=False)
            names += [key for key, parameter in parameters if parameter.requires_grad]
    if not names:
        return []

    from peft import get_peft_model_state_dict

    for adapter in model.peft_config:
        # An adapter may be a copy of a module, with a connection in it.
        saved = get_peft_model_state_dict(model, state_dict, adapter, save_embedding_layers=False)
        names = [name for name in names if name not in saved]
    return names
