"""Whether a server is idle: it answers a short request about as fast as it did when nothing else was running."""

import asyncio
from statistics import median

from tidegate.base.clock import now_s
from tidegate.base.errors import TidegateError
from tidegate.bench.client import Client
from tidegate.bench.load import Limits, Record, run_load
from tidegate.bench.payload import PATHS, Payloads
from tidegate.bench.plan import planned
from tidegate.bench.workloads import Request

_SHORT = Request(prompt_tokens=8, output_tokens=2)
_RUN = 0  # the number of a run makes its prompts; measured runs count from 1
_SAMPLES = 3  # of an idle server
_SLOWER = 1.5  # than on an idle server, and yet idle
_TIMER_S = 0.02  # differences as small as this are no sign of work
_PAUSE_S = 0.2


async def check_server(client: Client, payloads: Payloads, limits: Limits) -> float:
    """The seconds that one short request takes, unmeasured: what is wrong for all requests shows here.

    Raises TidegateError when the server fails it.
    """
    record = await _ask(client, payloads, limits)
    if record.failure is not None:
        raise TidegateError(f"The server failed a first short request: {record.failure.kind}: {record.failure.message}")
    return _duration_s(record)


class IdleCheck:
    """``learn`` before anything else is sent to the server."""

    def __init__(self, client: Client, payloads: Payloads, limits: Limits) -> None:
        self._server = (client, payloads, limits)
        self._idle_s = 0.0

    async def learn(self) -> None:
        """Raises TidegateError like ``check_server``."""
        self._idle_s = median([await check_server(*self._server) for _ in range(_SAMPLES)])

    async def wait(self, timeout_s: float) -> bool:
        """Returns once two answers in a row were fast enough: True, or False after ``timeout_s``.

        Raises TidegateError where even then the server fails to answer.
        """
        fast_in_a_row, end_s = 0, now_s() + timeout_s
        while fast_in_a_row < 2:
            record = await _ask(*self._server)
            is_fast = record.failure is None and _duration_s(record) <= _SLOWER * self._idle_s + _TIMER_S
            fast_in_a_row = fast_in_a_row + 1 if is_fast else 0
            if not is_fast:
                if now_s() >= end_s:
                    if record.failure is not None:
                        why = f"{record.failure.kind}: {record.failure.message}"
                        raise TidegateError(f"The server has not recovered from its last load: {why}")
                    return False
                await asyncio.sleep(_PAUSE_S)
        return True


async def _ask(client: Client, payloads: Payloads, limits: Limits) -> Record:
    plan = planned([_SHORT], payloads, _RUN)
    (record,), _ = await run_load(client, PATHS[payloads.endpoint], plan, limits)
    return record


def _duration_s(record: Record) -> float:
    return record.times_s[-1] - record.sent_s
