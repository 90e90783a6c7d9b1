"""An engine in a process of its own, as asyncio users see it: implements ``node.engine.Engine``."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from tidegate.base.errors import ConfigError, EngineDead, RequestError
from tidegate.base.events import Tuned
from tidegate.base.request import RequestSpec
from tidegate.base.stats import Stats
from tidegate.node import wire
from tidegate.node.config import EngineConfig
from tidegate.node.engine import OutputStream

CLOSE_SECONDS = 10.0
# What of the node itself uses OpenMP waits asleep; lanes have an environment of their own (node.process_lanes).
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
OnProgress = Callable[[str, float], None]


OnModel = Callable[[str | None], None]


def ignore(*_: object) -> None:
    """For callers that do not want to be told."""


async def start_engine(
    config: EngineConfig, on_progress: OnProgress = ignore, on_model: OnModel = ignore
) -> "EngineProcess":
    """Starts the engine and returns once it serves.

    ``on_progress`` gets start-up stages and the fraction done; ``on_model`` gets, early, where the tokenizer is (a
    directory, a .gguf file, or None). Raises ConfigError if the engine can't run as configured, EngineDead if it ends
    for another reason.
    """
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tidegate.node.main", str(theirs.fileno())]
    process = subprocess.Popen(
        command,
        pass_fds=(theirs.fileno(),),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env=ENVIRONMENT | os.environ,
    )
    theirs.close()
    reader, writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 22)
    decoder: msgspec.msgpack.Decoder[wire.FromNode] = msgspec.msgpack.Decoder(wire.FromNode)
    writer.write(wire.pack(wire.NodeInit(config)))
    try:
        while True:
            match await wire.read_message(reader, decoder):
                case wire.Progress(stage, fraction):
                    on_progress(stage, fraction)
                case wire.ModelFound(tokenizer):
                    on_model(tokenizer)
                case wire.Ready(info):
                    return EngineProcess(process, reader, writer, decoder, info)
                case wire.Fatal(reason, config=to_blame):
                    raise ConfigError(reason) if to_blame else EngineDead(reason)
    except asyncio.IncompleteReadError:
        status = process.wait()
        raise EngineDead(f"the engine process ended with status {status} while starting") from None
    except BaseException:
        writer.close()
        process.kill()
        process.wait()
        raise


class EngineProcess:
    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: "msgspec.msgpack.Decoder[wire.FromNode]",
        info: wire.EngineInfo,
    ) -> None:
        self.info = info
        self.process = process
        self.death = ""  # why it ended
        self._writer = writer
        self._streams: dict[str, OutputStream] = {}
        self._replies: dict[int, asyncio.Future[Stats]] = {}
        self._asked = 0
        self._reading = asyncio.create_task(self._read(reader, decoder))

    @property
    def alive(self) -> bool:
        return not self.death

    def submit(self, request: RequestSpec) -> OutputStream:
        self._check_alive()
        assert request.id not in self._streams, "request ids are unique"
        stream = self._streams[request.id] = OutputStream(request.id)
        self._send(wire.Submit(request))
        return stream

    def abort(self, request_id: str) -> None:
        if request_id in self._streams and self.alive:
            self._send(wire.Abort(request_id))

    async def stats(self) -> Stats:
        return await self._ask(wire.Ask(self._next_seq()))

    async def set_mode(self, mode: str) -> Stats:
        return await self._ask(wire.Ask(self._next_seq(), mode=mode))

    async def set_shares(self, shares: dict[str, float]) -> Stats:
        return await self._ask(wire.Ask(self._next_seq(), shares=shares))

    async def tune(self, settings: Tuned) -> Stats:
        return await self._ask(wire.Ask(self._next_seq(), tuned=settings))

    async def reset_prefix_cache(self) -> Stats:
        return await self._ask(wire.Ask(self._next_seq(), reset_prefix_cache=True))

    async def close(self) -> None:
        """Ends the engine process. Requests that still run end with EngineDead."""
        if self.alive:
            self._send(wire.Shutdown())
        try:
            await asyncio.wait_for(asyncio.to_thread(self.process.wait), CLOSE_SECONDS)
        except TimeoutError:
            self.process.kill()
            self.process.wait()
        await self._reading
        self._writer.close()

    def _next_seq(self) -> int:
        self._asked += 1
        return self._asked

    async def _ask(self, ask: wire.Ask) -> Stats:
        self._check_alive()
        future: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._replies[ask.seq] = future
        self._send(ask)
        return await future

    def _send(self, message: wire.ToNode) -> None:
        self._writer.write(wire.pack(message))

    def _check_alive(self) -> None:
        if self.death:
            raise EngineDead(self.death)

    async def _read(self, reader: asyncio.StreamReader, decoder: "msgspec.msgpack.Decoder[wire.FromNode]") -> None:
        reason = "the engine process has ended"
        try:
            while True:
                match await wire.read_message(reader, decoder):
                    case wire.Outputs(outputs):
                        for output in outputs:
                            stream = self._streams.get(output.id)
                            if stream is not None:
                                if output.finish is not None:
                                    del self._streams[output.id]
                                stream.put(output)
                    case wire.Reply(seq, stats, error):
                        future = self._replies.pop(seq)
                        if error:
                            future.set_exception(RequestError(error))
                        elif not future.done():
                            future.set_result(stats)
                    case wire.Fatal(fatal):
                        reason = fatal
        except (asyncio.IncompleteReadError, ConnectionError):
            self.death = reason
        for stream in self._streams.values():
            stream.put(EngineDead(reason))
        for future in self._replies.values():
            if not future.done():
                future.set_exception(EngineDead(reason))
        self._streams.clear()
        self._replies.clear()
