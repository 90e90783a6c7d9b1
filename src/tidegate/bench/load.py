"""Sends requests at their times, whatever becomes of the earlier ones (open loop), and records what comes back."""

import asyncio
import contextlib
from array import array
from collections.abc import Callable, Sequence

import msgspec

from tidegate.base.clock import now_s
from tidegate.bench.client import Client
from tidegate.bench.connection import ExchangeFailed
from tidegate.bench.own_load import OwnLoad, OwnLoadMeter
from tidegate.bench.stream import Failure, StreamReader, Usage
from tidegate.slo.goodput import Latency


class Planned(msgspec.Struct, frozen=True):
    """``due_s``: after the start of the run. ``output_tokens``: that are asked for."""

    due_s: float
    prompt_tokens: int
    output_tokens: int
    body: bytes


class Limits(msgspec.Struct, frozen=True):
    """``all_expected``: an answer with fewer tokens than asked for has failed."""

    timeout_s: float = 600.0
    max_concurrency: int | None = None
    all_expected: bool = True


class Record(msgspec.Struct, frozen=True):
    """What became of one request. Times are in seconds after the start of the run.

    ``ready_s`` is when the client got to it, at ``due_s`` or a little later, and ``sent_s`` when it began to send: the
    same, unless the request had to wait for its turn under a maximum of concurrency. Latencies count from ``sent_s``,
    so opening a connection is part of them and that wait is not. ``tokens``: see ``StreamReader``.
    """

    prompt_tokens: int
    output_tokens: int
    due_s: float
    ready_s: float
    sent_s: float
    times_s: Sequence[float] = ()
    tokens: int = 0
    usage: Usage | None = None
    failure: Failure | None = None

    @property
    def latency(self) -> Latency | None:
        """None for a request that failed."""
        return Latency.of(self.sent_s, self.times_s, self.tokens) if self.failure is None else None


class Progress(msgspec.Struct):
    """Counts of a run while it goes on. Those that are done include those that failed."""

    total: int
    sent: int = 0
    done: int = 0
    failed: int = 0


async def run_load(
    client: Client,
    path: str,
    plan: Sequence[Planned],
    limits: Limits,
    progress: Callable[[Progress], None] = lambda _: None,
) -> tuple[list[Record], OwnLoad]:
    """Carries out ``plan``, whose times ascend. Returns the records in its order, and how the client itself fared.

    ``progress`` is called whenever a count has changed.
    """
    counts = Progress(len(plan))
    turns = asyncio.Semaphore(limits.max_concurrency) if limits.max_concurrency else contextlib.nullcontext()
    async with OwnLoadMeter() as meter, asyncio.TaskGroup() as group:
        start_s = now_s()

        async def one(planned: Planned) -> Record:
            ready_s = now_s()
            async with turns:
                counts.sent += 1
                progress(counts)
                record = await _request(client, path, planned, limits, start_s, ready_s)
            counts.done += 1
            counts.failed += record.failure is not None
            progress(counts)
            return record

        tasks = []
        for planned in plan:
            while (early_s := start_s + planned.due_s - now_s()) > 0:
                await asyncio.sleep(early_s)
            tasks.append(group.create_task(one(planned)))
    records = [task.result() for task in tasks]
    return records, meter.reading([record.ready_s - record.due_s for record in records])


async def _request(
    client: Client, path: str, planned: Planned, limits: Limits, start_s: float, ready_s: float
) -> Record:
    reader = StreamReader()
    sent_s = now_s()
    try:
        async with asyncio.timeout(limits.timeout_s):
            await client.post(path, planned.body, reader)
    except TimeoutError:
        reader.lost("timeout", f"no whole answer within {limits.timeout_s:g} s")
    except ExchangeFailed as failure:
        reader.lost(failure.kind, str(failure))
    reader.close(planned.output_tokens, all_expected=limits.all_expected)
    return Record(
        planned.prompt_tokens,
        planned.output_tokens,
        planned.due_s,
        ready_s - start_s,
        sent_s - start_s,
        array("d", [time_s - start_s for time_s in reader.times_s]),
        reader.tokens,
        reader.usage,
        reader.failure,
    )
