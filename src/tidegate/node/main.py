"""The engine process: reads the model into shared memory, starts the lanes, runs the core.

Started by ``node.client`` as ``python -m tidegate.node.main SOCKET``; the first message is the configuration.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import sys
from pathlib import Path

from tidegate.base.clock import now_s
from tidegate.base.errors import ConfigError, TidegateError
from tidegate.core.config import CoreConfig
from tidegate.core.core import Core
from tidegate.core.record import Recorder
from tidegate.device.core_sets import CoreSets
from tidegate.device.memory import SharedMemory, lay_out, region_bytes
from tidegate.models.linears import load, stored, stored_bytes
from tidegate.models.sources import open_model
from tidegate.node import wire
from tidegate.node.config import EngineConfig
from tidegate.node.node import Node, OnEvent
from tidegate.node.process_lanes import ProcessLanes
from tidegate.node.sizing import size_pool
from tidegate.policy.modes import MODES


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
    shapes = stored(source.spec, config.quantization)
    pool_spec = size_pool(source.spec, config, weight_bytes=stored_bytes(source.spec, config.quantization))
    core = Core(core_config(config, source.spec.vocab_size, pool_spec.num_blocks, pool_spec.max_model_len))
    regions, num_bytes = lay_out(source.spec, pool_spec, shapes)
    memory = SharedMemory.create(num_bytes)
    lanes = ProcessLanes(memory.fd)
    try:
        for lane in core.mode.lanes:
            lanes.start(lane.name)  # they import while the weights are read
        weights, pool = memory.open_pool(pool_spec, regions)
        load(source, weights, lambda fraction: progress("loading weights", fraction))
        cores = CoreSets(config.cores).cores
        progress("starting lanes", 0.0)
        lanes.provide(pool, lambda lane: wire.LaneInit(lane, source.spec, pool_spec, regions, num_bytes, cores))
        sizes = {region.name: region_bytes(region) for region in regions}

        def ready() -> wire.EngineInfo:
            return wire.EngineInfo(
                model=source.spec,
                pool=pool_spec,
                mode=core.mode.name,
                modes=list(MODES),
                max_model_len=pool_spec.max_model_len,
                weight_bytes=sum(size for name, size in sizes.items() if name.startswith("weights/")),
                kv_bytes=sizes["kv"],
                device=f"cpu, {len(cores)} cores" if len(cores) > 1 else "cpu, 1 core",
                sharing="core sets",
                start_seconds=now_s() - start,
                lane_pids=lanes.pids(),
            )

        with contextlib.ExitStack() as stack:
            on_event: OnEvent = core.on_event
            if config.record is not None:
                on_event = Recorder(core, stack.enter_context(Path(config.record).open("wb"))).on_event
            Node(core, on_event, lanes, channel).run(ready)
    finally:
        lanes.close()


def core_config(config: EngineConfig, vocab_size: int, num_blocks: int, max_model_len: int) -> CoreConfig:
    return CoreConfig(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        mode=config.mode,
        shares={"P": config.prefill_share, "D": 1.0 - config.prefill_share},
        order=config.order,
        prefix_caching=config.prefix_caching,
        prefix_secret=os.urandom(32),
        max_waiting=config.max_waiting,
        slice_seconds=config.slice_ms / 1e3,
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
    try:
        run(channel, config)
    except TidegateError as error:
        channel.send(wire.Fatal(str(error), config=isinstance(error, ConfigError)))
        sys.exit(2)
    except MemoryError as error:
        channel.send(wire.Fatal(f"not enough memory: {error}"))
        sys.exit(1)


if __name__ == "__main__":
    main()
