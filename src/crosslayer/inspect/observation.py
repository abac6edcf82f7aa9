"""Run a model and show every site of every batch to analyses, one site at a time.

Nothing of a batch is kept but what an analysis keeps, so memory does not grow with the number of
tokens.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..connection import Connection, autocast_disabled, find_connections
from ..evaluation_mode import evaluation_mode
from ..hf import connect
from ..hf.arguments import forward_parameters
from ..hf.attach import find_backbone
from ..hf.disconnect import remove_connections
from ..hf.families import own_connection
from ..method_checks import first_tensor
from ..mixing import MixingWeights
from ..sites import SPLIT_PORT_NAMES
from ..validation import format_shape

# a model's arguments, like input_ids and attention_mask; of images also their classes
ModelInputs = Mapping[str, Tensor]
LABELS = "labels"
MODEL_INPUTS = frozenset({"input_ids", "pixel_values"})


@dataclass(eq=False)
class SiteVisit:
    """One site in one batch: the state that it reads, with the write of the sub-layer before it.

    Tokens are flat: the state's tensors are [1 N …], where N counts the tokens that no attention
    mask excludes.

    Args:
        connection: of the site.
        state: as the model gave it to `read`.
        samples: the number of each token's sequence in the batch, [N].
        answers: the tokens that a model's answer is read from: of a text the last one, of an image
            the first one, which is the class token; [N] bool.
    """

    connection: Connection[Any]
    state: Any
    samples: Tensor
    answers: Tensor

    @cached_property
    def _mixed(self) -> tuple[tuple[Tensor, ...], Any]:
        with autocast_disabled(self.state):
            return self.connection.mix_inputs(self.state)

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """The inputs before their norms, [1 N D] each: one for all ports, or one for each port.

        Where the norm is the stream's, as in post-norm, the inputs after it.
        """
        if self.connection.norms_its_stream:
            with autocast_disabled(self.state):
                return self.connection.read(self.state)[0]
        return self._mixed[0]

    @property
    def next_state(self) -> Any:
        """The state that the sub-layer's output is written to."""
        return self._mixed[1]

    @cached_property
    def ways(self) -> dict[str, Tensor]:
        """What the sub-layer is given, [N D] each, by the name of the way.

        "input" alone; or q, k, v and r where these are mixed separately. r is the stream that the
        sub-layer's output joins.
        """
        inputs = [x.flatten(0, -2).float() for x in self.inputs]
        if not self.connection.splits_inputs:
            return {"input": inputs[0]}
        stream = self.connection.state_parts(self.next_state)[-1]
        ways = dict(zip(self.split_ports, inputs, strict=False))
        return ways | {"r": stream.flatten(0, -2).float()}

    @property
    def split_ports(self) -> list[str]:
        """The ports that have a mixture of their own. They come first among the ports."""
        return [port for port in self.connection.ports if port in SPLIT_PORT_NAMES]

    @property
    def hidden(self) -> Tensor:
        """The hidden state at this depth, [N D]: as `Connection.hidden_state` has it, but normed
        where the norm is the stream's.
        """
        return self.ways["r"] if "r" in self.ways else self.ways["input"]

    @cached_property
    def weights(self) -> MixingWeights:
        """The read as matrices, each [out in K], or [N out in K] where tokens differ.

        Raises:
            ValueError: the method's matrices do not fit to its parts.
        """
        with autocast_disabled(self.state):
            weights = self.connection.mixing_weights(self.state)
        columns = self.parts.shape[-2]
        of_tokens = {}
        for name in ("write", "read", "carry"):
            matrix = getattr(weights, name)
            if matrix.dim() not in (3, 5) or matrix.shape[-2] != columns:
                raise ValueError(
                    f"mixing_weights of {self.connection.name}: {name} must be [out {columns} K] "
                    f"or [B T out {columns} K], got {format_shape(matrix.shape)}"
                )
            if name == "write":  # what the other two mix
                columns = matrix.shape[-3]
            of_tokens[name] = matrix.flatten(0, -4) if matrix.dim() > 3 else matrix
        return weights._replace(**of_tokens)

    @cached_property
    def parts(self) -> Tensor:
        """What is mixed, [N parts D/fractions]: the parts of the state, then the pending write."""
        fractions = self.connection.fractions
        parts = list(self.connection.state_parts(self.state))
        if self.state.y is not None:
            parts += self.state.y.unflatten(-1, (fractions, -1)).unbind(-2)
        return torch.stack([part.flatten(0, -2).float() for part in parts], -2)

    @cached_property
    def written(self) -> Tensor:
        """The parts after the pending write and before a norm of the stream, [N parts D]."""
        write = self.weights.write.float()
        if write.shape[-1] == 1:
            return write[..., 0] @ self.parts
        return torch.einsum("...oik,...ik->...ok", write, self.parts)


