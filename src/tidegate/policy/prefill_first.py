"""Prompts before tokens: while any prompt is left, batches are prompts only (vLLM's original scheduler; the "vLLM-D"
of the Semi-PD paper). Best TTFT, and every running request waits while prompts come."""

from tidegate.policy.rule import Plan, View, fill


def prefill_first(view: View, budget_tokens: int) -> Plan:
    prefills = fill(view, budget_tokens)
    return Plan(prefills, [] if prefills else view.decodes())
