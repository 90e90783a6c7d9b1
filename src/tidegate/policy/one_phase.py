"""The rules of lanes that run one phase only (Semi-PD, DistServe and their kin)."""

from tidegate.policy.rule import Plan, View, fill


def prefill_only(view: View, budget_tokens: int) -> Plan:
    return Plan(fill(view, budget_tokens), [])


def decode_only(view: View, budget_tokens: int) -> Plan:
    return Plan([], view.decodes())