class Analysis(Protocol):
    """What `observe_model` calls: every site of a batch in the order of depth, batch by batch."""

    def visit_site(self, visit: SiteVisit) -> None: ...


@torch.no_grad()
def observe_model(
    model: nn.Module, batches: Iterable[ModelInputs], analyses: Sequence[Analysis]
) -> None:
    """Run a model over batches and show each site to each analysis.

    The model computes what it computes elsewhere, in its own dtype and in evaluation mode. No hook
    is left behind. A model without a connection is shown as pre-norm or post-norm, whichever it is.

    Args:
        model: of a family that `connect` knows, connected or not, or a model of your own that
            calls its connections as modules, like `Stack`.
        batches: arguments of the model. Tokens whose `attention_mask` is 0 are left out, and so are
            batches without any other.
        analyses: called in their order.

    Raises:
        TypeError: a batch is no mapping.
        ValueError: `connect` does not recognise the model, a state is not finite, the batches have
            no token, or the model does not call its connections as modules.
    """
    counter = _VisitCounter()
    analyses = [counter, *analyses]
    device = next(model.parameters()).device
    with connected_for_analysis(model), evaluation_mode(model):
        for batch in batches:
            if not isinstance(batch, Mapping):
                raise TypeError(
                    "expected batches of the model's arguments by name, like {'input_ids': ids}, "
                    f"got a {type(batch).__name__}"
                )
            mask = batch.get("attention_mask")
            if mask is not None and not mask.any():
                continue
            arguments = model_arguments(batch, device)
            with visited_sites(model, arguments, analyses):
                run_headless_model(model, arguments)
    if counter.visits == 0:
        raise ValueError(
            "nothing was observed: give at least one batch of at least one token, and a model that "
            "calls its connections as modules"
        )


def model_arguments(batch: ModelInputs, device: torch.device) -> dict[str, Tensor]:
    """What a model is called with, on a device: a batch without its labels."""
    return {key: value.to(device) for key, value in batch.items() if key != LABELS}


def plain_connection(model: nn.Module) -> str:
    """The connection that computes what a model without connections does: pre-norm or post-norm.

    Raises:
        ValueError: `connect` does not recognise the model.
    """
    return own_connection(find_backbone(model)[1].of_layers[0])


@contextmanager
def connected_for_analysis(model: nn.Module) -> Iterator[None]:
    """Connect a plain model with the connection that it has already, and undo it."""
    if find_connections(model):
        yield
        return
    # `connect` may replace the config by a copy that names the connection.
    configs = [(module, module.config) for module in model.modules() if "config" in vars(module)]
    connect(model, plain_connection(model))
    try:
        yield
    finally:
        remove_connections(model)
        for module, config in configs:
            module.config = config


def run_headless_model(model: nn.Module, arguments: ModelInputs) -> None:
    """Call a model with a batch, without its head where it can be left out, and without a cache."""
    part = _find_headless_model(model, arguments)
    part(**cache_options(part), **arguments)


def cache_options(model: nn.Module) -> dict[str, Any]:
    """`use_cache=False` for a model that takes it."""
    return {"use_cache": False} if "use_cache" in forward_parameters(model) else {}


