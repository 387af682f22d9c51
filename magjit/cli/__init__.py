"""The command line: ``python -m magjit`` and the ``magjit`` script.

    parser -> commands -> targets (what `explain` runs), survey (what `annotations missing` runs)

The parser imports neither torch nor the C part, so that help and `env` work without them.
"""

from magjit.cli.parser import main

__all__ = ["main"]
