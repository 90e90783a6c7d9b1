"""The core's own settings."""

import math
from typing import Any

import msgspec

from tidegate.base.errors import ConfigError
from tidegate.base.events import Tuned
from tidegate.policy.modes import MODES, Mode
from tidegate.policy.order import ORDERS
from tidegate.slo.gate import Limits
from tidegate.slo.goodput import Metric, Slo
from tidegate.slo.latency import LatencyModel, Padding


class CoreConfig(msgspec.Struct, frozen=True):
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int  # 0: token ids are not checked
    max_num_batched_tokens: int
    max_prefill_tokens: int = 1 << 30  # prompt tokens that the device takes in one batch
    mode: str = "semi"
    shares: dict[str, float] = msgspec.field(default_factory=lambda: {"P": 0.5, "D": 0.5})
    order: str = "shortest"
    prefix_caching: bool = True
    prefix_secret: bytes = b""  # random for each engine; see kv.prefix
    max_waiting: int = 1024
    reject_unreachable: bool = False  # refuse requests that are predicted to miss their TTFT by far (slo.admission)
    gate: str | None = None  # None: the mode's own
    slo: Slo | None = None
    latency: LatencyModel | None = None  # what gates believe of this device
    slice_seconds: float = 0.2
    min_slice_tokens: int = 32
    slice_quantum_tokens: int = 16  # slices are whole multiples of it
    max_slices: int = 1 << 20  # prompts in one batch
    padding: Padding = Padding()  # of batches, by the device
    prefill_tokens_per_s: float = 500.0  # first guess of the whole device's rate; corrected by observation
    max_losses: int = 3  # a request whose batches were lost so often, with no progress in between, fails

    @property
    def limits(self) -> Limits:
        return Limits(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_prefill_tokens=self.max_prefill_tokens,
            slice_seconds=self.slice_seconds,
            min_slice_tokens=self.min_slice_tokens,
            slice_quantum_tokens=self.slice_quantum_tokens,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
        )

    def gate_of(self, mode: Mode) -> str:
        """The gate by name: the user's where the mode knows it, else the mode's own."""
        return self.gate if self.gate is not None and self.gate in mode.gates else mode.gates[0]

    def validate(self) -> None:
        """Raises ConfigError, naming the flag to change."""
        if self.mode not in MODES:
            raise ConfigError(f"unknown mode {self.mode!r}; choose one of {', '.join(MODES)}")
        if self.order not in ORDERS:
            raise ConfigError(f"unknown order {self.order!r}; choose one of {', '.join(ORDERS)}")
        if self.gate is not None and self.gate not in MODES[self.mode].gates:
            raise ConfigError(f"mode {self.mode} knows --gate {' or '.join(MODES[self.mode].gates)}, not {self.gate}")
        if self.num_blocks * self.block_size < self.max_model_len:
            raise ConfigError(
                f"the KV cache holds {self.num_blocks * self.block_size} tokens, fewer than --max-model-len "
                f"{self.max_model_len}; lower --max-model-len or give the KV cache more memory"
            )
        if self.slice_seconds <= 0:
            raise ConfigError("--slice-ms must be above 0")
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < 1:
            raise ConfigError("--max-num-seqs and --max-num-batched-tokens must be at least 1")
        check_shares(self.shares)


def check_shares(shares: dict[str, float]) -> None:
    """Raises ConfigError unless ``shares`` divides a device between P and D."""
    if set(shares) != {"P", "D"}:
        raise ConfigError('shares name the lanes "P" and "D"')
    if not all(0.0 < share < 1.0 for share in shares.values()) or abs(sum(shares.values()) - 1.0) > 1e-6:
        raise ConfigError("shares must each lie between 0 and 1 and add up to 1")


def tuned(config: CoreConfig, asked: Tuned) -> CoreConfig:
    """``config`` with the settings that ``asked`` names. Raises ConfigError for a metric that there is not."""
    changed: dict[str, Any] = {
        name: value
        for name, value in (
            ("max_num_batched_tokens", asked.max_num_batched_tokens),
            ("slice_seconds", asked.slice_ms / 1e3 if asked.slice_ms is not None else None),
            ("order", asked.order),
            ("gate", asked.gate),
        )
        if value is not None
    }
    metrics = [str(metric) for metric in Metric]
    if asked.slo_metric is not None and asked.slo_metric not in metrics:
        raise ConfigError(f"unknown SLO metric {asked.slo_metric!r}; choose one of {', '.join(metrics)}")
    if asked.ttft_s is not None or asked.tpot_s is not None or asked.slo_metric is not None:
        known = config.slo or Slo(math.inf, math.inf)
        changed["slo"] = Slo(
            known.ttft_s if asked.ttft_s is None else asked.ttft_s,
            known.tpot_s if asked.tpot_s is None else asked.tpot_s,
            known.metric if asked.slo_metric is None else Metric(asked.slo_metric),
        )
    return msgspec.structs.replace(config, **changed)
