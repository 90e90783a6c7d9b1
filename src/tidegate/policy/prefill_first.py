"""Prompts before tokens: while any prompt is left, batches are prompts only (vLLM's original scheduler; the "vLLM-D"
of the Semi-PD paper). Best TTFT, and every running request waits while prompts come."""

from tidegate.policy.rule import Budget, Plan, View, fill


def prefill_first(view: View, budget: Budget) -> Plan:
    prefills = fill(view, budget)
    return Plan(prefills, [] if prefills else view.decodes())
