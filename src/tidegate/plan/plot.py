"""A plan as a picture. Needs matplotlib, which is loaded only here."""

from pathlib import Path

from tidegate.bench.plot import load_matplotlib
from tidegate.plan.report import slo_text
from tidegate.plan.summary import Summary

MOST_BARS = 16


def plot(plan: Summary, path: Path) -> None:
    """Goodput per GPU of each candidate with its interval, and the hardware's bound. Raises ConfigError without
    matplotlib."""
    rows = plan.rows[:MOST_BARS][::-1]  # the best on top
    figure = load_matplotlib().Figure(figsize=(9, 1.6 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    rates = [row.goodput_per_gpu for row in rows]
    below = [max(0.0, row.goodput_per_gpu - row.low_per_gpu) for row in rows]
    above = [max(0.0, row.high_per_gpu - row.goodput_per_gpu) for row in rows]
    names = [row.design + (f" × {row.copies}" if row.copies > 1 else "") for row in rows]
    colors = ["tab:blue" if row.runnable else "tab:gray" for row in rows]
    axes.barh(names, rates, xerr=(below, above), color=colors, ecolor="black", capsize=2)
    axes.axvline(plan.bound_per_gpu, color="tab:red", linestyle="--", label=f"bound: {plan.bound_by}")
    if not all(row.runnable for row in rows):
        axes.barh([names[0]], [0], color="tab:gray", label="not in this version")
    axes.set_xlabel("goodput, requests/s per GPU")
    axes.set_title(
        f"{plan.model}, {plan.gpus} × {plan.gpu}, workload {plan.workload}\n{slo_text(plan.slo)}", fontsize="medium"
    )
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")
    figure.savefig(path, dpi=120)
