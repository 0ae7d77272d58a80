"""The command ``fused-logp-hub``.

A subcommand is a module with ``HELP``, ``add_arguments(parser)`` and ``run(options) -> exit code``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fused_logp_hub._errors import FusedLogpError
from fused_logp_hub._version import __version__
from fused_logp_hub.cli import bench, demo, doctor
from fused_logp_hub.cli.console import print_error

# Register a subcommand here.
COMMANDS = {"bench": bench, "demo": demo, "doctor": doctor}

_INTERRUPTED = 130  # what shells report for a process that SIGINT ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the process's exit code; 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="fused-logp-hub",
        description="Fused log-probability kernels, compiled ahead of time.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.HELP, description=command.__doc__)
        command.add_arguments(subparser)
    options = parser.parse_args(arguments)
    try:
        code: int = COMMANDS[options.command].run(options)
        return code
    except FusedLogpError as error:
        print_error(str(error))
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
