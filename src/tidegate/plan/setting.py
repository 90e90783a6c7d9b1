"""The question that a plan answers: which model, on what, for whom. And what all strategies need to know of it."""

from functools import cached_property

import msgspec

from tidegate.base.errors import ConfigError
from tidegate.base.specs import ModelSpec
from tidegate.core.config import CoreConfig
from tidegate.plan.demand import Demand
from tidegate.plan.hardware import GIB, Hardware
from tidegate.plan.memory import Memory, degrees, memory
from tidegate.plan.roofline import kv_bytes_per_token, roofline
from tidegate.slo.goodput import Slo
from tidegate.slo.latency import Costs, LatencyModel

BLOCK_TOKENS = 16
MAX_SEQS = 512  # requests that an engine runs at once
FULL_BATCH = 2048  # prompt tokens of a batch at most
MAX_TOKENS = 8192  # of a batch
WHOLE_CHUNK_S = 1e3  # for slices: so long that a chunk's size alone binds
GPU_SLICE_S, CPU_SLICE_S = 0.03, 0.2  # that a slice of a prompt takes unless told otherwise
EFFICIENT_TOKENS = 1024  # a slice of fewer on the whole device wastes much of its arithmetic


class Setting:
    """``measured``: a latency model of one device with the whole model on it, in place of the roofline's."""

    def __init__(
        self,
        model_name: str,
        model: ModelSpec,
        device: Hardware,
        gpus: int,
        slo: Slo,
        demand: Demand,
        measured: LatencyModel | None = None,
    ) -> None:
        if gpus < 1:
            raise ConfigError(f"--gpus is at least 1, not {gpus}")
        self.model_name, self.model, self.device, self.gpus = model_name, model, device, gpus
        self.slo, self.demand, self.measured = slo, demand, measured
        self._latency: dict[int, LatencyModel] = {}

    def latency(self, tp: int) -> LatencyModel:
        """Of an instance on ``tp`` devices. Where one device was measured, several are as much faster than that as the
        roofline says."""
        if tp not in self._latency:
            by_shape = roofline(self.model, self.device, tp)
            if self.measured is not None:
                by_shape = (
                    self.measured if tp == 1 else rescaled(self.measured, roofline(self.model, self.device), by_shape)
                )
            self._latency[tp] = by_shape
        return self._latency[tp]

    def memory(self, tp: int) -> Memory:
        return memory(self.model, self.device, tp)

    @cached_property
    def degrees(self) -> list[int]:
        """Of tensor parallelism, with which the longest request fits. Raises ConfigError if none does, saying how much
        is short."""
        tried = degrees(self.model, self.device, self.gpus)
        if self.demand.longest_tokens > self.model.max_len:
            raise ConfigError(
                f"the workload's longest request has {self.demand.longest_tokens} tokens and {self.model_name} takes "
                f"{self.model.max_len}: it can't be served"
            )
        fitting = [tp for tp in tried if self.short_bytes(tp) == 0]
        if not fitting:
            tp = tried[-1]
            enough = [
                more for more in degrees(self.model, self.device, self.device.per_node) if not self.short_bytes(more)
            ]
            advice = f": --gpus {enough[0]} would do" if enough else ""
            have = self.memory(tp)
            raise ConfigError(
                f"{self.model_name} does not fit: over {tp} × {self.device.title} each holds "
                f"{have.weight_bytes / GIB:.1f} GiB of weights and {have.reserve_bytes / GIB:.0f} GiB of workspace; "
                f"with the longest request ({self.demand.longest_tokens} tokens) "
                f"{self.short_bytes(tp) / GIB:.1f} GiB are short of the {have.usable_bytes / GIB:.1f} GiB that may "
                f"be used{advice}"
            )
        return fitting

    def short_bytes(self, tp: int) -> int:
        per_token = kv_bytes_per_token(self.model, self.device, tp)
        return self.memory(tp).short_bytes(self.demand.longest_tokens, per_token)

    @property
    def settle_s(self) -> float:
        """How long an average answer takes at the SLO's pace: after so long an engine is as full as it gets."""
        return self.demand.averages.output_tokens * self.slo.tpot_s

    def slice_s(self, tp: int) -> float:
        """That a slice may take: the engine's default, or longer where it would be inefficiently short."""
        usual_s = GPU_SLICE_S if self.device.is_gpu else CPU_SLICE_S
        return max(usual_s, self.latency(tp).whole.dense(EFFICIENT_TOKENS)) if self.device.is_gpu else usual_s

    def command(self, tp: int, mode: str, *flags: str) -> str:
        """That starts an instance."""
        slo = f"--slo ttft={self.slo.ttft_s * 1e3:g}ms,tpot={self.slo.tpot_s * 1e3:g}ms --slo-metric {self.slo.metric}"
        spread = [f"--tensor-parallel-size {tp}"] if tp > 1 else []
        return " ".join([f"tidegate serve {self.model_name} --mode {mode}", *flags, "--order slack", slo, *spread])

    def core_config(
        self, tp: int, mode: str, chunk: int = MAX_TOKENS, share: float = 0.5, gate: str | None = None
    ) -> CoreConfig:
        """As an engine would be started: prompts by slack. Slices are as long as the chunk, where one is given."""
        latency = self.latency(tp)
        most_blocks = MAX_SEQS * (self.demand.longest_tokens // BLOCK_TOKENS + 1)  # more are never used
        full = min(FULL_BATCH, latency.whole.tokens[-1])
        return CoreConfig(
            num_blocks=min(self.memory(tp).kv_tokens // BLOCK_TOKENS, most_blocks),
            block_size=BLOCK_TOKENS,
            max_num_seqs=MAX_SEQS,
            max_model_len=self.demand.longest_tokens,
            vocab_size=2,
            max_num_batched_tokens=chunk,
            max_prefill_tokens=full,
            mode=mode,
            shares={"P": share, "D": 1.0 - share},
            order="slack",
            prefix_caching=False,
            max_waiting=1 << 30,
            gate=gate,
            slo=self.slo,
            latency=latency,
            slice_seconds=WHOLE_CHUNK_S if chunk < MAX_TOKENS else self.slice_s(tp),
            min_slice_tokens=128 if self.device.is_gpu else 32,
            slice_quantum_tokens=64 if self.device.is_gpu else 16,
            max_slices=16,
            padding=latency.whole.padding,
            prefill_tokens_per_s=full / latency.whole.dense(full),
        )


def rescaled(measured: LatencyModel, of: LatencyModel, to: LatencyModel) -> LatencyModel:
    """``measured`` as the roofline goes from ``of`` to ``to``, term by term."""
    return LatencyModel(
        _rescaled(measured.whole, of.whole, to.whole),
        tuple(
            msgspec.structs.replace(
                division,
                prefill=_rescaled(division.prefill, near_of.prefill, near_to.prefill),
                decode=_rescaled(division.decode, near_of.decode, near_to.decode),
            )
            for division in measured.divisions
            for near_of, near_to in [(of.division(division.share), to.division(division.share))]
        ),
    )


def _rescaled(costs: Costs, of: Costs, to: Costs) -> Costs:
    """A decode row's own cost and that of both kinds in a batch, which no roofline knows, go as decode's reading."""
    reading = to.context_s / of.context_s
    dense = zip(costs.tokens, costs.dense_s, strict=True)
    return msgspec.structs.replace(
        costs,
        dense_s=tuple(seconds * to.dense(tokens) / of.dense(tokens) for tokens, seconds in dense),
        pair_s=costs.pair_s * to.pair_s / of.pair_s,
        reused_s=costs.reused_s * to.reused_s / of.reused_s,
        context_s=costs.context_s * reading,
        row_s=costs.row_s * reading,
        hybrid_s=costs.hybrid_s * reading,
    )
