"""A reading of the engine, for /metrics, /admin and people."""

import msgspec


class LaneStats(msgspec.Struct):
    """Totals since the engine's start."""

    alive: bool = False
    phases: str = ""  # of the current mode: "P", "D", "PD", or "" when the mode does not use it
    share: float = 1.0
    busy_seconds: float = 0.0
    batches: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    restarts: int = 0
    inflight: int = 0
    sms: int = 0  # streaming multiprocessors that its kernels run on now, as measured; 0 where there are none
    extra_memory_bytes: int = 0  # on the device, for graphs, workspaces and activations; weights and KV are shared
    # Hybrid batches by how attention of their prompts and decodes ran ("pod": in one kernel, "apart": in two); empty
    # where the lane has no choice.
    hybrid_attention: dict[str, int] = {}


class PredictionError(msgspec.Struct, frozen=True):
    """Of predicted times of steps, relative to what was measured (0.1: a tenth too long or too short)."""

    steps: int = 0
    p50: float = 0.0
    p95: float = 0.0


class Stats(msgspec.Struct):
    mode: str = ""
    waiting: int = 0
    prefilling: int = 0
    decoding: int = 0
    predicted_ttft_s: float = 0.0  # of a prompt of the mean length of late, if it arrived now
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0  # hold a cached prefix that no request is using now
    blocks_used: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    handovers: int = 0  # requests whose decode moved to another lane than their prefill
    handover_copied_bytes: int = 0
    preemptions: int = 0
    finished: dict[str, int] = {}  # by finish reason
    late: int = 0  # prompts that can't make their SLO on TTFT any more, of those that wait or prefill
    order: str = ""
    max_num_batched_tokens: int = 0
    slice_ms: float = 0.0
    gate: str = ""
    gate_choices: dict[str, int] = {}  # batches by what the gate chose
    gate_moves: int = 0
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_metric: str = ""
    prediction_errors: dict[str, PredictionError] = {}  # of the last steps, by kind (slo.accuracy)
    prediction_factors: dict[str, float] = {}  # by kind: such steps take so many times what the model says
    lanes: dict[str, LaneStats] = {}
