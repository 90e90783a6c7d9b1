"""Every decode, and a chunk of prompt tokens with what is left of the budget (Sarathi-Serve, OSDI '24; "vLLM-S")."""

from tidegate.policy.rule import Budget, Plan, View, fill


def hybrid(view: View, budget: Budget) -> Plan:
    decodes = view.decodes()
    return Plan(fill(view, budget._replace(tokens=budget.tokens - len(decodes))), decodes)
