"""``tidegate bench``: its kinds of measurement."""

import argparse
from collections.abc import Callable, Coroutine

import uvloop

from tidegate.bench import goodput_command, serve
from tidegate.bench.arguments import allow_many_connections, check_files


def add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command ``bench``; ``run`` carries it out."""
    bench = commands.add_parser("bench", help="measure a running server", description="Measure a running server.")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="KIND")
    for kind in (serve, goodput_command):
        kind.add_command(kinds)


def run(arguments: argparse.Namespace) -> int:
    """The exit code: 0 when any request was answered. Raises ConfigError and TidegateError."""
    check_files(arguments)
    allow_many_connections()
    measure: Callable[[argparse.Namespace], Coroutine[None, None, int]] = arguments.measure
    return uvloop.run(measure(arguments))
