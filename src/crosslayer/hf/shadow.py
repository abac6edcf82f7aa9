"""A module without its weights: a copy of it, with stand-ins for the modules that it calls.

What a layer does with its stream does not depend on what its modules compute. A shadow of a layer
runs the class's own `forward` and shares nothing with the layer but plain values, so looking at a
layer costs milliseconds at any size, on any device, meta included, and changes nothing.
"""

from collections.abc import Callable, Collection
from types import CellType, FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..class_swap import original_class, swapped_class
from ..partitioned import parameter_shape
from .arguments import name_arguments
from .families import ExtraOutput
from .function_calls import Observer
from .projections import is_norm

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
# What a shadow has of a module: a stand-in, a copy with stand-ins in it, or the module itself.
Treatment = Literal["stand in", "open", "share"]
# Outputs of a stand-in whose caller does not unpack them into names: more than any module has.
MOST_OUTPUTS = 16


class ShadowValues(NamedTuple):
    """The values with which a shadow of a layer runs."""

    shape: tuple[int, int] = (1, 2)  # sequences, tokens
    stream_size: float = 1.0  # of the stream and of what modules return
    # What multiplies the layer's own parameters and buffers, which then have random signs. None
    # leaves them near 1.
    parameter_factor: float | None = None


FIRST_VALUES = ShadowValues()


class OtherOutput:
    """Stands for an output of a module after its first one."""

    def __init__(self, output: ExtraOutput):
        self.output = output

    def __repr__(self) -> str:
        return f"{self.output.module}(…)[{self.output.position}]"


class StandIn:
    """A module whose calls are answered from outside."""

    observer: Observer
    path: str
    lengths: dict[str, int]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        if not is_norm(self.path, module):
            return self._answer(args, kwargs)
        named = name_arguments(module, args, kwargs)
        if named.pop("prenorm", None) is not True:
            return self._answer(args, kwargs)
        # The norms of flash-attn, mamba_ssm and fla add a residual first, and return the sum too.
        total = named.pop(next(iter(named)))
        residual = named.pop("residual", None)
        if residual is not None:
            total = total + residual
        return self._answer((total,), named), total

    def _answer(self, args: Any, kwargs: Any) -> Any:
        answer: Any = self.observer.answer(self.path, self, args, kwargs)  # type: ignore[arg-type]
        if type(answer) is not Tensor:
            return answer
        output: Any = answer.as_subclass(_Output)
        output.observer = self.observer
        output.path = self.path
        output.length = self.lengths.get(self.path, MOST_OUTPUTS)
        return output