def _find_headless_model(model: nn.Module, arguments: ModelInputs) -> nn.Module:
    """What to call with a batch: of a transformers model the part without its head, if it takes it.

    Its backbone may be an encoder of embeddings (DINOv2), which does not.

    Raises:
        ValueError: PEFT puts a learned prompt before each sequence, in a module around the model.
    """
    prompt = getattr(model, "active_peft_config", None)
    if getattr(prompt, "is_prompt_learning", False):
        raise ValueError(
            f"{type(prompt).__name__}: the sites of a model with a learned prompt are not "
            "observed; its get_base_model() is the model without the prompt"
        )
    if find_connections(model) and not hasattr(model, "config"):
        return model
    inputs = MODEL_INPUTS & arguments.keys()
    if not inputs:  # other names, as in a model of plain PyTorch
        return model
    for part in (find_backbone(model)[0], getattr(model, "base_model", model)):
        if inputs <= forward_parameters(part).keys():
            return part
    return model


@contextmanager
def visited_sites(
    model: nn.Module, arguments: ModelInputs, analyses: Sequence[Analysis]
) -> Iterator[None]:
    """Hooks that show each site to the analyses as the model, called with these, comes to it."""

    def visit(connection: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(connection, Connection)
        # A call with a second argument asks for the hidden state. Other sites are called with the
        # state alone as well; the readout of a host whose stream has a factor is not.
        if inputs[1:] and not connection.is_readout:
            return
        site_visit = _flatten_tokens(connection, inputs[0], arguments)
        for analysis in analyses:
            analysis.visit_site(site_visit)

    with ExitStack() as hooks:
        for site in find_connections(model):
            hooks.enter_context(site.register_forward_pre_hook(visit))
        yield


def _flatten_tokens(connection: Connection[Any], state: Any, arguments: ModelInputs) -> SiteVisit:
    """The state at the tokens that the attention mask includes."""
    first = first_tensor(state)  # of every token
    lead = first.shape[:2]
    device = first.device
    chosen = torch.ones(lead, dtype=torch.bool, device=device)
    if "attention_mask" in arguments:
        chosen = arguments["attention_mask"].bool()
    samples = torch.arange(lead[0], device=device)[:, None].expand(lead)[chosen]
    # the first token of a sequence comes after that of another; so does the one after the last
    is_first = samples.diff(prepend=samples.new_tensor([-1])) != 0
    answers = is_first if "pixel_values" in arguments else is_first.roll(-1)

    def at_tokens(leaf: Any) -> Any:
        # Coefficients without leading axes are the same for every token.
        varies = isinstance(leaf, Tensor) and leaf.dim() >= 3 and leaf.shape[:2] == lead
        return leaf[chosen][None] if varies else leaf

    state = tree_map(at_tokens, state)
    if not all(leaf.isfinite().all() for leaf in tree_leaves(state) if isinstance(leaf, Tensor)):
        raise ValueError(f"the state before {site_label(connection)} is not finite")
    return SiteVisit(connection, state, samples, answers)


class _VisitCounter:
    """Counts the sites that the analyses are shown."""

    def __init__(self) -> None:
        self.visits = 0

    def visit_site(self, visit: SiteVisit) -> None:
        self.visits += 1


def site_label(connection: Connection[Any]) -> str:
    """Like "3.attn" for the attention of layer 3, "3.attn+mlp" for a parallel block, "3b.mlp" for
    the second of two MLPs, "readout".
    """
    if connection.is_readout:
        return "readout"
    site = connection.site
    return layer_label(site.layer, site.repeat, "+".join(map(port_label, site.ports)))


def input_labels(connection: Connection[Any], inputs: int) -> list[str]:
    """A label for each of a site's inputs: that of the site, or one for each port, like "3.q"."""
    label = site_label(connection)
    if inputs == 1:
        return [label]
    site = connection.site
    return [layer_label(site.layer, site.repeat, port_label(port)) for port in connection.ports]


def layer_label(layer: int, repeat: int, ports: str) -> str:
    """Like "3.mlp"; "3b.mlp" where one such label of the layer comes before it."""
    letter = chr(ord("a") + repeat) if repeat else ""
    return f"{layer}{letter}.{ports}"


def port_label(port: str) -> str:
    """An attention is called "attn" whatever it projects from."""
    return port.removeprefix("latent_")
