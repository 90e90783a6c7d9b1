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

ABANDONED = Failure("abandoned", "it was still running when the measurement ended")


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
            exchange = Exchange(planned, start_s)
            async with turns:
                counts.sent += 1
                progress(counts)
                await exchange.run(client, path, limits)
            record = exchange.record()
            counts.done += 1
            counts.failed += record.failure is not None
            progress(counts)
            return record

        tasks = []
        for planned in plan:
            await sleep_until(start_s + planned.due_s)
            tasks.append(group.create_task(one(planned)))
    records = [task.result() for task in tasks]
    return records, meter.reading([record.ready_s - record.due_s for record in records])


class Exchange:
    """One request under way: what has come of it so far, and once it has ended its record."""

    def __init__(self, planned: Planned, start_s: float) -> None:
        self.planned = planned
        self.sent_s: float | None = None  # this one and those in ``times_s``: on the clock
        self.ended = False
        self._start_s = start_s
        self._ready_s = now_s()
        self._reader = StreamReader()

    @property
    def times_s(self) -> Sequence[float]:
        """When its tokens came, so far."""
        return self._reader.times_s

    async def run(self, client: Client, path: str, limits: Limits) -> None:
        reader = self._reader
        self.sent_s = now_s()
        try:
            async with asyncio.timeout(limits.timeout_s):
                await client.post(path, self.planned.body, reader)
        except TimeoutError:
            reader.lost("timeout", f"no whole answer within {limits.timeout_s:g} s")
        except ExchangeFailed as failure:
            reader.lost(failure.kind, str(failure))
        reader.close(self.planned.output_tokens, all_expected=limits.all_expected)
        self.ended = True

    def record(self) -> Record:
        """Of one that was sent; one that has not ended counts as abandoned."""
        assert self.sent_s is not None, "it has not been sent"
        planned, reader = self.planned, self._reader
        return Record(
            planned.prompt_tokens,
            planned.output_tokens,
            planned.due_s,
            self._ready_s - self._start_s,
            self.sent_s - self._start_s,
            array("d", [time_s - self._start_s for time_s in reader.times_s]),
            reader.tokens,
            reader.usage,
            reader.failure if self.ended else ABANDONED,
        )


async def sleep_until(moment_s: float) -> None:
    """Returns at that moment of the clock, or at once if it has passed."""
    while (early_s := moment_s - now_s()) > 0:
        await asyncio.sleep(early_s)
