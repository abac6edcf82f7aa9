"""The places along depth where the sub-layers of a model run.

y_0 ──► site 0 ──► attention ──► site 1 ──► mlp ──► … ──► site `depth`: the readout
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .validation import check_option_type, check_positive

# The inputs that a method may feed separately, by the port of the sub-layer.
SPLIT_PORTS = {"attn": ("q", "k", "v"), "latent_attn": ("q", "kv")}
SPLIT_PORT_NAMES = frozenset(port for ports in SPLIT_PORTS.values() for port in ports)


@dataclass(frozen=True)
class Site:
    """A place along depth where a sub-layer runs. The last site is the readout.

    Attributes:
        index: from 0 to `depth`.
        layer: the Transformer layer it belongs to; `layers` at the readout.
        ports: ("attn",), ("mlp",), ("attn", "mlp") in a parallel block, or ("out",). In an
            attention's place may be a "latent_attn", which projects k and v from one latent (MLA),
            or a "mixer", which has one input: a Mamba layer, or an attention whose q, k and v
            `connect` cannot separate.
        opens_layer: whether it is the first site of its layer.
        layers: the number of layers.
        depth: the index of the readout, which is the number of sub-layers.
        repeat: how many sites of its layer with these ports come before it, such as the first of
            two MLPs.
    """

    index: int
    layer: int
    ports: tuple[str, ...]
    opens_layer: bool
    layers: int
    depth: int
    repeat: int = 0

    @property
    def is_readout(self) -> bool:
        return self.index == self.depth

    @property
    def place(self) -> str:
        """What messages call it."""
        return "readout" if self.is_readout else f"site {self.index} of {self.depth}"


def plan(layers: int, parallel: bool = False) -> list[Site]:
    """The sites of a model with `layers` layers of attention and MLP, in sequence or in parallel.

    Args:
        layers: the number of layers.
        parallel: attention and MLP of a layer read the same state and write their sum (GPT-J,
            Pythia).

    Returns:
        One site for each sub-layer, and the readout.

    Raises:
        ValueError: `layers` is not a whole number of at least 1, or `parallel` is no bool.
    """
    check_positive(layers=layers)
    check_option_type("parallel", parallel, bool)
    ports_of_layer = [("attn", "mlp")] if parallel else [("attn",), ("mlp",)]
    return plan_layers([ports_of_layer] * layers)


def plan_layers(ports_of_layers: Sequence[Sequence[tuple[str, ...]]]) -> list[Site]:
    """The sites of a model whose layers differ.

    Args:
        ports_of_layers: for each layer, the ports of each of its sites.

    Returns:
        The sites in the order of depth, and the readout.
    """
    depth = sum(len(ports_of_layer) for ports_of_layer in ports_of_layers)
    sites: list[Site] = []
    layers = len(ports_of_layers)
    for layer, ports_of_layer in enumerate(ports_of_layers):
        for i, ports in enumerate(ports_of_layer):
            repeat = list(ports_of_layer[:i]).count(ports)
            site = Site(
                index=len(sites),
                layer=layer,
                ports=ports,
                opens_layer=i == 0,
                layers=layers,
                depth=depth,
                repeat=repeat,
            )
            sites.append(site)
    readout = Site(
        index=depth, layer=layers, ports=("out",), opens_layer=True, layers=layers, depth=depth
    )
    return [*sites, readout]


def split_attention_ports(ports: tuple[str, ...]) -> tuple[str, ...]:
    """Replace the port of an attention by the ports of its inputs, like q, k and v."""
    split: list[str] = []
    for port in ports:
        split += SPLIT_PORTS.get(port, (port,))
    return tuple(split)


def check_ports(ports: tuple[str, ...], site: Site) -> tuple[str, ...]:
    """The ports, if they are the site's. An attention may be replaced by all of its inputs: q, k
    and v.

    The ports of a readout feed no sub-layer, so a method chooses them freely.

    Raises:
        ValueError: they are others.
    """
    if site.is_readout:
        return ports
    allowed = dict.fromkeys([site.ports, split_attention_ports(site.ports)])
    if ports not in allowed:
        raise ValueError(f"ports must be {' or '.join(map(str, allowed))}, got {ports!r}")
    return ports
