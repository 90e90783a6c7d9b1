"""Gates by name."""

from tidegate.base.errors import ConfigError
from tidegate.slo.auto_gate import AutoGate
from tidegate.slo.belief import Belief
from tidegate.slo.drift_gate import DriftGate
from tidegate.slo.gate import Gate, Limits
from tidegate.slo.goodput import Slo
from tidegate.slo.semi_pd_gate import SemiPdGate
from tidegate.slo.static_gate import StaticGate

GATES = ("static", "semi-pd", "drift", "auto")


def predicts(gate: str) -> bool:
    """Whether it decides from predictions."""
    return gate != "static"


def make_gate(name: str, limits: Limits, shares: dict[str, float], slo: Slo | None, belief: Belief | None) -> Gate:
    """Raises ConfigError where a gate needs an SLO, predictions or divisions, and there are none."""
    if name == "static":
        return StaticGate(limits, shares)
    if slo is None:
        raise ConfigError(f"--gate {name} needs an SLO to hold: give --slo, e.g. --slo ttft=500ms,tpot=25ms")
    if belief is None:
        raise ConfigError(f"--gate {name} needs a latency model of this device, and there is none")
    if name == "auto":
        return AutoGate(limits, slo, belief)
    if not belief.model.divisions:
        raise ConfigError(f"--gate {name} divides the device, and this one can't be divided; use --mode chunked")
    match name:
        case "semi-pd":
            return SemiPdGate(limits, slo, belief, shares["P"])
        case "drift":
            return DriftGate(limits, slo, belief, shares["P"])
    raise ConfigError(f"unknown gate {name!r}; choose one of {', '.join(GATES)}")
