"""The sections of the report of `crosslayer inspect`, in their order."""

from . import (
    ablation,
    attention,
    classes,
    connections,
    scales,
    scaling,
    similarity,
    speed,
    steps,
    training,
)
from .section import Section
from .view import TrainingView

SECTIONS: list[Section] = [
    *connections.SECTIONS,
    *classes.SECTIONS,
    *steps.SECTIONS,
    *similarity.SECTIONS,
    *scales.SECTIONS,
    *attention.SECTIONS,
    *ablation.SECTIONS,
]

# drawn from run folders, without a model
TRAINING_VIEWS: list[TrainingView] = [*training.VIEWS, *speed.VIEWS, *scaling.VIEWS]
