"""``tidegate serve``."""

import argparse
import asyncio
from pathlib import Path

import uvloop

from tidegate import __version__
from tidegate.base.clock import now_s
from tidegate.cli.engine_options import add_engine, engine_config, resolve_model, slo
from tidegate.cli.screen import Screen
from tidegate.node.client import start_engine
from tidegate.node.wire import EngineInfo
from tidegate.server.app import create_app
from tidegate.server.load_tokenizer import load_tokenizer
from tidegate.server.run import listen, serve
from tidegate.server.settings import ServerSettings
from tidegate.server.tokenizer import Tokenizer


def add_serve(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=lambda arguments: uvloop.run(run_server(arguments)))
    add_engine(command)
    group = command.add_argument_group("predictions", "for gates that need them: all but static")
    group.add_argument(
        "--calibration-seconds",
        type=float,
        default=25.0,
        metavar="S",
        help="to measure for, where nothing was measured before; some 20 steps are measured always (default: 25)",
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
