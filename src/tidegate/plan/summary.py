"""A plan as plain values: what the table, the picture and the JSON file are made of."""

from collections.abc import Sequence

import msgspec

from tidegate.plan.bounds import Bound
from tidegate.plan.rate import Probe
from tidegate.plan.search import Measured, Plan
from tidegate.plan.setting import Setting
from tidegate.slo.goodput import Latency, Slo

SCHEMA = 1


class Row(msgspec.Struct, frozen=True):
    """A candidate that was simulated. Rates per GPU of all that there are, used or not. Latencies are means, at the
    simulated rate that is nearest to the goodput. ``missed_ttft``, ``missed_tpot``: shares of the requests at the first
    rate that is too high. ``kv_left_tokens``: of a unit, beside what its requests hold on average at its goodput."""

    design: str
    family: str
    gpus: int
    copies: int
    goodput_per_gpu: float
    low_per_gpu: float
    high_per_gpu: float
    ceiling_per_gpu: float
    ttft_s: float
    tpot_s: float
    kv_tokens: int
    kv_left_tokens: int
    missed_ttft: float
    missed_tpot: float
    attained: list[tuple[float, float]]  # (requests/s of a unit, share)
    requests: int  # counted at each rate
    runnable: bool
    commands: list[str]


class Summary(msgspec.Struct, frozen=True):
    schema: int
    version: str
    model: str
    gpu: str
    gpus: int
    workload: str
    prompt_tokens: float  # mean
    output_tokens: float
    slo: Slo
    measured_latency: bool  # rather than the roofline's
    seed: int
    bound_per_gpu: float
    bound_by: str
    compute_s: float  # of a request, on one GPU
    bandwidth_s: float
    transfer_s: float | None  # of an average prompt's KV to another GPU of the node, or to another node
    rows: list[Row]
    passed_over: list[tuple[str, float]]  # with rates per GPU that they stay below
    unreachable: list[str]

    @property
    def winner(self) -> Row:
        return self.rows[0]


def summary(setting: Setting, plan: Plan, version: str, workload: str, seed: int) -> Summary:
    each, bound = setting.demand.averages, plan.bound
    gpus = setting.gpus
    return Summary(
        schema=SCHEMA,
        version=version,
        model=setting.model_name,
        gpu=setting.device.title,
        gpus=gpus,
        workload=workload,
        prompt_tokens=each.prompt_tokens,
        output_tokens=each.output_tokens,
        slo=setting.slo,
        measured_latency=setting.measured is not None,
        seed=seed,
        bound_per_gpu=bound.requests_per_s,
        bound_by=bound.resource,
        compute_s=bound.compute_s,
        bandwidth_s=bound.bandwidth_s,
        transfer_s=_transfer_s(setting),
        rows=[_row(setting, measured, bound) for measured in plan.measured],
        passed_over=[(candidate.name, below * candidate.copies / gpus) for candidate, below in plan.passed_over],
        unreachable=[candidate.name for candidate in plan.unreachable],
    )


def _row(setting: Setting, measured: Measured, bound: Bound) -> Row:
    candidate, found = measured.candidate, measured.found
    per_gpu = candidate.copies / setting.gpus
    ttft_s, tpot_s = _means(found.best)
    each = setting.demand.averages
    held = found.rate * (ttft_s * each.prompt_tokens + tpot_s * each.context)
    missed_ttft, missed_tpot = _missed(found.beyond, setting.slo)
    return Row(
        design=candidate.name,
        family=candidate.family,
        gpus=candidate.unit_gpus,
        copies=candidate.copies,
        goodput_per_gpu=found.rate * per_gpu,
        low_per_gpu=found.low * per_gpu,
        high_per_gpu=min(found.high * per_gpu, bound.requests_per_s),
        ceiling_per_gpu=candidate.ceiling * per_gpu,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        kv_tokens=candidate.kv_tokens,
        kv_left_tokens=max(0, candidate.kv_tokens - round(held)),
        missed_ttft=missed_ttft,
        missed_tpot=missed_tpot,
        attained=[(probe.rate, probe.attained) for probe in found.probes],
        requests=len(found.best.latencies),
        runnable=candidate.runnable,
        commands=candidate.commands(),
    )


def _means(probe: Probe) -> tuple[float, float]:
    answered = [latency for latency in probe.latencies if latency is not None]
    if not answered:
        return 0.0, 0.0
    paced = [latency.tpot_s for latency in answered if latency.tpot_s > 0]
    return sum(latency.ttft_s for latency in answered) / len(answered), sum(paced) / max(1, len(paced))


def _missed(probe: Probe, slo: Slo) -> tuple[float, float]:
    """Shares of the requests that missed either limit; failed ones count to the first."""

    def share(only: Slo, latencies: Sequence[Latency | None]) -> float:
        met = sum(latency is not None and only.met_by(latency) for latency in latencies)
        return 1.0 - met / len(latencies)

    answered = [latency for latency in probe.latencies if latency is not None]
    loose = float("inf")
    return (
        share(Slo(slo.ttft_s, loose, slo.metric), probe.latencies),
        share(Slo(loose, slo.tpot_s, slo.metric), answered) if answered else 0.0,
    )


def _transfer_s(setting: Setting) -> float | None:
    link = setting.device.link(setting.gpus)
    if setting.gpus == 1 or link <= 0:
        return None
    num_bytes = setting.model.kv_elements_per_token * setting.device.element_bytes
    return setting.demand.averages.prompt_tokens * num_bytes / link
