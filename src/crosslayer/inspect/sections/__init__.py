"""The sections of the report of `crosslayer inspect`, in their order."""

from . import ablation, attention, connections, scales, scaling, similarity, speed, training
from .section import Section
from .view import TrainingView

SECTIONS: list[Section] = [
    *connections.SECTIONS,
    *similarity.SECTIONS,
    *scales.SECTIONS,
    *attention.SECTIONS,
    *ablation.SECTIONS,
]

# drawn from run folders, without a model
TRAINING_VIEWS: list[TrainingView] = [*training.VIEWS, *speed.VIEWS, *scaling.VIEWS]
