"""What names tell of a module: whether it is a norm, its kind as a sub-layer, its projections."""

import ast
import functools
import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from ..class_swap import original_class
from ..module_lists import has_children
from ..partitioned import parameter_shape
from .arguments import function_definition
from .families import FUSED_PROJECTIONS, OWN_PROJECTIONS, SAME_INPUT, FusedQKV, Sublayer
from .host_norms import find_attribute

# Names that transformers gives to the projections of q, k and v, and to those of an MLP.
_QKV = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
    ("c_q", "c_k", "c_v"),
    ("w_q", "w_k", "w_v"),
)
# Of q and the latent of k and v (MLA).
_LATENT = (("q_a_proj", "kv_a_proj_with_mqa"), ("q_proj", "kv_a_proj_with_mqa"))
_UP = (
    ("gate_proj", "up_proj"),
    ("gate_up_proj",),
    ("up_proj",),
    ("c_fc",),
    ("fc1",),
    ("fc_in",),
    ("dense_h_to_4h",),
)
_OUTPUT = (
    "o_proj", "down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "dense", "out_proj",
    "experts.down_proj",
)  # fmt: skip
_SIZE_ATTRIBUTES = ("shape", "size", "dim", "ndim", "dtype", "device", "requires_grad")
_MLP_NAMES = ("mlp", "ffn", "feed_forward", "moe", "experts", "channel")
_ATTENTION_NAMES = ("attn", "attention")


def describe_sublayer(layer: nn.Module, sublayer: Sublayer) -> Sublayer:
    """Add what a module's names tell: its kind and its projections."""
    module = layer.get_submodule(sublayer.module)
    qkv, fused = find_projections(module)
    is_mlp = not qkv and _is_mlp(module, sublayer)
    port = "mlp" if is_mlp else "mixer"
    if qkv:
        port = "latent_attn" if qkv[:2] in _LATENT else "attn"
    elif _takes_three_inputs(module, sublayer):
        port = "attn"
    children = dict(module.named_children())
    up = next((names for names in _UP if all(name in children for name in names)), ())
    output = next((name for name in _OUTPUT if _has_attribute(module, name)), "")
    steps = [find_attribute(layer, path) for path in sublayer.paths_after]
    if any(has_matrix(step) for step in steps):
        output = ""  # It is one of these steps.
    if not is_mlp and any(_has_parameters(step) for step in steps):
        output = ""  # A norm follows it.
    return sublayer._replace(
        port=port,
        qkv=qkv,
        fused=fused,
        up_projections=up if is_mlp else (),
        output_projection=output,
    )


def _takes_three_inputs(module: nn.Module, sublayer: Sublayer) -> bool:
    """Whether it is torch's own attention, and gets one input as its query, key and value."""
    is_torch_attention = original_class(module).forward is nn.MultiheadAttention.forward
    keys = {("key", SAME_INPUT), ("value", SAME_INPUT)}
    return is_torch_attention and keys <= set(sublayer.arguments or ())


def _is_mlp(module: nn.Module, sublayer: Sublayer) -> bool:
    if any(part in sublayer.module for part in _MLP_NAMES):
        return True
    # Some attentions of images are passed nothing but their input, as MLPs are.
    names = f"{sublayer.module} {original_class(module).__name__}".lower()
    is_named_attention = any(part in names for part in _ATTENTION_NAMES)
    return not sublayer.arguments and not is_named_attention


def find_projections(attention: Any) -> tuple[tuple[str, ...], FusedQKV | None]:
    """The projections of an attention's input: of q, k and v, and then others, such as gates.

    Returns:
        Their names, and the order of the outputs where one of them is all three. No names where the
        attention does more with its input than to project it.
    """
    attention_class: Any = original_class(attention)
    called = _calls_of_input(attention_class) or set()
    own = {name for name in called if name in attention._modules}
    # The others are modules of other variants, or methods, which use the input as one tensor.
    if any(callable(getattr(attention, name, None)) for name in called - own):
        return (), None
    called = own
    _check_rows_of_users(attention_class.__name__, called)
    if len(called) == 1:
        return _find_joint_projections(attention, called.pop())
    for names in _QKV + _LATENT:
        modules = {attention._modules[name] for name in called.intersection(names)} - {None}
        if len(modules) == len(names):  # One module may be two of them, and has one input then.
            return (*names, *sorted(called.difference(names))), None
    return (), None


