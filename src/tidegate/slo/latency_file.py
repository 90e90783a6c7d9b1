"""Latency models in files, as JSON: what ``tidegate profile --out`` writes, or nothing but a ``LatencyModel``."""

import math
from itertools import pairwise
from pathlib import Path

import msgspec

from tidegate.base.errors import ConfigError
from tidegate.slo.latency import Costs, LatencyModel

FORMAT = 2  # changes with what a file, or a latency model, means


class _Versioned(msgspec.Struct):
    format: int = FORMAT  # a latency model by itself does not say


def read_latency_model(place: str | Path) -> LatencyModel:
    """Raises ConfigError, one sentence that names the file, for what can't be read or is no such model."""
    try:
        return decode(Path(place).read_bytes())
    except OSError as error:
        raise ConfigError(f"{place} can't be read as a latency model: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{place} is not a latency model, which tidegate profile --out writes: {error}") from error


def decode(body: bytes) -> LatencyModel:
    """Raises ValueError saying what is wrong."""
    version = msgspec.json.decode(body, type=_Versioned).format
    if version != FORMAT:
        raise ValueError(f"it has format {version}, not {FORMAT}; measure again")
    model = msgspec.json.decode(body, type=LatencyModel)
    shares = [division.share for division in model.divisions]
    if not _ascending(shares) or not all(0 < share < 1 for share in shares):
        raise ValueError(f"its divisions' shares {shares} do not ascend between 0 and 1")
    for costs in (model.whole, *(costs for each in model.divisions for costs in (each.prefill, each.decode))):
        _check(costs)
    return model


def _check(costs: Costs) -> None:
    if len(costs.tokens) < 2 or len(costs.tokens) != len(costs.dense_s) or not _ascending(costs.tokens):
        raise ValueError("its tokens do not ascend, are fewer than two, or are not as many as its times")
    times = (*costs.dense_s, costs.pair_s, costs.reused_s, costs.context_s)
    if not all(0 <= seconds < math.inf for seconds in times) or max(costs.dense_s) <= 0:
        raise ValueError("it has times that are negative or infinite, or batches that take none")


def _ascending(numbers: list[float] | tuple[int, ...]) -> bool:
    return all(lower < higher for lower, higher in pairwise(numbers))
