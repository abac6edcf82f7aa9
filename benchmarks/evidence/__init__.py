"""From the results of docs/evidence.md's studies to its tables and figures.

python -m benchmarks.evidence                     # all that is in docs/evidence
python -m benchmarks.evidence evidence-short      # take over a comparison's results first
"""
