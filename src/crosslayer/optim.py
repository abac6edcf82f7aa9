"""How an optimizer should treat a model with connections."""

from typing import Any, NamedTuple

import torch
from torch import nn

from .connection import find_connections
from .module_lists import has_children, has_numbered_layers
from .partitioned import parameter_shape
from .validation import check_non_negative

# Parameters of two dimensions that are treated as vectors: the logarithm of the decay of Mamba's
# state, and biases of experts.
_VECTOR_ENDINGS = ("A_log", "bias")


class _Group(NamedTuple):
    name: str
    lr: float
    weight_decay: float
    muon: bool


def param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    connection_lr_scale: float = 1.0,
    embedding_lr_scale: float = 1.0,
) -> list[dict[str, Any]]:
    """Parameter groups of `model` for any torch optimizer.

    Matrices of the backbone take weight decay, its vectors and Mamba's `A_log` take none. Of a
    connection, the parameters in its class's `weight_decay_params` take it. Frozen parameters are
    left out.

    Args:
        model: any module; its connections are found.
        lr: the model's learning rate.
        weight_decay: the weight decay of the parameters that take it.
        connection_lr_scale: learning rate of the connections' parameters, as a multiple of `lr`.
        embedding_lr_scale: learning rate of the embeddings and tied heads, as a multiple of `lr`.
            Their weight decay is divided by it, so that AdamW's decay a step, the product of the
            two, stays the same.

    Returns:
        Dicts `{name, params, lr, weight_decay, muon}`, one for each name. `muon` marks 2-d matrices
        of the backbone's layers, whose updates an optimizer like Muon may orthogonalise. It
        excludes embeddings, output heads and connection parameters, which are no linear maps
        between activations.

    Raises:
        ValueError: a rate, a decay or a scale is not a number of at least 0.
    """
    check_non_negative(
        lr=lr,
        weight_decay=weight_decay,
        connection_lr_scale=connection_lr_scale,
        embedding_lr_scale=embedding_lr_scale,
    )
    muon_ids = {id(parameter) for parameter in layer_matrices(model)}
    embedding_ids = _embedding_ids(model)
    decays = _connection_decays(model)
    groups: dict[_Group, list[nn.Parameter]] = {}
    seen_ids: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen_ids or not parameter.requires_grad:
                continue
            seen_ids.add(id(parameter))
            if id(parameter) in decays:
                takes_decay = decays[id(parameter)]
                name_of_group = "connection with weight decay" if takes_decay else "connection"
                decay = weight_decay if takes_decay else 0.0
                group = _Group(name_of_group, connection_lr_scale * lr, decay, muon=False)
            elif id(parameter) in muon_ids:
                group = _Group("matrices", lr, weight_decay, muon=True)
            elif id(parameter) in embedding_ids:
                decay = weight_decay / embedding_lr_scale if embedding_lr_scale else 0.0
                group = _Group("embeddings", embedding_lr_scale * lr, decay, muon=False)
            elif _is_matrix(module, name, parameter):
                group = _Group("other matrices", lr, weight_decay, muon=False)
            else:
                group = _Group("vectors", lr, 0.0, muon=False)
            groups.setdefault(group, []).append(parameter)
    return [{**group._asdict(), "params": params} for group, params in groups.items()]


def layer_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The 2-d weights inside a model's lists of layers.

    Embeddings are excluded, also inside layers (DiT's blocks have one of the classes) and where a
    head is tied to them, and so are the connections' parameters, what is treated as a vector, and
    tables of relative positions.
    """
    other_ids = _embedding_ids(model) | _connection_decays(model).keys()
    matrices: dict[int, nn.Parameter] = {}  # by id: lists of layers may be within others
    for container in model.modules():
        for layer in _layers_in(container):
            for module in layer.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    if _is_map(module, name, parameter) and id(parameter) not in other_ids:
                        matrices[id(parameter)] = parameter
    return list(matrices.values())


def _is_map(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter may be a linear map between activations."""
    if name.startswith("rel_pos") or not _is_matrix(module, name, parameter):
        return False
    shape = parameter_shape(parameter)
    return len(shape) == 2 and min(shape) > 1  # weight_norm's gains have a dimension of 1


def _is_matrix(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter of a module takes weight decay. Norms of heads may have 2 dimensions."""
    is_of_norm = type(module).__name__.endswith("Norm")
    is_vector = len(parameter_shape(parameter)) < 2 or name.endswith(_VECTOR_ENDINGS)
    return not is_of_norm and not is_vector


def _connection_decays(model: nn.Module) -> dict[int, bool]:
    """By the id of each own parameter of a connection: whether it takes weight decay."""
    decays = {}
    for connection in find_connections(model):
        for path, parameter in connection.named_parameters():
            # torch.nn.utils.parametrize keeps W1 in parametrizations.W1
            name = path.removeprefix("parametrizations.").partition(".")[0]
            if name != "norms":
                decays[id(parameter)] = name in connection.weight_decay_params
    return decays


def _embedding_ids(model: nn.Module) -> set[int]:
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return {id(parameter) for embedding in embeddings for parameter in embedding.parameters()}


def _layers_in(module: nn.Module) -> list[nn.Module]:
    """The layers of a list, a sequence or a dict with numbers as keys; none of any other module.

    Layers have modules. A list of only linear maps may be of output heads. An nn.Sequential may end
    with a head, and one with an embedding is a model.
    """
    if isinstance(module, nn.ModuleDict):
        if not has_numbered_layers(module):
            return []
    elif not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    # members that are models of transformers have lists of their own
    children = [c for c in module.children() if not hasattr(c, "get_input_embeddings")]
    layers = [child for child in children if has_children(child)]
    if isinstance(module, nn.Sequential):
        is_model = any(isinstance(child, nn.Embedding) for child in children)
        return [] if is_model else layers
    return children if layers or isinstance(module, nn.ModuleDict) else []


def zero_connection_updates(optimizer: torch.optim.Optimizer) -> None:
    """Keep connections unchanged in this step, to start them later than the model.

    DenseFormer's Table 5 does so. The optimizer's groups must come from `param_groups`. Call it
    between the backward pass and clipping. It sets gradients and learning rates to zero, so FSDP,
    DDP and compilation see the same parameters in every step, and neither clipping nor the
    optimizer's moments are affected. Adam counts these steps, so after many of them the first
    update of a connection is (1 - β₁) / √(1 - β₂) times that of a new parameter. The schedule must
    set the learning rate again afterwards, as `LambdaLR` does. Those that compute it from the last
    one, like `CosineAnnealingLR` and `LinearLR`, leave it at zero.

    Raises:
        ValueError: a group of the optimizer is not from `param_groups`.
    """
    for group in optimizer.param_groups:
        if "name" not in group:
            raise ValueError("the optimizer's groups have no names; make them with param_groups")
        if group["name"].startswith("connection"):
            group["lr"] = 0.0
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.zero_()
