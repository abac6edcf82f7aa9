"""From the results of the studies to the tables and figures of the evidence pages.

python -m benchmarks.evidence                     # all that is in docs/evidence
python -m benchmarks.evidence evidence-short      # take over a comparison's results first
"""
