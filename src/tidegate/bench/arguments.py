"""What the commands of ``tidegate bench`` have in common on the command line: the server, the workload, and values."""

import argparse
import contextlib
import math
import re
import resource
from pathlib import Path
from typing import Any, cast

from tidegate.base.errors import ConfigError
from tidegate.bench.arrivals import Bursts, Pattern
from tidegate.bench.payload import PATHS, Endpoint, Payloads
from tidegate.bench.plot import load_matplotlib
from tidegate.bench.workloads import WORKLOADS
from tidegate.slo.goodput import Slo


def add_server(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("server")
    group.add_argument("--url", default="http://127.0.0.1:8000", help="(default: http://127.0.0.1:8000)")
    group.add_argument("--model", metavar="NAME", help="(default: the first that the server has)")
    group.add_argument("--endpoint", default="completions", choices=list(PATHS), help="(default: completions)")
    group.add_argument("--api-key", metavar="KEY")
    group.add_argument(
        "--vocab-size",
        type=whole,
        default=32000,
        metavar="N",
        help="prompts are random token ids up to N - 1 (default: 32000)",
    )
    group.add_argument(
        "--usage",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask the server to count the tokens, to check the number of events against (default: on)",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for outputs of full length; shorter ones have failed (default: on)",
    )


def add_workload(command: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """The group is returned, for what else belongs there."""
    group = command.add_argument_group("load")
    group.add_argument(
        "--workload",
        default="conv",
        metavar="NAME|FILE|STEPS",
        help=f"{', '.join(WORKLOADS)}; or a trace: Azure's CSV, Mooncake's JSON lines, or CSV lines "
        '"input,output"; or several in turn with their seconds, as conv@30,code@30, and rates in requests per second, '
        "as conv@30x20,code@30x12, which are scaled to the mean asked for (default: conv)",
    )
    group.add_argument("--prompt-tokens", type=whole, metavar="N", help="the same length for all prompts")
    group.add_argument("--output-tokens", type=whole, metavar="N", help="the same length for all outputs")
    group.add_argument(
        "--burstiness",
        type=positive,
        default=1.0,
        metavar="B",
        help="shape of the gamma distribution of times between arrivals: less than 1 is burstier, more is more even, "
        "as in vLLM (default: 1, Poisson)",
    )
    group.add_argument(
        "--burst",
        type=_bursts,
        metavar="FACTOR:ON:OFF",
        help="FACTOR times as many arrivals in ON seconds as in the OFF seconds that follow, as 4:5:25; the mean stays "
        "the rate asked for",
    )
    group.add_argument("--seed", type=int, default=0, help="of lengths, prompts and times (default: 0)")
    return group


def add_files(group: "argparse._ArgumentGroup", drawn: str) -> None:
    group.add_argument("--save", type=Path, metavar="FILE.json", help="write all results")
    group.add_argument("--plot", type=Path, metavar="FILE.png", help=f"draw {drawn} (needs matplotlib)")


def pattern(arguments: argparse.Namespace) -> Pattern:
    return Pattern(arguments.burstiness, arguments.burst)


def payloads(arguments: argparse.Namespace, model: str) -> Payloads:
    return Payloads(
        model=model,
        endpoint=cast(Endpoint, arguments.endpoint),
        vocab_size=arguments.vocab_size,
        seed=arguments.seed,
        ignore_eos=arguments.ignore_eos,
        include_usage=arguments.usage,
    )


def settings(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """For a file of results: all options, but no keys."""
    public = {name: None if name.endswith("_key") else value for name, value in vars(arguments).items()}
    values = {name: str(value) if isinstance(value, Path) else value for name, value in public.items()}
    return {name: value for name, value in values.items() if not callable(value)} | {"model": model}


def check_files(arguments: argparse.Namespace) -> None:
    """Before anything is sent: raises ConfigError where results could not be written in the end."""
    if arguments.plot:
        load_matplotlib()
    for path in filter(None, (arguments.save, arguments.plot)):
        if not path.parent.is_dir():
            raise ConfigError(f"There is no directory {path.parent} to write {path.name} to.")


def allow_many_connections() -> None:
    """Each request that is running has a connection, so raise the number of open files as far as allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems say "unlimited" and do not mean it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# ---- values


def whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("it must be 1 or more")
    return number


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("it must be more than 0")
    return number


def slo(text: str) -> Slo:
    """ "ttft=500ms,tpot=0.025s" as an SLO."""
    parts = dict(re.findall(r"(\w+)=([\d.]+(?:ms|s))(?:,|$)", text))
    if parts.keys() != {"ttft", "tpot"} or text.count(",") != 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not an SLO such as "ttft=500ms,tpot=25ms"')
    return Slo(seconds(parts["ttft"]), seconds(parts["tpot"]))


def seconds(text: str) -> float:
    """ "25ms" or "0.025s" in seconds."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)(ms|s)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 25ms or 0.5s")
    return float(found[1]) / (1000 if found[2] == "ms" else 1)


def share(text: str) -> float:
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError("it must be between 0 and 1")
    return number


def _bursts(text: str) -> Bursts:
    """ "4:5:25" as bursts."""
    try:
        factor, on_s, off_s = (float(part) for part in text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not FACTOR:ON:OFF such as 4:5:25") from None
    if not all(0 < number < math.inf for number in (factor, on_s, off_s)):
        raise argparse.ArgumentTypeError("FACTOR, ON and OFF must be more than 0")
    return Bursts(factor, on_s, off_s)
