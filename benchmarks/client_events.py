"""How many streamed events a second the load generator can take on one core.

    python benchmarks/client_events.py [--streams 64] [--tokens 2000] [--rate 15000]

A server in another process sends ready-made events, one to each stream in turn, at ``--rate`` events a second or as
fast as they are taken. The client timestamps, reads and counts them as in a measurement. Events that wait for the
client are read several at once, which costs it less: events per read say how far that went.
"""

import argparse
import asyncio
import multiprocessing
import resource
import time

import uvloop

from tidegate.bench.client import Client
from tidegate.bench.load import Limits, Planned, Record, run_load
from tidegate.bench.own_load import OwnLoad

EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"a-model","choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null}]}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def emit(streams: int, tokens: int, rate: float, ports: "multiprocessing.Queue[int]") -> None:
    """Waits for all streams, then sends every one its events; returns once the last is closed."""
    writers: list[asyncio.StreamWriter] = []
    complete, left = asyncio.Event(), asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writers.append(writer)
        if len(writers) == streams:
            complete.set()
        await left.wait()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    ports.put(server.sockets[0].getsockname()[1])
    await complete.wait()
    event = chunk(EVENT)
    for writer in writers:
        writer.write(HEAD)
    start = time.monotonic()
    for step in range(tokens):
        for writer in writers:
            writer.write(event)
        if rate:
            await asyncio.sleep(max(0.0, start + (step + 1) * streams / rate - time.monotonic()))
        for writer in writers:
            await writer.drain()
    for writer in writers:
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()
        writer.close()
    left.set()
    await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


def serve(streams: int, tokens: int, rate: float, ports: "multiprocessing.Queue[int]") -> None:
    uvloop.run(emit(streams, tokens, rate, ports))


async def take(port: int, streams: int, tokens: int) -> tuple[list[Record], OwnLoad]:
    client = Client(f"http://127.0.0.1:{port}")
    plan = [Planned(0.0, 1, tokens, b"{}") for _ in range(streams)]
    result = await run_load(client, "/v1/completions", plan, Limits())
    client.close()
    return result


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000, help="of each stream")
    parser.add_argument("--rate", type=float, default=0.0, help="events a second in all (default: as fast as taken)")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ports: multiprocessing.Queue[int] = context.Queue()
    server = context.Process(target=serve, args=(options.streams, options.tokens, options.rate, ports))
    server.start()
    port = ports.get()
    used = cpu_s()
    records, own = uvloop.run(take(port, options.streams, options.tokens))
    used = cpu_s() - used
    server.join()
    events = sum(len(record.times_s) for record in records)
    reads = sum(len(set(record.times_s)) for record in records)
    span = max(record.times_s[-1] for record in records) - min(record.times_s[0] for record in records)
    print(
        f"{events} events in {span:.2f} s: {events / span:,.0f} a second by the clock, {events / used:,.0f} a second "
        f"of client CPU ({1e6 * used / events:.1f} us each), {events / reads:.2f} events per read, "
        f"loop lag p99 {own.lag_p99_s * 1e3:.1f} ms"
    )


if __name__ == "__main__":
    main()
