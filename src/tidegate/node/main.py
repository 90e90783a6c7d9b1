"""The engine process: reads the model into shared memory, starts the lanes, runs the core.

Started by ``node.client`` as ``python -m tidegate.node.main SOCKET``; the first message is the configuration.
"""

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import sys
from pathlib import Path

import msgspec

from tidegate.base.clock import now_s
from tidegate.base.errors import ConfigError, TidegateError
from tidegate.base.events import Event, LaneReady
from tidegate.base.specs import PoolSpec
from tidegate.core.config import CoreConfig
from tidegate.core.core import Core
from tidegate.core.record import Recorder
from tidegate.models.sources import open_model
from tidegate.node import wire
from tidegate.node.backend import Traits, make_backend
from tidegate.node.config import EngineConfig
from tidegate.node.node import Node, OnEvent
from tidegate.node.predictions import Subject
from tidegate.policy.modes import MODES
from tidegate.slo.gates import predicts
from tidegate.slo.latency import LatencyModel


def run(channel: wire.Channel, config: EngineConfig) -> None:
    start = now_s()

    def progress(stage: str, fraction: float) -> None:
        channel.send(wire.Progress(stage, fraction))

    progress("reading the model's configuration", 0.0)
    if config.mode not in MODES:
        raise ConfigError(f"unknown mode {config.mode!r}; choose one of {', '.join(MODES)}")
    source = open_model(config.model, config.load_format, config.seed)
    tokenizer = source.tokenizer_dir or source.gguf_file
    channel.send(wire.ModelFound(str(tokenizer) if tokenizer else None))
    backend = make_backend(config, source, progress)
    pool = backend.size_pool(config)
    mode = MODES[config.mode]
    subject = Subject(config, mode, source.spec, pool, backend)
    predictions = subject.given() or subject.guess()
    settings = core_config(config, backend.traits, source.spec.vocab_size, pool, predictions.model)
    Core(settings)  # raises ConfigError for what does not go together, before anything is loaded
    predicting = predicts(settings.gate_of(mode))

    def ready() -> wire.EngineInfo:
        gc.collect()
        gc.freeze()  # what stays is looked at by no collection any more: one over all of it would delay a step
        return wire.EngineInfo(
            model=source.spec,
            pool=pool,
            mode=mode.name,
            modes=list(MODES),
            max_model_len=pool.max_model_len,
            weight_bytes=backend.weight_bytes,
            kv_bytes=backend.kv_bytes,
            device=backend.description,
            sharing=backend.sharing,
            start_seconds=now_s() - start,
            lane_pids=lanes.pids(),
            limits=core.config.limits,
            predictions=predictions.source if predicting else "",
        )

    try:
        lanes = backend.open(mode.lanes, progress)
        up: list[Event] = []
        if not predictions.source:
            predictions = subject.kept() or predictions
        if predicting and not predictions.source:
            predictions = subject.measure(lanes, progress)
            up = [LaneReady(lane.name) for lane in mode.lanes]
        settings = msgspec.structs.replace(settings, latency=predictions.model)
        core = Core(settings)
        with contextlib.ExitStack() as stack:
            on_event: OnEvent = core.on_event
            if config.record is not None:
                on_event = Recorder(core, stack.enter_context(Path(config.record).open("wb"))).on_event
            Node(core, on_event, lanes, channel).run(ready, up)
    finally:
        backend.close()


def core_config(
    config: EngineConfig, traits: Traits, vocab_size: int, pool: PoolSpec, latency: LatencyModel
) -> CoreConfig:
    return CoreConfig(
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        max_num_seqs=pool.max_num_seqs,
        max_model_len=pool.max_model_len,
        vocab_size=vocab_size,
        max_num_batched_tokens=config.max_num_batched_tokens or traits.max_num_batched_tokens,
        max_prefill_tokens=traits.max_prefill_tokens,
        mode=config.mode,
        shares={"P": config.prefill_share, "D": 1.0 - config.prefill_share},
        order=config.order or ("slack" if config.slo else "shortest"),
        gate=config.gate,
        slo=config.slo,
        latency=latency,
        prefix_caching=config.prefix_caching,
        prefix_secret=os.urandom(32),
        max_waiting=config.max_waiting,
        reject_unreachable=config.reject_unreachable,
        slice_seconds=config.slice_ms / 1e3 if config.slice_ms is not None else traits.slice_seconds,
        min_slice_tokens=traits.min_slice_tokens,
        slice_quantum_tokens=traits.slice_quantum_tokens,
        max_slices=traits.max_slices,
        padding=traits.padding,
        prefill_tokens_per_s=traits.prefill_tokens_per_s,
    )


def first_message(channel: wire.Channel) -> EngineConfig | None:
    while True:
        select.select([channel], [], [])
        messages, closed = channel.receive()
        if messages:
            assert isinstance(messages[0], wire.NodeInit)
            return messages[0].config
        if closed:
            return None


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a ^C at the terminal is the server's to handle
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    channel = wire.Channel(socket.socket(fileno=int(sys.argv[1])), wire.ToNode)
    config = first_message(channel)
    if config is None:
        return
    status = 0
    try:
        run(channel, config)
    except TidegateError as error:
        channel.send(wire.Fatal(str(error), config=isinstance(error, ConfigError)))
        status = 2
    except MemoryError as error:
        channel.send(wire.Fatal(f"not enough memory: {error}"))
        status = 1
    if config.tensor_parallel_size > 1:
        sys.stderr.flush()
        os._exit(status)  # a thread or a device may be waiting for a rank that has been lost
    sys.exit(status)


if __name__ == "__main__":
    main()