def explain_joint_input(attention: nn.Module) -> str:
    """Why q, k and v of an attention have one input, where it has projections of them; else ""."""
    name = original_class(attention).__name__
    if any(all(child in attention._modules for child in names) for names in _QKV):
        return f"{name} does more with its input than to call three projections of it"
    for child, module in attention.named_children():
        is_attention = any(part in f"{name} {child}".lower() for part in _ATTENTION_NAMES)
        if (is_attention or "qkv" in child) and _is_three_times_as_wide(module):
            return f"{name}.{child} may compute all three, in an order that is not known"
    inner = (module for module in attention.modules() if module is not attention)
    if any(isinstance(module, nn.MultiheadAttention) for module in inner):
        return f"{name} contains an nn.MultiheadAttention, which must be the sub-layer itself"
    return ""


def _output_count(projection: nn.Module) -> int | None:
    """The outputs of an `nn.Linear` or of transformers' `Conv1D`; None where it does not say."""
    return getattr(projection, "out_features", getattr(projection, "nf", None))


def _is_three_times_as_wide(projection: nn.Module) -> bool:
    """Whether a projection, `nn.Linear` or transformers' `Conv1D`, has three outputs an input."""
    inputs = getattr(projection, "in_features", getattr(projection, "nx", None))
    return inputs is not None and _output_count(projection) == 3 * inputs


def _find_joint_projections(attention: Any, name: str) -> tuple[tuple[str, ...], FusedQKV | None]:
    """`find_projections` where one module gets the input: all projections, or their parent."""
    module = attention.get_submodule(name)
    row = f"{original_class(attention).__name__}.{name}"
    if row in FUSED_PROJECTIONS:
        fused = _order_of_outputs(row, attention, module)
        return ((name,), fused) if fused else ((), None)
    if not has_children(module):
        return (), None
    names, fused = find_projections(module)
    return tuple(f"{name}.{projection}" for projection in names), fused


def _check_rows_of_users(cls: str, called: set[str]) -> None:
    """Raise a ValueError where a user's row is of a module that is not called with the input alone.

    Args:
        cls: the attention's class.
        called: the modules that are.
    """
    for row in FUSED_PROJECTIONS.keys() - OWN_PROJECTIONS:
        owner, _, name = row.rpartition(".")
        if owner == cls and called != {name}:
            raise ValueError(
                f"FUSED_PROJECTIONS[{row!r}] cannot be used: the forward of {cls} must call "
                f"self.{name} on its unchanged input, and may use only the input's shape besides"
            )


def _order_of_outputs(row: str, attention: Any, module: Any) -> FusedQKV | None:
    """The order of a row; None where one of ours is that of another class with the same name.

    Raises:
        ValueError: a user's row does not fit.
    """
    try:
        fused = FUSED_PROJECTIONS[row](attention)
    except AttributeError as error:
        if row in OWN_PROJECTIONS:
            return None
        raise ValueError(f"FUSED_PROJECTIONS[{row!r}]: {error}") from None
    described = fused.groups * sum(fused.sizes)
    outputs = _output_count(module)
    if outputs is None or outputs == described:
        return fused
    if row in OWN_PROJECTIONS:
        return None
    raise ValueError(
        f"FUSED_PROJECTIONS[{row!r}] describes {described} outputs, and the projection has "
        f"{outputs}"
    )


