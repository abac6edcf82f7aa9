"""One command, one file: `parser()` returns its parser; `run(options)` returns the exit code.

The first sentence of the parser's description is the command's line in `crosslayer --help`. A
command with subcommands has `actions(parser)`, which adds them and returns their parsers. With
`DEFAULTS = False`, `run` receives the given options alone, without defaults.
"""
