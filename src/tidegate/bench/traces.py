"""Reads recorded workloads from files of the user's:

Azure's LLM inference traces   CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens
Mooncake's traces              JSON lines with timestamp (ms), input_length, output_length, hash_ids
plain lengths                  CSV lines "input,output", with or without a header
Tidegate's own                 what `tidegate serve --record` wrote
"""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec

from tidegate.base.errors import ConfigError
from tidegate.bench.workloads import BLOCK_TOKENS, Request
from tidegate.core.record import asked_in, is_log


class Trace(NamedTuple):
    """Requests in the order of the file. ``timed``: each has its time, and the first is at 0."""

    recorded: list[Request]
    timed: bool

    def requests(self) -> Iterator[Request]:
        """The recorded requests again and again, each pass with block ids of its own: passes share no prefix."""
        next_block = 1 + max((block for request in self.recorded for block in request.blocks), default=0)
        for turn in count():
            for request in self.recorded:
                blocks = tuple(block + turn * next_block for block in request.blocks)
                yield msgspec.structs.replace(request, blocks=blocks)

    def replay(self, speedup: float) -> Iterator[Request]:
        """The recorded requests once, ``speedup`` times as fast as recorded."""
        for request in self.recorded:
            assert request.at_s is not None, "only timed traces are replayed"
            yield msgspec.structs.replace(request, at_s=request.at_s / speedup)


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


_MOONCAKE = msgspec.json.Decoder(_MooncakeRow)


def load_trace(path: Path) -> Trace:
    """Raises ConfigError, naming the line, for a file that is of none of these formats."""
    try:
        if is_log(path):
            served = [Request(asked.prompt_tokens, asked.output_tokens, asked.arrived_s) for asked in asked_in(path)]
            if not served:
                raise ConfigError(f"No request in the log {path} got any tokens.")
            return Trace(_from_zero(served), timed=True)
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The workload {path} can't be read: {error}.") from None
    first = lines[0].strip() if lines else ""
    parse: Callable[[str], Request]
    if first.startswith("{"):
        parse, header, timed = _mooncake_row, 0, True
    elif "ContextTokens" in first:
        parse, header, timed = _azure_rows(first), 1, True
    else:
        parse, header, timed = _plain_row, int(not first[:1].isdigit()), False
    requests = []
    for number, line in enumerate(lines[header:], 1 + header):
        try:
            if line.strip():
                requests.append(_checked(parse(line)))
        except (ValueError, KeyError, msgspec.MsgspecError) as error:
            raise ConfigError(f"Line {number} of the workload {path} can't be read as a request: {error}.") from None
    if not requests:
        raise ConfigError(f"The workload {path} has no requests.")
    return Trace(_from_zero(requests) if timed else requests, timed)


def _mooncake_row(line: str) -> Request:
    row = _MOONCAKE.decode(line)
    return Request(row.input_length, row.output_length, row.timestamp / 1000, row.hash_ids)


def _azure_rows(header: str) -> Callable[[str], Request]:
    columns = [name.strip() for name in header.split(",")]

    def parse(line: str) -> Request:
        row = dict(zip(columns, line.split(","), strict=True))
        at = datetime.fromisoformat(row["TIMESTAMP"].strip()).replace(tzinfo=UTC)
        return Request(int(row["ContextTokens"]), int(row["GeneratedTokens"]), at.timestamp())

    return parse


def _plain_row(line: str) -> Request:
    prompt_tokens, output_tokens = line.split(",")
    return Request(int(prompt_tokens), int(output_tokens))


def _checked(request: Request) -> Request:
    if request.prompt_tokens < 1 or request.output_tokens < 1:
        raise ValueError("lengths are 1 or more tokens")
    if request.blocks and len(request.blocks) * BLOCK_TOKENS < request.prompt_tokens:
        raise ValueError(f"{len(request.blocks)} blocks do not cover {request.prompt_tokens} tokens")
    return request


def _from_zero(requests: list[Request]) -> list[Request]:
    """In order of time, with the first at 0."""
    ordered = sorted(requests, key=lambda request: request.at_s or 0.0)
    start = ordered[0].at_s or 0.0
    return [msgspec.structs.replace(request, at_s=(request.at_s or 0.0) - start) for request in ordered]