class _Output(Tensor):
    """What a stand-in returns: a tensor, or a tuple with the tensor first, as the caller likes."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    observer: Observer
    path: str
    length: int

    def __iter__(self) -> Any:
        self.observer.unpacked = self.path
        return iter(self._as_tuple())

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice | int):
            return super().__getitem__(index)
        bounds = (index.start, index.stop) if isinstance(index, slice) else (index,)
        if self.length == MOST_OUTPUTS and any(bound is not None and bound < 0 for bound in bounds):
            raise ValueError(
                f"its own code counts the outputs of {self.path} from the last one, and their "
                "number may differ"
            )
        outputs = self._as_tuple()[index]
        if not isinstance(index, slice):
            return outputs
        self.observer.unpacked = self.path  # by whoever unpacks a tuple with these
        return _Outputs(outputs)

    def _as_tuple(self) -> tuple[Any, ...]:
        others = [OtherOutput(ExtraOutput(self.path, i)) for i in range(1, self.length)]
        return (self.as_subclass(Tensor), *others)


class _Outputs(tuple):
    """Some outputs of a module, which a forward may add to a tuple or to a list."""

    __slots__ = ()

    def __radd__(self, first: Any) -> Any:
        return type(first)([*first, *self])


def make_layer_shadow(
    layer: nn.Module,
    observer: Observer,
    lengths: dict[str, int],
    opened: Collection[str],
    values: ShadowValues = FIRST_VALUES,
    training: bool = False,
) -> Any:
    """A layer of the same class with stand-ins for its modules, except for those that are opened.

    Its own parameters and buffers are random, and require gradients. So are those of modules that
    are opened.

    Args:
        layer: of a host.
        observer: answers the calls of the stand-ins.
        lengths: into how many names a stand-in's output is unpacked, by path; any other has
            `MOST_OUTPUTS`.
        opened, values, training: as in `run_layer_shadow`.
    """

    def treat(path: str, child: nn.Module) -> Treatment:
        is_opened = path in opened or isinstance(child, _CONTAINERS)
        return "open" if is_opened else "stand in"

    shared = {"observer": observer, "lengths": lengths, "training": training}
    shadow = _make_shadow(layer, treat, shared)
    for copy in shadow.modules():
        if copy is not shadow:
            vars(copy).pop("layer_idx", None)  # `layer_kind` leaves it out
    # The same signs wherever there are any, so that the sign of the factor decides.
    generator = torch.Generator().manual_seed(0 if values.parameter_factor is None else 1)
    for copy in shadow.modules():
        if not isinstance(copy, StandIn):
            copy.training = training
            _randomise(copy, generator, values.parameter_factor)
    return shadow


def make_backbone_shadow(
    backbone: nn.Module, observer: Observer, lengths: dict[str, int], replaced: Collection[str]
) -> Any:
    """A backbone of the same class with stand-ins for the modules of some paths, or for the members
    of those that are lists of layers. It shares its other modules with the backbone.
    """

    def treat(path: str, child: nn.Module) -> Treatment:
        if path in replaced:
            return "open" if isinstance(child, (nn.Sequential, *_CONTAINERS)) else "stand in"
        if any(path.startswith(f"{outer}.") for outer in replaced):
            return "open" if isinstance(child, _CONTAINERS) else "stand in"
        contains_replaced = any(inner.startswith(f"{path}.") for inner in replaced)
        return "open" if contains_replaced else "share"

    shared = {"observer": observer, "lengths": lengths, "training": False}
    shadow = _make_shadow(backbone, treat, shared)
    shadow.training = False
    return shadow


def _make_shadow(
    module: nn.Module, treat: Callable[[str, nn.Module], Treatment], shared: dict[str, Any]
) -> Any:
    """A copy of a module whose modules are treated as `treat` says, given their path.

    shared: attributes of all stand-ins.
    """
    shadow = _copy_without_modules(module, original_class(module))
    _add_stand_ins(shadow, module, "", treat, shared)
    _rebind_functions(shadow, module)
    return shadow


def _randomise(copy: nn.Module, generator: torch.Generator, factor: float | None) -> None:
    """Replace a copy's parameters and buffers, so that nothing of the host's is changed.

    Floats become random, and near 1 where there is no factor. With one they have both signs.
    """
    for tensors in (copy._parameters, copy._buffers):
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if not tensor.is_floating_point():
                tensors[name] = tensor.clone()  # type: ignore[assignment]
                continue
            shape = parameter_shape(tensor)
            values = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
            if factor is not None:
                signs = torch.randint(2, shape, generator=generator) * 2 - 1
                values *= signs * factor
            tensors[name] = values.requires_grad_()  # type: ignore[assignment]
    for name, value in vars(copy).items():
        if isinstance(value, Tensor):
            vars(copy)[name] = value.clone()


def _add_stand_ins(
    shadow: Any,
    module: nn.Module,
    prefix: str,
    treat: Callable[[str, nn.Module], Treatment],
    shared: dict[str, Any],
) -> None:
    for name, child in module.named_children():
        path = prefix + name
        treatment = treat(path, child)
        copy: Any = child
        if treatment == "open":
            copy = _copy_without_modules(child, original_class(child))
            _add_stand_ins(copy, child, f"{path}.", treat, shared)
        elif treatment == "stand in":
            copy = _make_stand_in(child)
            vars(copy).update(shared, path=path)
        shadow._modules[name] = copy
    for name, other_name in _further_names(module).items():
        shadow._modules[name] = shadow._modules[other_name]


def _make_stand_in(module: nn.Module) -> Any:
    host_class: Any = type(module)
    stand_in = _copy_without_modules(module, swapped_class(StandIn, host_class))
    # A forward may ask for a weight's dtype.
    for name, parameter in module._parameters.items():
        if parameter is not None:
            shape = parameter_shape(parameter)
            meta = torch.empty(shape, dtype=torch.float64, device="meta")
            stand_in._parameters[name] = nn.Parameter(meta, requires_grad=False)
    return stand_in


def _rebind_functions(shadow: nn.Module, module: nn.Module) -> None:
    """Let the functions among a module's attributes call stand-ins, as minGPT's `mlpf` must."""
    copies = dict(shadow.named_modules(remove_duplicate=False))
    copy_of = {
        id(part): copies[path]
        for path, part in module.named_modules(remove_duplicate=False)
        if path in copies
    }
    for name, value in vars(shadow).items():
        if not isinstance(value, FunctionType) or not value.__closure__:
            continue
        contents = [cell.cell_contents for cell in value.__closure__]
        cells = tuple(CellType(copy_of.get(id(content), content)) for content in contents)
        rebound = FunctionType(value.__code__, value.__globals__, name, value.__defaults__, cells)
        rebound.__kwdefaults__ = value.__kwdefaults__
        vars(shadow)[name] = rebound


def _further_names(module: nn.Module) -> dict[str, str]:
    """The names of children after their first one, which `named_children` leaves out."""
    first_names: dict[nn.Module, str] = {}
    further = {}
    for name, child in module._modules.items():
        if child is not None and first_names.setdefault(child, name) != name:
            further[name] = first_names[child]
    return further


def _copy_without_modules(module: nn.Module, cls: Any) -> Any:
    copy = cls.__new__(cls)
    for key, value in vars(module).items():
        if key not in ("forward", "_compiled_call_impl"):  # accelerate's, and compiled code
            vars(copy)[key] = value.copy() if isinstance(value, dict | list | set) else value
    for key in ("_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
        vars(copy)[key] = {}
    return copy
