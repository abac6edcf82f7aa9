"""One command, one file: `parser()` says what it takes and `run(options)` does it and returns the exit code."""
