"""A section of the report of `crosslayer inspect`: a picture and what it shows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..inspection import ModelInspection
from .spread import FigurePanels, draw_with_spread

InspectedModels = Sequence[ModelInspection]
MOST_STREAMS = 8  # panels of streams in a figure


@dataclass(frozen=True)
class ReportPicture:
    """What the report says of a picture.

    Attributes:
        name: of its files, and in `--sections`.
        title: of the section.
        text: what it shows, and the figures of the papers that show the same.
    """

    name: str
    title: str
    text: str


@dataclass(frozen=True)
class Section(ReportPicture):
    """A picture of models.

    Attributes:
        analyses: the names in `inspection.ANALYSES` of those that the picture needs.
        draw_panels: the panels for the models that have all of these analyses; empty where there
            is nothing to draw.
        is_standard: drawn where `--sections` names none.
    """

    analyses: tuple[str, ...]
    draw_panels: Callable[[InspectedModels], FigurePanels]
    is_standard: bool = True

    def panels(self, models: InspectedModels) -> FigurePanels:
        """The panels for those models that have what the picture needs, with their spread."""
        known = [model for model in models if all(name in model.results for name in self.analyses)]
        return draw_with_spread(self.draw_panels, known) if known else []
