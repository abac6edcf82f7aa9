"""Runs of shadows: a class's own forward, with stand-ins for the modules that it calls."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..class_swap import original_class
from .arguments import COMPUTES_WITH_ARGUMENTS, LayerArgument, LayerSwitch
from .function_calls import FunctionMode
from .shadow import FIRST_VALUES, OtherOutput, ShadowValues, make_backbone_shadow, make_layer_shadow


class ChangedStreamError(ValueError):
    """A backbone does something to the stream between two of its modules."""


class SeveralStreamsError(ValueError):
    """A module gets the stream in more than one argument."""

    def __init__(self, path: str, argument: str):
        super().__init__(f"{path} gets more of the stream, as its argument {argument!r}")
        self.path = path


def _forward_encoder_layer(
    layer: Any,
    src: Tensor,
    src_mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: Any = False,
) -> Tensor:
    """What `nn.TransformerEncoderLayer` computes, without its fused path and its checks of masks,
    which its attention makes again.
    """

    def attend(x: Tensor) -> Tensor:
        y: Tensor = layer._sa_block(x, src_mask, src_key_padding_mask, is_causal=is_causal)
        return y

    if layer.norm_first:
        x = src + attend(layer.norm1(src))
        return x + layer._ff_block(layer.norm2(x))
    x = layer.norm1(src + attend(src))
    return layer.norm2(x + layer._ff_block(x))


# What is read in place of a class's own forward.
_READ_FORWARDS: dict[Any, Any] = {nn.TransformerEncoderLayer.forward: _forward_encoder_layer}


def run_layer_shadow(
    layer: nn.Module,
    make_observer: Callable[[], Any],
    arguments: Mapping[str, Any],
    lengths: dict[str, int],
    opened: Collection[str],
    values: ShadowValues = FIRST_VALUES,
    training: bool = False,
) -> tuple[Any, Any]:
    """Run a layer's forward with stand-ins for its modules, on the observer's `stream`.

    Args:
        layer: a layer of a host.
        make_observer: makes an `Observer`. The forward is run again where it unpacks a stand-in's
            output into another number of names than expected.
        arguments: of the forward besides the stream, by name.
        lengths: into how many names stand-ins' outputs are unpacked, by path. A run adds what it
            finds, so the next one with the same dict need not be run again.
        opened: paths of the modules that run their own code, with stand-ins for their modules.
        values: those of the stream, and of parameters and buffers.
        training: as in `nn.Module`, of the layer and of those opened.

    Returns:
        The observer, and what the forward returned.

    Raises:
        ValueError: the forward raises an error with stand-ins, or it sets an attribute of the layer
            or of one of its modules.
    """

    def run(shadow: Any, observer: Any, forward: Any) -> Any:
        attributes = _attributes(shadow)
        output = forward(shadow, observer.stream, **arguments)
        _check_attributes(attributes, _attributes(shadow))
        return output

    make = partial(make_layer_shadow, layer, opened=opened, values=values, training=training)
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        return _run_until_unpacked(layer, make, make_observer, run, lengths, training)


def run_backbone_shadow(
    backbone: nn.Module,
    make_observer: Callable[[], Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    replaced: Collection[str],
) -> tuple[Any, Any]:
    """Run a backbone's forward with stand-ins for some of its modules.

    Args:
        backbone: the module that owns the layers.
        make_observer: as in `run_layer_shadow`.
        args, kwargs: of the forward.
        replaced: paths of the modules that stand-ins replace.

    Returns:
        The observer, and what the forward returned.

    Raises:
        ValueError: the forward raises an error with stand-ins.
    """

    def run(shadow: Any, observer: Any, forward: Any) -> Any:
        return forward(shadow, *args, **kwargs)

    make = partial(make_backbone_shadow, backbone, replaced=replaced)
    with torch.inference_mode(False):
        # Modules that it shares with the shadow stay in the mode that they are in.
        return _run_until_unpacked(backbone, make, make_observer, run, {}, training=None)


def _run_until_unpacked(
    module: nn.Module,
    make: Callable[[Any, dict[str, int]], Any],
    make_observer: Callable[[], Any],
    run: Callable[[Any, Any, Any], Any],
    lengths: dict[str, int],
    training: bool | None,
) -> tuple[Any, Any]:
    """Run until each stand-in's output is unpacked into as many names as the forward has.

    run: gets the shadow, its observer and the class's forward.
    training: of `FunctionMode`.
    """
    forward: Any = original_class(module).forward
    forward = _READ_FORWARDS.get(forward, forward)
    tried: set[tuple[str, int]] = set()  # lengths by path
    while True:
        observer = make_observer()
        shadow = make(observer, lengths)
        own = {**shadow._buffers, **shadow._parameters}
        observer.parameters = {n: t for n, t in own.items() if t is None or t.is_floating_point()}
        observer.unpacked = ""
        try:
            with FunctionMode(observer, training):
                output = run(shadow, observer, forward)
        except (ChangedStreamError, SeveralStreamsError):
            raise
        except Exception as error:
            path = observer.unpacked
            match = re.search(r"values to unpack \(expected (\d+)", str(error))
            length = int(match[1]) if match else 0
            # A module may be unpacked into two numbers of names by turns.
            if not match or (path, length) in tried:
                raise ValueError(_describe_failure(error)) from error
            tried.add((path, length))
            lengths[path] = length
            continue
        return observer, output


def _attributes(shadow: nn.Module) -> dict[str, Any]:
    """What tells whether an attribute, a parameter or a buffer is set or changed in place."""
    return {
        f"{path}.{name}".lstrip("."): (id(value), getattr(value, "_version", 0), _items(value))
        for path, module in shadow.named_modules()
        for name, value in {**vars(module), **module._buffers, **module._parameters}.items()
    }


def _items(value: Any) -> list[int]:
    """The identities of what a list, a set or a dict has; none of anything else."""
    if isinstance(value, dict):
        return [id(item) for item in value.values()]
    if isinstance(value, list | set):
        return [id(item) for item in value]
    return []


def _check_attributes(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise a ValueError where an attribute has changed."""
    for name in before | after:
        if before.get(name) != after.get(name):
            raise ValueError(
                f"its own code sets {name}, and a connected layer runs its modules alone; set it "
                "in one of them"
            )


def _describe_failure(error: Exception) -> str:
    """Why a forward cannot run with stand-ins."""
    reason = str(error).split("\n")[0]
    if isinstance(error, ValueError) and "values to unpack" not in reason:
        return reason
    if LayerArgument.__name__ in reason or LayerSwitch.__name__ in reason:
        return COMPUTES_WITH_ARGUMENTS
    if OtherOutput.__name__ in reason:
        return (
            "its own code computes with further outputs of modules, where most layers pass them on"
        )
    return f"its own code does more than to call its modules ({type(error).__name__}: {reason})"