@functools.lru_cache(maxsize=256)  # A class of a notebook is not kept for good.
def _calls_of_input(cls: type, methods: tuple[str, ...] = ("forward",)) -> set[str] | None:
    """The modules that a module's forward calls with its input alone, from its source.

    The forward may leave that to another method of the class, also through a checkpoint. None where
    it does anything else with its input but look at its size, or has no source.

    Args:
        cls: the module's class.
        methods: the forward, and those that were called from there to the one that is read.
    """
    forward: Any = inspect.unwrap(getattr(cls, methods[-1]))
    definition = function_definition(forward)
    if definition is None:
        return None
    receiver, name, *_ = inspect.signature(forward).parameters
    nodes = ast.walk(definition)
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    called = set()
    for node in _nodes_before_replacement(definition.body, name):
        if not isinstance(node, ast.Name) or node.id != name:
            continue
        if _is_local_name(node, parents):
            continue
        parent = parents[node]
        if isinstance(parent, ast.Attribute) and parent.attr in _SIZE_ATTRIBUTES:
            continue
        match parent:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=of), attr=module), args=[_], keywords=[]
            ) if of == receiver and not _is_method(cls, module):
                called.add(module)
                continue
        inner = _method_with_input(parent, node, receiver)
        if inner in methods or not _is_method(cls, inner):
            return None
        of_method = _calls_of_input(cls, (*methods, inner))
        if of_method is None:
            return None
        called |= of_method
    return called


def _method_with_input(call: ast.AST, argument: ast.Name, receiver: str) -> str:
    """The name after `self.` in `self.name(x, …)` or `checkpoint(self.name, x, …)`, or empty."""
    match call:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=of), attr=name), args=[first, *_]):
            if of == receiver and first is argument:
                return name
    match call:
        case ast.Call(
            func=ast.Name(id="checkpoint") | ast.Attribute(attr="checkpoint"),
            args=[ast.Attribute(value=ast.Name(id=of), attr=name), first, *_],
        ) if of == receiver and first is argument:
            return name
    return ""


def _is_method(cls: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(cls, name, None), FunctionType)


def _nodes_before_replacement(statements: list[ast.stmt], name: str) -> Iterator[ast.AST]:
    """The nodes of a function's body that see the first value of a name."""
    for statement in statements:
        if not _replaces(statement, name):
            yield from ast.walk(statement)
            continue
        if isinstance(statement, ast.If):
            yield from ast.walk(statement.test)
            for branch in (statement.body, statement.orelse):
                yield from _nodes_before_replacement(branch, name)
        elif isinstance(statement, ast.Assign):
            yield from ast.walk(statement.value)
        return


def _replaces(statement: ast.stmt, name: str) -> bool:
    """Whether a statement gives a name another value, whichever branch is taken."""
    if isinstance(statement, ast.If):
        branches = (statement.body, statement.orelse)
        return all(any(_replaces(inner, name) for inner in branch) for branch in branches)
    return isinstance(statement, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == name for target in statement.targets
    )


def _is_local_name(name: ast.Name, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a function within the forward has an argument of this name."""
    node: Any = parents[name]
    while node in parents:  # the forward itself has no parent
        is_inner = isinstance(node, ast.FunctionDef)
        if is_inner and any(argument.arg == name.id for argument in node.args.args):
            return True
        node = parents[node]
    return False


def _has_attribute(module: Any, path: str) -> bool:
    try:
        find_attribute(module, path)
    except AttributeError:
        return False
    return True


def has_matrix(module: nn.Module | Tensor) -> bool:
    """Whether a module, or one within it, has a parameter of two dimensions or more."""
    return isinstance(module, nn.Module) and any(
        len(parameter_shape(p)) > 1 for p in module.parameters()
    )


def is_norm(name: str, module: nn.Module) -> bool:
    """Whether a module is called a norm, by its name or its class, and has no matrix."""
    return is_named_norm(name, module) and not has_matrix(module)


def is_named_norm(name: str, module: nn.Module) -> bool:
    """Whether a module is called a norm, by its name or its class."""
    return "norm" in f"{name} {type(module).__name__}".lower()


def _has_parameters(module: nn.Module | Tensor) -> bool:
    return isinstance(module, Tensor) or any(True for _ in module.parameters())
