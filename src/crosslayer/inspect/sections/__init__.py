"""The sections of the report of `crosslayer inspect`, in their order."""

from . import ablation, attention, classes, connections, scales, similarity, steps
from .section import Section

SECTIONS: list[Section] = [
    *connections.SECTIONS,
    *classes.SECTIONS,
    *steps.SECTIONS,
    *similarity.SECTIONS,
    *scales.SECTIONS,
    *attention.SECTIONS,
    *ablation.SECTIONS,
]
