"""Reading SLOs as people write them: "ttft=500ms,tpot=25ms"."""

from tidegate.base.errors import ConfigError
from tidegate.slo.goodput import Metric, Slo

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
EXAMPLE = "ttft=500ms,tpot=25ms"


def parse_slo(text: str, metric: Metric = Metric.TPOT) -> Slo:
    """Both limits. Raises ConfigError for anything else."""
    limits = parse_limits(text)
    if set(limits) != {"ttft", "tpot"}:
        raise ConfigError(f"an SLO has a limit for ttft and one for tpot, as in {EXAMPLE!r}; {text!r} has not")
    return Slo(limits["ttft"], limits["tpot"], metric)


def parse_limits(text: str) -> dict[str, float]:
    """Seconds by name, "ttft" or "tpot". Raises ConfigError."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in ("ttft", "tpot") or name in limits:
            raise ConfigError(f"{text!r} is not an SLO such as {EXAMPLE!r}")
        limits[name] = parse_duration(value)
    return limits


def parse_duration(text: str) -> float:
    """ "500ms", "0.5s" or "0.5" (seconds), as seconds. Raises ConfigError unless it is positive and finite."""
    number = text.strip().rstrip("usm")
    try:
        seconds = float(number) * UNITS[text.strip()[len(number) :] or "s"]
    except (KeyError, ValueError):
        raise ConfigError(f"{text!r} is not a time such as 500ms or 0.5s") from None
    if not 0.0 < seconds < float("inf"):
        raise ConfigError(f"{text!r}: a limit is a time above 0")
    return seconds
