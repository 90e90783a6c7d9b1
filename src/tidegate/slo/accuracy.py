"""How far predictions are from what was measured, by kind of step."""

from collections.abc import Iterable, Sequence

from tidegate.base.stats import PredictionError
from tidegate.slo.goodput import percentile
from tidegate.slo.latency import LatencyModel, Sample, Work, relative_errors

KINDS = ("decode", "prefill", "hybrid", "decode beside", "prefill beside")


def kind_of(work: Work, beside: bool) -> str:
    """Of a step: what is in it, and whether the other lane ran too."""
    what = "prefill" if not work.rows else "hybrid" if work.new else "decode"
    return f"{what} beside" if beside and what != "hybrid" else what


def summary(errors: Iterable[float]) -> PredictionError:
    """Of relative errors; zeros where there are none."""
    known = list(errors)
    return PredictionError(len(known), percentile(known, 0.5), percentile(known, 0.95)) if known else PredictionError()


def errors_by_kind(model: LatencyModel, samples: Sequence[Sample]) -> dict[str, PredictionError]:
    """The kinds that were measured, in the order of ``KINDS``."""
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for sample, error in zip(samples, relative_errors(model, samples), strict=True):
        errors[kind_of(sample.work, sample.beside)].append(error)
    return {kind: summary(those) for kind, those in errors.items() if those}
