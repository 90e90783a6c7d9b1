"""How many streamed events a second the server process can send on one core.

    python benchmarks/server_events.py [--streams 64] [--tokens 2000] [--tokenizer model.gguf]

A fake engine gives every stream one token a step, as fast as it is taken, over real sockets to a client in another
process, which counts events and throws them away. The time measured is the server's CPU time, so the client's core
does not count.
"""

import argparse
import asyncio
import json
import multiprocessing
import signal
import socket
import time
from pathlib import Path

import uvloop

from tidegate.server.app import create_app
from tidegate.server.fake import FakeEngine
from tidegate.server.load_tokenizer import load_tokenizer
from tidegate.server.run import listen, serve
from tidegate.server.settings import ServerSettings


def read_streams(port: int, streams: int, tokens: int, results: "multiprocessing.Queue[tuple[int, float]]") -> None:
    """Opens all streams, reads them to their ends, and reports the number of events and the seconds taken."""
    body = json.dumps(
        {"prompt": list(range(300, 340)), "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        events = 0
        while chunk := await reader.read(1 << 20):
            events += chunk.count(b"data: ")
        writer.close()
        return events - 1  # [DONE] is not a token

    async def every() -> int:
        return sum(await asyncio.gather(*(one() for _ in range(streams))))

    start = time.perf_counter()
    events = uvloop.run(every())
    results.put((events, time.perf_counter() - start))


async def measure(
    listener: socket.socket, engine: FakeEngine, tokenizer: Path | None, client: multiprocessing.Process
) -> float:
    """CPU seconds of this process while the client reads."""
    app = create_app(engine, load_tokenizer(tokenizer) if tokenizer else None, ServerSettings(model_names=("fake",)))
    serving = asyncio.create_task(serve(app, listener=listener, drain_timeout_s=1))
    start = time.process_time()
    client.start()
    while client.is_alive():
        await asyncio.sleep(0.05)
    used = time.process_time() - start
    signal.raise_signal(signal.SIGTERM)
    await serving
    return used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--tokenizer", type=Path, help="a .gguf file or a directory; without one, texts are empty")
    options = parser.parse_args()
    listener = listen("127.0.0.1", 0)
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[int, float]] = context.Queue()
    client = context.Process(
        target=read_streams, args=(listener.getsockname()[1], options.streams, options.tokens, results)
    )
    cpu_s = uvloop.run(measure(listener, FakeEngine(), options.tokenizer, client))  # type: ignore[arg-type]
    events, wall_s = results.get()
    print(f"{events} events in {wall_s:.2f} s: {events / wall_s:,.0f} a second by the clock")
    print(f"{events / cpu_s:,.0f} a second of server CPU ({1e6 * cpu_s / events:.1f} us each)")


if __name__ == "__main__":
    main()
