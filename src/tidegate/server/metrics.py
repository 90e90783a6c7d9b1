"""Prometheus metrics: latencies seen here, and the engine's statistics read at each scrape.

Names that begin with ``vllm:`` mean what they mean in vLLM, so that its dashboards work; those that begin with
``tidegate:`` are about lanes, the gate and SLOs, which vLLM does not have.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from tidegate.base.stats import LaneStats, Stats
from tidegate.server.live import ATTAINED, REASONS, Recorder

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LONG_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


_OF_A_GPU = ("sms", "extra_memory_bytes")  # fields of LaneStats


class Metrics:
    """What the server itself observes, in a registry of its own and in ``recorder``."""

    def __init__(self, model_name: str, recorder: Recorder) -> None:
        self.recorder = recorder
        self._labels = {"model_name": model_name, "engine": "0"}
        self._registry = CollectorRegistry()
        self.ttft = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_S)
        self.inter_token = self._histogram("vllm:inter_token_latency_seconds", "Gap between two tokens.", _TOKEN_S)
        self.tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean gap between the tokens of a request.", _TOKEN_S
        )
        self.e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _LONG_S)
        self.request_prompt_tokens = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.request_generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request.", _TOKENS
        )
        self._slo_requests = self._counter("tidegate:slo_requests", "Requests with an SLO that ended, however.")
        self._slo_attained = self._counter("tidegate:slo_attained", "Of them, those that attained it.")
        self._slo_missed = self._by_label("tidegate:slo_missed", "Of them, the others.", "reason", REASONS)
        self._finished = self._by_label(
            "vllm:request_success",
            "Requests that ended, by reason.",
            "finished_reason",
            ("stop", "length", "abort", "error"),
        )

    def finished(self, reason: str) -> None:
        self._finished[reason].inc()

    def judged(self, verdict: str) -> None:
        """A request with an SLO ended: ``live.verdict``."""
        self._slo_requests.inc()
        (self._slo_attained if verdict == ATTAINED else self._slo_missed[verdict]).inc()

    def exposition(self, stats: Stats | None) -> bytes:
        """The text of a scrape. ``stats`` None: the engine is dead."""
        return generate_latest(_Scrape(self._registry, self.recorder, stats, self._labels))

    def _histogram(self, name: str, meaning: str, buckets: Iterable[float]) -> Histogram:
        family = Histogram(name, meaning, [*self._labels], buckets=tuple(buckets), registry=self._registry)
        return family.labels(*self._labels.values())

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(name, meaning, [*self._labels], registry=self._registry).labels(*self._labels.values())

    def _by_label(self, name: str, meaning: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        family = Counter(name, meaning, [*self._labels, label], registry=self._registry)
        return {value: family.labels(*self._labels.values(), value) for value in values}


class _Scrape:
    """What ``generate_latest`` reads: the registry, the recorder's totals, and the statistics of this moment."""

    def __init__(
        self, registry: CollectorRegistry, recorder: Recorder, stats: Stats | None, labels: dict[str, str]
    ) -> None:
        self._registry = registry
        self._recorder = recorder
        self._stats = stats
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()
        for name, meaning, total in (
            ("vllm:prompt_tokens", "Prompt tokens of requests that got a token.", self._recorder.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", self._recorder.output_tokens),
        ):
            yield self._family("counter", name, meaning, [({}, total)])
        yield self._family("gauge", "tidegate:engine_up", "1 while the engine runs.", [({}, self._stats is not None)])
        if self._stats is not None:
            yield from self._engine(self._stats)
            yield from self._gate(self._stats)
            yield from self._lanes(self._stats.lanes)
            yield from self._predictions(self._stats)

    def _engine(self, stats: Stats) -> Iterator[Metric]:
        used = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        for kind, name, meaning, value in (
            ("gauge", "vllm:num_requests_running", "Requests in prefill or decode.", stats.prefilling + stats.decoding),
            ("gauge", "vllm:num_requests_waiting", "Requests waiting to be started.", stats.waiting),
            ("gauge", "vllm:kv_cache_usage_perc", "Fraction of the KV blocks in use, 0 to 1.", used),
            ("counter", "vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries_tokens),
            ("counter", "vllm:prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits_tokens),
            ("counter", "vllm:num_preemptions", "Requests set back to waiting.", stats.preemptions),
            ("gauge", "tidegate:num_requests_prefilling", "Requests in prefill.", stats.prefilling),
            ("gauge", "tidegate:num_requests_decoding", "Requests in decode.", stats.decoding),
            ("counter", "tidegate:handovers", "Requests whose decode moved to another lane.", stats.handovers),
            ("counter", "tidegate:handover_copied_bytes", "Bytes copied for that.", stats.handover_copied_bytes),
        ):
            yield self._family(kind, name, meaning, [({}, value)])
        yield self._family("gauge", "tidegate:mode", "1 for the mode in force.", [({"mode": stats.mode}, 1)])
        blocks = {"free": stats.blocks_free, "cached": stats.blocks_cached, "used": stats.blocks_used}
        yield self._family(
            "gauge", "tidegate:kv_blocks", "KV blocks by state.", [({"state": k}, v) for k, v in blocks.items()]
        )
        yield self._family(
            "counter",
            "tidegate:requests_finished",
            "Requests that the engine ended, by reason.",
            [({"reason": reason}, count) for reason, count in stats.finished.items()],
        )

    def _gate(self, stats: Stats) -> Iterator[Metric]:
        yield self._family("gauge", "tidegate:gate", "1 for the gate in force.", [({"gate": stats.gate}, 1)])
        yield self._family("counter", "tidegate:gate_moves", "Times that the gate moved.", [({}, stats.gate_moves)])
        yield self._family(
            "counter",
            "tidegate:gate_choices",
            "Batches by what the gate chose for them.",
            [({"choice": choice}, count) for choice, count in stats.gate_choices.items()],
        )
        yield self._family(
            "gauge",
            "tidegate:late_requests",
            "Prompts that can't get their first token in time.",
            [({}, stats.late)],
        )
        limits = {"ttft": stats.slo_ttft_s, "tpot": stats.slo_tpot_s}
        yield self._family(
            "gauge",
            "tidegate:slo_seconds",
            "The limits in force for requests without their own.",
            [({"limit": name}, limit) for name, limit in limits.items() if limit is not None],
        )

    def _lanes(self, lanes: dict[str, LaneStats]) -> Iterator[Metric]:
        for kind, name, meaning, field in (
            ("gauge", "tidegate:lane_alive", "1 while the lane runs.", "alive"),
            ("gauge", "tidegate:lane_share", "Part of the compute while both lanes run.", "share"),
            ("gauge", "tidegate:lane_inflight_batches", "Batches launched and not done.", "inflight"),
            ("gauge", "tidegate:lane_sms", "SMs that its kernels run on now, as measured.", "sms"),
            ("gauge", "tidegate:lane_extra_memory_bytes", "Memory besides weights and KV.", "extra_memory_bytes"),
            ("counter", "tidegate:lane_busy_seconds", "Time on the device.", "busy_seconds"),
            ("counter", "tidegate:lane_batches", "Batches done.", "batches"),
            ("counter", "tidegate:lane_prefill_tokens", "Prompt tokens computed.", "prefill_tokens"),
            ("counter", "tidegate:lane_decode_tokens", "Decode rows computed.", "decode_tokens"),
            ("counter", "tidegate:lane_restarts", "Times the lane was started again.", "restarts"),
        ):
            samples: list[tuple[dict[str, str], float]] = [
                ({"lane": lane}, getattr(stats, field))
                for lane, stats in lanes.items()
                if stats.sms or field not in _OF_A_GPU
            ]
            if samples:
                yield self._family(kind, name, meaning, samples)
        choices: list[tuple[dict[str, str], float]] = [
            ({"lane": lane, "attention": form}, count)
            for lane, stats in lanes.items()
            for form, count in stats.hybrid_attention.items()
        ]
        if choices:
            meaning = "Hybrid batches by whether attention was one kernel (pod) or two (apart)."
            yield self._family("counter", "tidegate:lane_hybrid_batches", meaning, choices)

    def _predictions(self, stats: Stats) -> Iterator[Metric]:
        errors = [
            ({"kind": kind, "quantile": quantile}, value)
            for kind, error in stats.prediction_errors.items()
            for quantile, value in (("0.5", error.p50), ("0.95", error.p95))
        ]
        factors: list[tuple[dict[str, str], float]] = [
            ({"kind": kind}, factor) for kind, factor in stats.prediction_factors.items()
        ]
        for name, meaning, samples in (
            ("tidegate:prediction_error", "Relative error of predicted times of the last steps.", errors),
            ("tidegate:prediction_factor", "Measured times relative to what the latency model says.", factors),
        ):
            if samples:
                yield self._family("gauge", name, meaning, samples)

    def _family(
        self, kind: str, name: str, meaning: str, samples: list[tuple[dict[str, str], float]]
    ) -> GaugeMetricFamily | CounterMetricFamily:
        names = [*self._labels, *(samples[0][0] if samples else ())]
        make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
        family = make(name, meaning, labels=names)
        for labels, value in samples:
            family.add_metric([*self._labels.values(), *labels.values()], float(value))
        return family
