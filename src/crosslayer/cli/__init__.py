"""One command, one file: `parser()` says what it takes and `run(options)` does it and returns the exit code.

One that is several has `actions(parser)` too, which adds a subcommand for each and returns their parsers.
"""
