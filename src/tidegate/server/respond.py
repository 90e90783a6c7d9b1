"""Carrying out a generation and sending its answer, whole or as a stream.

Headers go out with the first token: until then a failure still has a status of its own. A client that leaves ends
its requests in the engine at once.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidegate.node.engine import Engine
from tidegate.server.answer import DONE, Answer, usage
from tidegate.server.errors import as_api_error
from tidegate.server.generation import Choice, Delta

_log = logging.getLogger(__name__)

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Delivery(msgspec.Struct, frozen=True):
    """``choices_per_prompt``: choices come in runs of one prompt, whose tokens are counted once in the usage."""

    choices_per_prompt: int = 1
    stream: bool = False
    usage_event: bool = False


class GenerationResponse(Response):
    """An ASGI response that generates while it is being sent."""

    def __init__(self, engine: Engine, choices: Sequence[Choice], answer: Answer, delivery: Delivery) -> None:
        self.status_code = 200
        self.background = None
        self._engine = engine
        self._choices = choices
        self._answer = answer
        self._delivery = delivery

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        try:
            for choice in self._choices:
                choice.start(self._engine)
            if self._delivery.stream:
                await self._stream(_Events(send))
            else:
                await self._whole(send)
        finally:
            for choice in self._choices:
                choice.leave(self._engine)

    async def _whole(self, send: Send) -> None:
        collected: list[tuple[Choice, list[Delta]]] = [(choice, []) for choice in self._choices]
        await _all([_collect(choice, deltas) for choice, deltas in collected])
        body = self._answer.whole(collected, self._usage())
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, events: "_Events") -> None:
        try:
            await _all([self._follow(choice, events) for choice in self._choices])
        except Exception as error:
            if not events.started:
                raise
            answer = as_api_error(error)
            if answer.code == "internal_error":
                _log.error("A stream failed", exc_info=error)
            await events.send(b"data: " + answer.body() + b"\n\n")
        else:
            if self._delivery.usage_event:
                await events.send(self._answer.usage_event(self._usage()))
        await events.end(DONE)

    async def _follow(self, choice: Choice, events: "_Events") -> None:
        answer = self._answer
        opening = answer.opening(choice)
        async for output in choice.outputs():
            deltas = choice.accept(output)
            last = len(deltas) - 1
            told = [answer.event(choice, delta, choice.finish if i == last else None) for i, delta in enumerate(deltas)]
            if told:
                await events.send(opening + b"".join(told))
                opening = b""
            if choice.finish is not None:
                return

    def _usage(self) -> dict[str, Any]:
        first_of_prompt = self._choices[:: self._delivery.choices_per_prompt]
        return usage(
            sum(len(choice.spec.prompt) for choice in first_of_prompt),
            sum(choice.num_tokens for choice in self._choices),
            sum(choice.cached_tokens for choice in first_of_prompt),
        )


class _Events:
    """A stream of server-sent events; its headers go out with the first."""

    def __init__(self, send: Send) -> None:
        self.started = False
        self._send = send

    async def send(self, events: bytes) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": False})


async def _collect(choice: Choice, deltas: list[Delta]) -> None:
    async for output in choice.outputs():
        deltas.extend(choice.accept(output))
        if choice.finish is not None:
            return


async def _all(works: list[Coroutine[Any, Any, None]]) -> None:
    """Runs all at once; the first failure cancels the others and is raised."""
    if len(works) == 1:
        await works[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs ``work`` to its end, or cancels it when the client leaves."""
    running = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not running.done():
            running.cancel()
            await asyncio.wait({running})
    if not running.cancelled():
        running.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
