"""All commands: their arguments, and what the process ends with."""

import argparse
import sys

from tidegate import __version__
from tidegate.base.errors import ConfigError, TidegateError
from tidegate.bench.command import add_bench
from tidegate.bench.command import run as run_bench
from tidegate.bench.simulate import add_simulate
from tidegate.cli.engine_options import add_engine, engine_config, resolve_model
from tidegate.cli.screen import Screen
from tidegate.cli.serve import add_serve
from tidegate.node.profile import add_profile, profile
from tidegate.plan.command import add_plan


def main(argv: list[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    try:
        sys.exit(arguments.run(arguments))
    except ConfigError as error:
        print(f"tidegate: {error}", file=sys.stderr)
        sys.exit(2)
    except TidegateError as error:
        print(f"tidegate: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="tidegate",
        description="An LLM server whose prefill and decode share one device and divide its compute.",
    )
    top.add_argument("--version", action="version", version=f"tidegate {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_serve(
        commands.add_parser(
            "serve", help="serve a model over OpenAI's API", description="Serve a model over OpenAI's API."
        )
    )
    about = "measure how long steps take here, for the gates that decide from predictions"
    command = commands.add_parser("profile", help=about, description=about)
    add_engine(command)
    add_profile(command)
    command.set_defaults(run=run_profile, mode="auto")
    add_bench(commands)
    commands.choices["bench"].set_defaults(run=run_bench)
    add_simulate(commands)
    add_plan(commands)
    about = "say what this machine offers, what will be used, and why"
    commands.add_parser("doctor", help=about, description=about).set_defaults(run=run_doctor)
    return top


def run_doctor(arguments: argparse.Namespace) -> int:
    from tidegate.node.doctor import report  # imports torch, which a server's own process does without

    for what, is_so in report():
        print(f"{what:<12}{is_so}")
    return 0


def run_profile(arguments: argparse.Namespace) -> int:
    model, name = resolve_model(arguments.model)
    screen = Screen()
    screen.line(f"Tidegate {__version__} · {name}")
    config = engine_config(arguments, model)
    report = profile(config, arguments.seconds, arguments.out, arguments.samples, screen.progress)
    screen.line("")
    print(report)
    return 0
