"""What a host's backbone becomes when `connect` connects it."""

import inspect
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..connection import Connection
from ..partitioned import gathered_parameters
from ..recompute import map_pending_write
from .adapters import register_with_imported_peft
from .arguments import join_arguments, parameter_names
from .families import ModelWiring
from .hidden_states import HiddenStateRecorder, TravellingState, replace_captured, replace_recorded
from .host_norms import OwnedNorm, find_attribute
from .layers import ConnectedLayer, ReadoutNorm, make_readout
from .output_weights import scale_output_weights


class ConnectedModel:
    """The backbone, which owns the layers.

    transformers calls its `_init_weights` for parameters that a checkpoint lacks.
    """

    connection_spec: str  # the connection's name and options
    wiring: ModelWiring
    argument_names: tuple[str, ...]  # of the host's forward; none where it takes *args
    # vLLM lets the host's `__init__` decide whether to compile. It has run before `connect`.
    do_not_compile = True

    @property
    def use_nested_tensor(self) -> bool:
        """Tells `nn.TransformerEncoder` not to give padded batches to its layers as nested tensors,
        which connections do not take.
        """
        return False

    def __init_subclass__(cls) -> None:
        """Give the class of a connected host the signature of its host, which trainers read."""
        if "original" not in vars(cls):  # FSDP2 makes a subclass of it.
            return
        forward: Any = ConnectedModel.forward
        copied: Any = FunctionType(
            forward.__code__, forward.__globals__, "forward", None, forward.__closure__
        )
        signature = copied.__signature__ = inspect.signature(vars(cls)["original"].forward)
        cls.forward = copied  # type: ignore[method-assign]
        parameters = signature.parameters
        takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
        cls.argument_names = () if takes_any else parameter_names(parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        config: Any = getattr(self, "config", None)
        kwargs = join_arguments(self.argument_names, args, kwargs)
        args = args[len(self.argument_names) :]  # too many, which the host's forward tells
        is_asked = kwargs.get("output_hidden_states")
        if is_asked is None:  # which some heads pass
            is_asked = getattr(config, "output_hidden_states", False)
        is_of_transformers = isinstance(config, PreTrainedConfig)  # other flags are the model's own
        if not is_asked or not is_of_transformers:
            out = super().forward(*args, **kwargs)  # type: ignore[misc]
            self._check_attentions(out)
            return out
        return_dict = kwargs.pop("return_dict", None)
        if return_dict is None:
            return_dict = getattr(config, "return_dict", True)
        recorder = HiddenStateRecorder()
        out = super().forward(  # type: ignore[misc]
            *args, **kwargs, return_dict=True, hidden_state_recorder=recorder
        )
        if not hasattr(out, "hidden_states"):
            raise ValueError(
                f"output_hidden_states: {type(self).__name__} returns none, and what the model "
                "around it records are parts of a connection's state"
            )
        if out.hidden_states is not None:
            out.hidden_states = replace_recorded(self, out.hidden_states, out, recorder)
        else:  # Llama takes a None as False, whatever its config says.
            replace_captured(self, out, recorder)
        self._check_attentions(out)
        return out if return_dict else out.to_tuple()

    def _check_attentions(self, out: Any) -> None:
        """Raise a ValueError where transformers has recorded no attentions, as its hooks are on
        modules that a connected layer does not call.
        """
        attentions = getattr(out, "attentions", None)
        if not isinstance(attentions, tuple) or attentions:
            return
        config = getattr(self, "config", None)
        if getattr(config, "_attn_implementation", "eager") != "eager":
            return  # The others have no weights, connected or not.
        backbone: Any = self
        layer = self.wiring.find_layers(backbone)[0]
        for path in self.wiring.of_layers[0].opened_modules:
            module = layer.get_submodule(path)
            if module._forward_hooks:
                raise ValueError(
                    "output_attentions: transformers records what "
                    f"{type(module).__name__} returns, and a connected layer calls the modules "
                    "in it instead; disconnect the model to see its attentions"
                )

    def __setattr__(self, name: str, value: Any) -> None:
        """Let a module that replaces the final norm read out too, as SGLang's norms must.

        A wrapper around the norm, like PEFT's, calls it.
        """
        readout = vars(self).get("_modules", {}).get(name)
        super().__setattr__(name, value)
        if not isinstance(readout, ReadoutNorm) or not isinstance(value, nn.Module):
            return
        if all(module is not readout for module in value.modules()):
            make_readout(value, readout.connection)

    def _replicate_for_data_parallel(self) -> Any:
        raise ValueError(
            "nn.DataParallel cannot run a connected model, whose connections know their host's "
            "modules; use DistributedDataParallel (torchrun), or one device "
            "(CUDA_VISIBLE_DEVICES=0)"
        )

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """What PEFT calls to add its adapters, however late it is imported."""
        register_with_imported_peft()
        return super().named_modules(*args, **kwargs)  # type: ignore[misc]

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Let a host's checkpoint fill the norms that connections own, too."""
        modules = dict(self.named_modules())
        names = {module: name for name, module in modules.items()}
        for name, norm in modules.items():
            if not isinstance(norm, OwnedNorm):
                continue
            host_path = f"{names[norm.owner[0]]}.{norm.host_path}".lstrip(".")
            for key in norm.state_dict():  # type: ignore[attr-defined]
                host_key = f"{prefix}{host_path}.{key}"
                if host_key in state_dict:
                    # A clone, because `assign=True` makes parameters of the tensors themselves.
                    state_dict.setdefault(f"{prefix}{name}.{key}", state_dict[host_key].clone())
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]

    def _deepstack_process(self, hidden: Any, *args: Any) -> Any:
        """What Qwen3-VL adds to the stream after a layer joins that layer's last write."""
        add_to_stream = super()._deepstack_process  # type: ignore[misc]
        if not isinstance(hidden, TravellingState):
            return add_to_stream(hidden, *args)
        state = map_pending_write(lambda y: add_to_stream(y, *args), hidden.state)
        return hidden._replace(state=state, returned_state=hidden.state)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, OwnedNorm):
            self._init_owned_norm(module)
        elif isinstance(module, Connection):
            _reset_missing_parameters(module)
        else:
            super()._init_weights(module)  # type: ignore[misc]
            if isinstance(module, ConnectedLayer):  # transformers initialises what is in it first
                scale_output_weights([module], lambda weight: not _is_loaded(weight))

    def _init_owned_norm(self, norm: Any) -> None:
        """Copy from the host's norm what the checkpoint lacks, if the checkpoint has the host's
        norm.
        """
        host_norm = norm.find_host_norm()
        missing = [name for name, p in norm.named_parameters() if not _is_loaded(p)]
        if all(_is_loaded(find_attribute(host_norm, name)) for name in missing):
            norm.copy_from_host(missing)
        else:  # The host's norm is not initialised yet: the final norm comes after its submodules.
            super()._init_weights(norm)  # type: ignore[misc]


def _is_loaded(parameter: Tensor) -> bool:
    return getattr(parameter, "_is_hf_initialized", False)


def mark_as_initialised(new: nn.Module, host_module: nn.Module) -> None:
    """Tell transformers that a new module has its initial values, where the host has them too.

    A model that a connected model is put into initialises all modules that are not marked.
    """
    if getattr(host_module, "_is_hf_initialized", False):
        for module in new.modules():
            module._is_hf_initialized = True  # type: ignore[assignment]


@torch.no_grad()
def _reset_missing_parameters(connection: Connection[Any]) -> None:
    """Initialise the connection's parameters but those that transformers has loaded."""
    parameters = dict(connection.named_parameters(recurse=False))
    with gathered_parameters(parameters.values(), changes=True):
        loaded = {name: p.detach().clone() for name, p in parameters.items() if _is_loaded(p)}
        connection.reset_parameters()
        for name, value in loaded.items():
            parameters[name].copy_(value)
