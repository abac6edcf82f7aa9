"""Figures of sizes and gates."""

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from ..plotting import COLOURS
from .figures import finish_lines, label_ticks, use_log_scale
from .gates import SMALL_GATE, GateStatistics


def draw_gate_boxes(axes: Any, gates: Sequence[GateStatistics]) -> None:
    """Tukey's box plot of each gate over tokens and streams; red circles are its largest outlier.

    As in MGR Figures 7 and 13.
    """
    boxes = []
    for gate in gates:
        _, low, median, high, maximum = gate.quartiles.tolist()
        boxes.append(
            {
                "whislo": gate.whiskers[0],
                "q1": low,
                "med": median,
                "q3": high,
                "whishi": gate.whiskers[1],
                "fliers": [maximum] if maximum > gate.whiskers[1] else [],
            }
        )
    outlier = {"marker": "o", "markerfacecolor": "none", "markeredgecolor": "#D00000"}
    axes.bxp(boxes, flierprops=outlier)
    label_ticks(axes.xaxis, [gate.writer for gate in gates], rotation=90, first=1)
    axes.set_xlabel("gates of the output of")
    axes.set_ylabel("gate")
    axes.grid(True, axis="y")
    axes.spines[:].set_visible(True)


def draw_gate_histogram(axes: Any, gates: Sequence[GateStatistics]) -> None:
    """The share of gate values of all layers in each bin, and their mean and maximum.

    Of gates between 0 and 1 also the share below 0.1.
    """
    counts = torch.stack([gate.counts for gate in gates]).sum(0)
    shares = 100 * counts / counts.sum()
    edges = gates[0].edges
    axes.stairs(shares.numpy(), edges.numpy(), fill=True, color=COLOURS[0], alpha=0.8)
    mean = statistics.fmean(gate.mean for gate in gates)
    largest = max(gate.quartiles[-1].item() for gate in gates)
    axes.axvline(mean, color=COLOURS[1], label=f"mean {mean:.3f}")
    if gates[0].limits == (0, 1):
        small = statistics.fmean(gate.below_tenth for gate in gates)
        label = f"{small:.1%} are below {SMALL_GATE}"
        axes.axvline(SMALL_GATE, color="#666666", linestyle=":", label=label)
    axes.plot([], [], " ", label=f"maximum {largest:.3f}")
    use_log_scale(axes)
    axes.set_xlabel(f"{gates[0].name}, all layers")
    axes.set_ylabel("% of values")
    finish_lines(axes, 3)
