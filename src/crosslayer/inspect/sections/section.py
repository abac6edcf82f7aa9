"""A section of the report of `crosslayer inspect`: a picture and what it shows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..figures import Draw
from ..inspection import ModelInspection

Models = Sequence[ModelInspection]
Panels = list[tuple[str, Draw]]  # titles and functions that draw
MOST_STREAMS = 8  # panels of streams in a figure


@dataclass(frozen=True)
class Section:
    """A picture of the report.

    Attributes:
        name: of its files, and in `--sections`.
        title: of the section.
        text: what it shows, and the figures of the papers that show the same.
        analyses: the names in `inspection.ANALYSES` of those that the picture needs.
        draw_panels: the panels for the models that have all of these analyses; empty where there
            is nothing to draw.
        is_standard: drawn where `--sections` names none. Not what takes many passes.
    """

    name: str
    title: str
    text: str
    analyses: tuple[str, ...]
    draw_panels: Callable[[Models], Panels]
    is_standard: bool = True

    def panels(self, models: Models) -> Panels:
        """The panels for those models that have what the picture needs."""
        known = [model for model in models if all(name in model.results for name in self.analyses)]
        return self.draw_panels(known) if known else []
