"""One command, one file: `parser()` returns its argument parser, and `run(options)` runs it and returns the exit code.

The first sentence of the parser's description is the command's line in `crosslayer --help`. A command with subcommands
has `actions(parser)`, which adds them and returns their parsers. `DEFAULTS = False` asks for the given options alone.
"""
