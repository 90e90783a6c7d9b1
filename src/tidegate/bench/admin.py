"""The settings that a running Tidegate server can change, through its admin endpoints."""

from typing import Any

import msgspec

from tidegate.base.errors import ConfigError, TidegateError
from tidegate.bench.client import Client
from tidegate.bench.connection import ExchangeFailed
from tidegate.bench.whole import Whole

Value = str | int | float | bool
Combination = dict[str, Value]  # a value for each name

_SHARES = "shares"  # the endpoint whose settings mean nothing while one lane has the whole device


class Refused(TidegateError):
    """The server does not take this combination; the message is its own."""


class Admin:
    """A setting's name is ``ENDPOINT.FIELD`` and is set with {FIELD: value} at /admin/ENDPOINT; a field of the same
    name as its endpoint is left out: ``mode``, ``shares.prefill``."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def info(self) -> Any:
        """What the server says of its engine. Raises ConfigError where nobody may ask, or nothing answers."""
        return await self._exchange("info", None)

    async def set(self, combination: Combination) -> None:
        """Returns once all of it is in force. Raises Refused, or ConfigError for what can't ever be set here."""
        bodies: dict[str, dict[str, Value]] = {}
        for name, value in combination.items():
            endpoint, _, field = name.partition(".")
            bodies.setdefault(endpoint, {})[field or endpoint] = value
        for endpoint, body in bodies.items():
            await self._exchange(endpoint, body)

    async def in_force(self, combination: Combination) -> Combination:
        """Without shares, where the mode that is set now does not divide the device."""
        stats = msgspec.convert(await self._exchange("stats", None), _Stats)
        if sum(bool(lane.phases) for lane in stats.lanes.values()) > 1:
            return combination
        return {name: value for name, value in combination.items() if name.partition(".")[0] != _SHARES}

    async def _exchange(self, endpoint: str, body: dict[str, Value] | None) -> Any:
        path, answer = f"/admin/{endpoint}", Whole()
        try:
            if body is None:
                await self._client.get(path, answer)
            else:
                await self._client.post(path, msgspec.json.encode(body), answer)
        except ExchangeFailed as failure:
            raise TidegateError(f"The server did not answer at {path}: {failure}.") from None
        if answer.status == 404 or answer.status == 405:
            raise ConfigError(f"The server has no {path}, so nothing of that name can be swept.")
        if answer.status in (401, 403):
            raise ConfigError(f"The server does not let this client use {path} (see --admin-key): {_words(answer)}")
        if answer.status != 200:
            raise Refused(_words(answer))
        return msgspec.json.decode(answer.body)


def _words(answer: Whole) -> str:
    """OpenAI's form of an error, or whatever came."""
    try:
        return msgspec.json.decode(answer.body, type=_Error).error.message
    except msgspec.MsgspecError:
        return f"status {answer.status}: {answer.text}"


class _Lane(msgspec.Struct):
    phases: str = ""


class _Stats(msgspec.Struct):
    lanes: dict[str, _Lane] = {}


class _Message(msgspec.Struct):
    message: str


class _Error(msgspec.Struct):
    error: _Message
