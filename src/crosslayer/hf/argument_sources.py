"""Where the arguments of a layer's module come from, besides the stream.

`connect` calls the modules of a layer itself, so it must know each argument: one of the layer's
own, a further output of an earlier module, or a constant that the layer's code sets.
"""

import inspect
from typing import Any

from torch import nn

from .arguments import (
    LayerArgument,
    argument_parameters,
    constant_arguments,
    is_constant,
    residual_argument,
    second_streams,
)
from .families import NO_RESIDUAL, REST_OF_ARGUMENTS, SAME_INPUT, ArgumentSources, ExtraOutput
from .recorder import TracedCall
from .shadow import OtherOutput

NO_ENCODER = (
    "it attends to an encoder, which this model does not have; the decoder of a whole model can be "
    "connected, like connect(model.get_decoder(), spec)"
)


def find_argument_sources(layer: nn.Module, call: TracedCall) -> ArgumentSources:
    """From which of the layer's arguments, or of earlier modules' outputs, those of a call come."""
    of_layer = argument_parameters(layer)
    module = layer.get_submodule(call.path)
    of_module = argument_parameters(module)
    own_names = of_layer.keys() - second_streams(layer)
    constants = constant_arguments(module, call.arguments)
    sources: list[tuple[str, str | ExtraOutput]] = []
    if residual := residual_argument(module):
        sources.append((residual, NO_RESIDUAL))
    for name, value in call.arguments.items():
        is_required = name in of_module and of_module[name].default is inspect.Parameter.empty
        if value is None and is_required and name.startswith("encoder_"):
            raise ValueError(NO_ENCODER)
        known = (*of_layer, REST_OF_ARGUMENTS, SAME_INPUT)
        if isinstance(value, LayerArgument) and value.name in known:
            if name.endswith("]"):  # of *args
                raise ValueError(
                    f"its {call.path} takes {value!r} through *args, where it has no name; wrap "
                    "and compile modules after connecting, or name the argument"
                )
            sources.append((name, value.name))
        elif isinstance(value, OtherOutput) and not name.endswith("]"):
            sources.append((name, value.output))
        elif name in own_names and value is of_layer[name].default:
            # Its code may pass on what it was given, of one type alone.
            sources.append((name, name))
        elif name in constants and (name.endswith("]") or not is_constant(value)):
            raise ValueError(
                f"it gives {call.path} an argument that it makes itself, {name}={value!r}"
            )
    return tuple(sources)


def find_preset_arguments(
    layer: nn.Module, call: TracedCall, sources: ArgumentSources
) -> tuple[tuple[str, Any], ...]:
    """The values of a module's arguments that the layer's code sets, and the layer's defaults of
    the others, where the module has another default or none.
    """
    of_layer = argument_parameters(layer)
    module = layer.get_submodule(call.path)
    of_module = argument_parameters(module)
    constants = constant_arguments(module, call.arguments)
    given = dict(sources)
    preset = [(name, value) for name, value in constants.items() if name not in given]
    for name, source in sources:
        default = of_layer[source].default if source in of_layer else inspect.Parameter.empty
        is_own = name in of_module and of_module[name].default is default
        if default is inspect.Parameter.empty or is_own:
            continue
        if not is_constant(default):
            raise ValueError(f"the default of its argument {source!r} is {default!r}; make it None")
        preset.append((name, default))
    return tuple(preset)
