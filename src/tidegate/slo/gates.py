"""Gates by name."""

from tidegate.base.errors import ConfigError
from tidegate.slo.auto_gate import AutoGate
from tidegate.slo.drift_gate import DriftGate
from tidegate.slo.gate import Gate, Limits
from tidegate.slo.goodput import Slo
from tidegate.slo.latency import LatencyModel
from tidegate.slo.semi_pd_gate import SemiPdGate
from tidegate.slo.static_gate import StaticGate

GATES = ("static", "semi-pd", "drift", "auto")


def make_gate(name: str, limits: Limits, shares: dict[str, float], slo: Slo | None, model: LatencyModel | None) -> Gate:
    """Raises ConfigError where a gate needs an SLO, predictions or divisions, and there are none."""
    if name == "static":
        return StaticGate(limits, shares)
    if slo is None:
        raise ConfigError(f"--gate {name} needs an SLO to hold: give --slo, e.g. --slo ttft=500ms,tpot=25ms")
    if model is None:
        raise ConfigError(f"--gate {name} needs a latency model of this device, and there is none")
    if name == "auto":
        return AutoGate(limits, slo, model)
    if not model.divisions:
        raise ConfigError(f"--gate {name} divides the device, and this one can't be divided; use --mode chunked")
    match name:
        case "semi-pd":
            return SemiPdGate(limits, slo, model, shares["P"])
        case "drift":
            return DriftGate(limits, slo, model, shares["P"])
    raise ConfigError(f"unknown gate {name!r}; choose one of {', '.join(GATES)}")
