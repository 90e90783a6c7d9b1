"""The rules of lanes that run one phase only (Semi-PD, DistServe and their kin)."""

from tidegate.policy.rule import Budget, Plan, View, fill


def prefill_only(view: View, budget: Budget) -> Plan:
    return Plan(fill(view, budget), [])


def decode_only(view: View, budget: Budget) -> Plan:
    return Plan([], view.decodes())
