"""Time and memory of connections on this machine: `python -m benchmarks --help`."""
