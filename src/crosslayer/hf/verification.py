"""Verification of a wiring, before `connect` changes a model: connected with the residual
connection that it has already, pre-norm or post-norm, a layer must compute the same as before.

One layer of each kind runs twice as a shadow (see `shadow.py`), by its host's own code and as a
connected layer, with the same smooth functions in place of its modules. Output and gradient must be
the same. Then a shadow of the backbone runs, which must hand each layer's output to the next one
and the last one's to the final norm, unchanged.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves

from ..class_swap import original_class
from ..spec import make
from .arguments import (
    LayerArgument,
    arguments_as_read,
    constant_arguments,
    forward_parameters,
    name_arguments,
    residual_argument,
    second_streams,
)
from .attach import attach_connections
from .families import (
    ArgumentProduct,
    LayerWiring,
    ModelWiring,
    Sublayer,
    own_connection,
)
from .function_calls import FunctionMode, Observer
from .hidden_states import TravellingState, find_token_slice
from .host_norms import find_attribute
from .layer_recognition import recognise_layer
from .layers import first_output
from .recognition import layer_kind
from .shadow import make_layer_shadow
from .shadow_runs import ChangedStreamError, run_backbone_shadow, run_layer_shadow

_TOKENS = 2
_TOLERANCE = 1e-6  # relative; in float64, but some hosts add to their stream in float32


def verify_wiring(model: Any, backbone: Any, wiring: ModelWiring) -> None:
    """Raise a ValueError unless the wiring gives the host's own function.

    Args:
        model: whose part the backbone is, or the backbone itself.
        backbone: the module that owns the layers, not connected.
        wiring: of its family's row, or recognised.

    Raises:
        ValueError: with its own residual connection, a layer computes something else than its host,
            or the backbone changes the stream between layers. The message says what the layer does.
    """
    verified = set()
    for number, (layer, layer_wiring) in enumerate(wiring.wired_layers(backbone)):
        kind = (layer_kind(layer), layer_wiring)
        if kind in verified or layer_wiring.condition is not None:
            continue
        verified.add(kind)
        try:
            with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
                difference = _layer_difference(layer, layer_wiring, wiring.dim)
        except ValueError as error:
            name = type(layer).__name__
            raise ValueError(f"connect cannot connect layer {number} ({name}): {error}") from None
        if not difference <= _TOLERANCE:
            own = own_connection(layer_wiring)
            raise ValueError(
                f"connect would change what layer {number} ({type(layer).__name__}) computes: "
                f"relative difference {difference:.2g} under {own}. Its wiring was taken to be\n"
                f"{_format_wiring(layer_wiring)}\n"
                f"{_describe_actual(layer, layer_wiring, wiring.dim)}"
            )
    if not next(backbone.parameters()).is_meta:
        _check_backbone(*_find_runner(model, backbone, wiring))


def _find_runner(model: Any, backbone: Any, wiring: ModelWiring) -> tuple[Any, ModelWiring]:
    """The module whose forward runs the layers, with its wiring: the backbone, or what contains it.

    nanoGPT's layers are in an `nn.ModuleDict`, which has no forward.
    """
    path = next((path for path, module in model.named_modules() if module is backbone), "")
    runner = backbone
    while path and not _has_forward(runner):
        path, _, name = path.rpartition(".")
        runner = model.get_submodule(path)
        final = None if wiring.final is None else f"{name}.{wiring.final}"
        wiring = wiring._replace(layers=f"{name}.{wiring.layers}", final=final)
    return runner, wiring


def _has_forward(module: nn.Module) -> bool:
    return original_class(module).forward is not nn.Module.forward


def _phase(name: str) -> int:
    """A number of a module's path or an argument's name. Other names have other ones, mostly."""
    return sum(place * ord(char) for place, char in enumerate(name, start=1))


class _Functions(Observer):
    """Answers the calls of a layer's modules with smooth functions of their inputs."""

    def __init__(self, width: int):
        generator = torch.Generator().manual_seed(0)
        shape = (1, _TOKENS, width)
        self.stream = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        self.arguments: dict[str, dict[str, Any]] = {}

    def answer(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Tensor:
        named = name_arguments(module, args, kwargs)
        x = named.pop(next(iter(named)))
        of_layer = {k: v for k, v in named.items() if isinstance(v, LayerArgument)}
        self.arguments[path] = of_layer | constant_arguments(module, named)
        residual = named.get(residual_argument(module), 0)
        return torch.sin(2 * x.double() + _phase(path)) + residual

    def drop_out(self, x: Tensor, p: float) -> Tensor:
        return torch.sin(x.double() + p)

    def multiply(self, x: Tensor, product: ArgumentProduct) -> Tensor:
        return torch.sin(x.double() + _phase(product.argument))


def _layer_difference(layer: nn.Module, wiring: LayerWiring, width: int) -> float:
    """The largest relative difference of output and gradient; infinite for other arguments."""
    arguments = arguments_as_read(layer, wiring.unread_values)
    opened = wiring.opened_modules
    lengths: dict[str, int] = {}
    host, returned = run_layer_shadow(layer, lambda: _Functions(width), arguments, lengths, opened)
    expected = first_output(returned).as_subclass(Tensor)
    functions = _Functions(width)
    shadow = make_layer_shadow(layer, functions, lengths, opened=opened)
    actual = _run_connected(shadow, wiring, functions, arguments)
    for path, received in host.arguments.items():
        connected = functions.arguments.get(path, {})
        for name, value in received.items():
            if name not in connected or repr(connected[name]) != repr(value):
                return float("inf")
    weight = torch.linspace(-1, 1, actual.numel(), dtype=torch.float64).view_as(actual)
    gradients = [
        torch.autograd.grad((output * weight).sum(), stream)[0]
        for output, stream in ((actual, functions.stream), (expected, host.stream))
    ]
    differences = (_relative_difference(actual, expected), _relative_difference(*gradients))
    return torch.stack(differences).max().item()  # NaN where one is NaN


def _run_connected(
    shadow: Any, wiring: LayerWiring, functions: _Functions, arguments: dict[str, Any]
) -> Tensor:
    """Connect a layer's shadow with the residual connection that it has, and run it.

    Returns:
        The hidden state after it.
    """
    anchor = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    shadow.register_parameter("anchor", anchor)  # tells connections their device and dtype
    backbone: Any = nn.Module()
    backbone.register_parameter("anchor", anchor)
    backbone.layers = nn.ModuleList([shadow])
    backbone.norm = nn.Identity()
    model_wiring = ModelWiring("layers", "norm", functions.stream.shape[-1], (wiring,))
    attach_connections(backbone, model_wiring, make(own_connection(wiring)), None)
    with FunctionMode(functions):
        outputs = backbone.layers[0](functions.stream, **arguments)
    hidden = outputs if isinstance(outputs, TravellingState) else outputs[0]
    hidden_state = backbone.norm(hidden, verb="hidden_state")
    if wiring.last_norm:
        hidden_state = find_attribute(shadow, wiring.last_norm)(hidden_state)
    return hidden_state


def _relative_difference(actual: Tensor, expected: Tensor) -> Tensor:
    return (actual - expected).norm() / expected.norm()


# What a host may ask of a `TravellingState`.
_READABLE = [getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape")]


class _Travelling(Tensor):
    """Stands for the state that travels between connected layers: a host can only pass it on."""

    after: str  # the path of the layer that returned it

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__getitem__ and find_token_slice(args[1]) is not None:
            return args[0]
        if func in _READABLE:
            return super().__torch_function__(func, types, args, kwargs)
        name = str(resolve_name(func)).removesuffix(".__get__")
        arguments = tree_leaves((args, kwargs))
        after = next(value.after for value in arguments if isinstance(value, cls))
        raise ChangedStreamError(f"it reads or changes the stream after {after} ({name})")


class _Handover(Observer):
    """Answers the calls of a backbone's layers and final norm, and checks what they get."""

    def __init__(self, backbone: nn.Module, wiring: ModelWiring):
        self.wiring = wiring
        self.numbers = {path: i for i, path in enumerate(wiring.layer_paths(backbone))}
        self.embedding: Tensor | None = None
        self.handed_over: Tensor | None = None
        self.layers_run = 0

    def answer(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        x = next(iter(name_arguments(module, args, kwargs).values()))
        if self.embedding is None and path == self.wiring.final:  # before the layers, too
            return x
        if self.embedding is None:
            self.embedding = x
        elif x is not self.handed_over:
            raise ChangedStreamError(f"it reads or changes the stream before {path}")
        number = self.numbers.get(path)
        if number is not None:
            self._check_order(number, path)
        ends = path == self.wiring.final
        if self.wiring.final is None and number == len(self.numbers) - 1:
            ends = True
        self.handed_over = torch.randn_like(self.embedding)
        if not ends:
            travelling = self.handed_over.as_subclass(_Travelling)
            travelling.after = path
            self.handed_over = travelling
        extras = None if number is None else self.wiring.of_layers[number].extras
        return self.handed_over if extras is None else (self.handed_over, *[None] * len(extras))

    def _check_order(self, number: int, path: str) -> None:
        if number != self.layers_run:
            before = f"layer {self.layers_run - 1}" if self.layers_run else "the embedding"
            raise ChangedStreamError(
                f"it runs {path} after {before}, and a connection needs each layer once, in order"
            )
        self.layers_run += 1


def _check_backbone(backbone: Any, wiring: ModelWiring) -> None:
    """Raise a ValueError where the backbone uses the stream between its layers.

    A backbone that does not run on two token ids, one image or hidden states alone is not checked
    here. What it does to the stream, and another order of its layers, then raises an error in its
    first forward.
    """
    device = next(backbone.parameters()).device
    devices = [device] if device.type == "cuda" else []
    replaced = [path for path in (wiring.layers, wiring.final) if path is not None]
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices),
        device,
        _restored_state(backbone, wiring.layers),
    ):
        try:
            inputs = _make_inputs(backbone, wiring.dim)
            features = _make_image_features(backbone, wiring.dim)
            handover, _ = run_backbone_shadow(
                backbone, lambda: _Handover(backbone, wiring), inputs, features, replaced
            )
            if handover.layers_run < len(wiring.of_layers):
                raise ChangedStreamError(
                    f"it runs {handover.layers_run} of its {len(wiring.of_layers)} layers"
                )
        except ChangedStreamError as error:
            raise ValueError(f"connect cannot connect {type(backbone).__name__}: {error}") from None
        except ValueError:
            return


@contextmanager
def _restored_state(backbone: nn.Module, layers: str) -> Iterator[None]:
    """Restore the buffers and the attributes of modules outside the layers, which a forward may
    change: BatchNorm's statistics, or the longest input that a dynamic RoPE has seen.
    """
    modules = [
        module
        for path, module in backbone.named_modules()
        if not f"{path}.".startswith(f"{layers}.")
    ]
    attributes = [vars(module).copy() for module in modules]
    buffers = [
        (module, name, buffer, buffer.clone(), buffer._version)
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_inference() and not buffer.is_meta
    ]
    try:
        yield
    finally:
        for module, before in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(before)
        for module, name, buffer, value, version in buffers:
            module._buffers[name] = buffer
            if _has_changed(buffer, value, version):
                buffer.copy_(value)


def _has_changed(buffer: Tensor, before: Tensor, version: int) -> bool:
    """Batch norm changes its running statistics without a new version."""
    is_statistic = buffer.is_floating_point() and buffer.itemsize > 1
    return buffer._version != version or (is_statistic and not torch.equal(buffer, before))


def _make_inputs(backbone: Any, width: int) -> list[Tensor]:
    """What a backbone's forward takes first: token ids, an image, its patches or hidden states."""
    dtype = next(backbone.parameters()).dtype
    _, first, *others = forward_parameters(backbone)
    config: Any = getattr(backbone, "config", None)
    channels = getattr(config, "num_channels", getattr(config, "in_channels", 3))
    if others[:1] == ["grid_thw"]:
        side = 2 * getattr(config, "spatial_merge_size", 1)
        values = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
        return [torch.randn(side**2, values, dtype=dtype), torch.tensor([[1, side, side]])]
    if first in ("hidden_states", "inputs_embeds"):
        return [torch.randn(1, _TOKENS, width, dtype=dtype)]
    if first == "pixel_values":
        size = getattr(config, "image_size", 0)
        sides = (size, size) if isinstance(size, int) else size
        return [torch.randn(1, channels, *sides, dtype=dtype)]
    return [torch.zeros(1, _TOKENS, dtype=torch.long)]


def _make_image_features(backbone: Any, width: int) -> dict[str, Any]:
    """The arguments of a language model's forward that join the stream before a layer."""
    if "deepstack_features" not in forward_parameters(backbone):
        return {}
    return {  # before the second layer, as Granite 4 Vision has it
        "deepstack_features": {1: torch.zeros(_TOKENS, width)},
        "vision_mask": torch.ones(1, _TOKENS, width, dtype=torch.bool),
    }


def _format_wiring(wiring: LayerWiring) -> str:
    """A wiring as text, a line for each sub-layer."""
    lines = []
    if wiring.embedding_norm:
        lines.append(f"    before them: embedding_norm={wiring.embedding_norm!r}")
    if wiring.stream_factor:
        lines.append(f"    after them: stream_factor={wiring.stream_factor!r}")
    for number, site in enumerate(wiring.sites):
        for sublayer in site:
            lines.append(f"    site {number}: {_format_sublayer(sublayer)}")
    return "\n".join(lines)


def _format_sublayer(sublayer: Sublayer) -> str:
    """A sub-layer as in a row: what differs from the defaults."""
    names = ("after", "scale", "input_scale")
    defaults = Sublayer._field_defaults
    options = [
        f", {n}={getattr(sublayer, n)!r}" for n in names if getattr(sublayer, n) != defaults[n]
    ]
    return f"Sublayer({sublayer.module!r}, norm={sublayer.norm!r}{''.join(options)})"


def _describe_actual(layer: nn.Module, assumed: LayerWiring, width: int) -> str:
    """What the layer's own code does, as a row or as the reason why there is none."""
    arguments = arguments_as_read(layer, assumed.unread_values)
    attends_encoder = not arguments.keys().isdisjoint(second_streams(layer))
    try:
        wiring = recognise_layer(layer, width, attends_encoder)
    except ValueError as error:
        return f"It cannot be connected: {error}."
    return (
        f"Its own code does\n{_format_wiring(wiring)}\nWrite its row so, or remove the row: "
        "connect recognises this wiring without one. verify=False connects it as the row says."
    )
