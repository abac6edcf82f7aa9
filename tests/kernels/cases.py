"""The sizes each kernel is tried on."""

from crosslayer.bench.cases import (
    Case,
    attends,
    carries,
    gates,
    merges,
    mixes,
    norms,
    probes,
    sinkhorns,
)

__all__ = ["CASES", "SLOW", "Case"]

CASES = {
    "mix-1-of-1": mixes(1, 1, False),
    "mix-4-of-2": mixes(2, 4, False),
    "mix-4-of-5": mixes(5, 4, False),
    "mix-1-of-5-static": mixes(5, 1, True),
    "mix-4-of-2-static": mixes(2, 4, True),
    "gate-1": gates(1, True),
    "gate-3": gates(3, True),
    "gate-4-last": gates(4, False),
    "gate-8": gates(8, True),
    "attend-1": attends(1),
    "attend-2": attends(2),
    "attend-5": attends(5),
    "attend-5-ahead-3": attends(5, 3),
    "merge": merges(),
    "streams-2": carries(2),
    "streams-3-static": carries(3, static=True),
    "streams-4": carries(4),
    "streams-8": carries(8),
    "streams-3-rms": carries(3, parameters=1),
    "streams-4-layer": carries(4, parameters=2),
    "probe-2-each": probes(2, 4, centred=True),
    "probe-3-each": probes(3, 5),
    "probe-4-each-spread": probes(4, 6, pending=4),
    "probe-3-all": probes(3, 15, joint=True),
    "probe-4-all-centred": probes(4, 24, joint=True, centred=True),
    "probe-2-first": probes(2, 8, joint=True, pending=0),
    "probe-6-all": probes(6, 48, joint=True),
    "probe-16-each": probes(16, 18, centred=True),
    "sinkhorn-2": sinkhorns(2, 3),
    "sinkhorn-3": sinkhorns(3, 6),
    "sinkhorn-4": sinkhorns(4, 20),
    "sinkhorn-16": sinkhorns(16, 1),
    "norm-rms": norms(1),
    "norm-layer": norms(2),
}

# what a plain run leaves to the slow one: more sources, ways and streams of what it has tried
SLOW = {
    "mix-4-of-5",
    "mix-4-of-2-static",
    "gate-4-last",
    "gate-8",
    "attend-5-ahead-3",
    "streams-8",
    "sinkhorn-3",
    "probe-4-each-spread",
    "probe-3-each",
    "probe-4-all-centred",
    "probe-6-all",
    "probe-16-each",
}
