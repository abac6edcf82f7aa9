"""The sections of the report of `crosslayer inspect`, in their order."""

from . import ablation, attention, connections, scales, similarity
from .section import Section

SECTIONS: list[Section] = [
    *connections.SECTIONS,
    *similarity.SECTIONS,
    *scales.SECTIONS,
    *attention.SECTIONS,
    *ablation.SECTIONS,
]
