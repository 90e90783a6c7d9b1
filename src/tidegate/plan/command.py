"""``tidegate plan``: which way of serving a model gives the most goodput on given hardware."""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from tidegate import __version__
from tidegate.base.errors import ConfigError
from tidegate.bench.plot import load_matplotlib
from tidegate.bench.screen import say
from tidegate.bench.workloads import WORKLOADS
from tidegate.plan.demand import Demand
from tidegate.plan.hardware import GPUS, hardware
from tidegate.plan.plot import plot
from tidegate.plan.report import text
from tidegate.plan.search import search
from tidegate.plan.setting import Setting
from tidegate.plan.shapes import KNOWN, find_shape
from tidegate.plan.summary import summary
from tidegate.slo.flags import add_slo_metric
from tidegate.slo.goodput import Metric
from tidegate.slo.latency_file import read_latency_model
from tidegate.slo.parse import EXAMPLE, parse_slo


def add_plan(commands: Any) -> None:
    about = "find the way of serving a model with the most goodput on given hardware, without running it"
    command = commands.add_parser("plan", help=about, description=about[0].upper() + about[1:] + ".")
    command.set_defaults(run=run)
    command.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help=f"a config.json, a directory with one, a .gguf file, a hub id, or one of {', '.join(KNOWN)}",
    )
    command.add_argument(
        "--gpu", required=True, metavar="NAME", help=f"{', '.join(GPUS)}, or cpu:CORES (cpu: those of this machine)"
    )
    command.add_argument("--gpus", type=int, default=1, metavar="N", help="how many of them (default: 1)")
    command.add_argument("--gpus-per-node", type=int, metavar="N", help="that NVLink connects (default: the GPU's own)")
    command.add_argument(
        "--slo", required=True, metavar="LIMITS", help=f'what 90 %% of the requests must meet, e.g. "{EXAMPLE}"'
    )
    add_slo_metric(command)
    command.add_argument(
        "--workload",
        default="conv",
        metavar="NAME",
        help=f"{', '.join(WORKLOADS)}, or a trace's file, whose lengths are used (default: conv)",
    )
    command.add_argument(
        "--latency-model", metavar="FILE", help="measured on one such device with this model (default: the roofline's)"
    )
    command.add_argument("--seed", type=int, default=0, help="of lengths, arrivals and noise (default: 0)")
    command.add_argument("--all", action="store_true", help="list every candidate, also those not simulated")
    command.add_argument("--json", metavar="FILE", help="write everything to a file")
    command.add_argument("--plot", metavar="FILE", help="draw the candidates (needs matplotlib)")


def run(arguments: argparse.Namespace) -> int:
    if arguments.plot:
        load_matplotlib()
    setting = setting_of(arguments)
    screen = _Line()
    found = search(setting, screen.progress)
    screen.clear()
    result = summary(setting, found, __version__, arguments.workload, arguments.seed)
    say(text(result, arguments.all))
    if arguments.json:
        encoded = msgspec.json.format(msgspec.json.encode(result), indent=1)
        _write(arguments.json, lambda path: path.write_bytes(encoded))
    if arguments.plot:
        _write(arguments.plot, lambda path: plot(result, path))
    return 0


def setting_of(arguments: argparse.Namespace) -> Setting:
    """Raises ConfigError for what makes no sense."""
    device = hardware(arguments.gpu)
    if arguments.gpus_per_node is not None:
        if arguments.gpus_per_node < 1:
            raise ConfigError(f"--gpus-per-node is at least 1, not {arguments.gpus_per_node}")
        device = device._replace(per_node=arguments.gpus_per_node)
    return Setting(
        arguments.model,
        find_shape(arguments.model),
        device,
        arguments.gpus,
        parse_slo(arguments.slo, Metric(arguments.slo_metric)),
        Demand.of(arguments.workload, arguments.seed),
        read_latency_model(arguments.latency_model) if arguments.latency_model else None,
    )


def _write(file: str, write: Any) -> None:
    try:
        write(Path(file))
    except OSError as error:
        raise ConfigError(f"{file} can't be written: {error.strerror}") from None


class _Line:
    """Progress on stderr, one line that is overwritten; nothing where that is no terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()

    def progress(self, what: str, fraction: float) -> None:
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{'█' * int(fraction * 24):░<24} {fraction:4.0%} {what}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
