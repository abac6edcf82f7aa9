"""What depths predict and learn from, and what a model loses without its parts."""

from functools import partial

from ..figures import draw_ablation, draw_lines
from .section import Models, Panels, Section


def _lens_panels(models: Models) -> Panels:
    losses = [(m.name, m["lens"].losses) for m in models]
    gradients = [(m.name, m["gradients"].rms) for m in models]
    layers = [str(layer) for layer in range(max(len(values) for _, values in gradients))]
    return [
        (
            "loss of the read-out at each site",
            partial(draw_lines, labels=models[0]["lens"].labels, lines=losses, name="loss (nats)"),
        ),
        (
            "gradient of each layer",
            partial(draw_lines, labels=layers, lines=gradients, name="√mean(g²)"),
        ),
    ]


def _ablation_panels(models: Models) -> Panels:
    done = [(m.name, m["ablation"]) for m in models]
    return [("without each sub-layer", partial(draw_ablation, models=done))]


def _way_panels(models: Models) -> Panels:
    done = [(m.name, m["ways"]) for m in models]
    return [("without each way", partial(draw_ablation, models=done))]


SECTIONS = [
    Section(
        "lens",
        "What each depth predicts, and what it learns from",
        "Left: each site's input through the final norm and the head. Right: the gradient of the "
        "loss, from one backward pass over the sequences. Multi-Gate Residuals, Figure 2.",
        ("lens", "gradients"),
        _lens_panels,
    ),
    Section(
        "ablation",
        "What the model loses without its sub-layers",
        "Increase of log perplexity where a sub-layer's output is zero, from one pass over the "
        "sequences a sub-layer. Multi-Gate Residuals, Figure 4.",
        ("ablation",),
        _ablation_panels,
    ),
    Section(
        "ways",
        "What MUDD loses without its ways",
        "Increase of log perplexity where a stream reads the last block alone, as in a plain "
        "residual.",
        ("ways",),
        _way_panels,
    ),
]
