"""Where a node's latency model comes from: a file that was given, one that was kept, a measurement now, or a guess."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tidegate.base.clock import now_s
from tidegate.base.specs import ModelSpec, PoolSpec
from tidegate.node import latency_cache
from tidegate.node.backend import Backend, Progress
from tidegate.node.calibrate import Calibration, Measured
from tidegate.node.config import EngineConfig
from tidegate.node.lane_host import LaneHost
from tidegate.node.latency_cache import Key
from tidegate.node.measure import Measure
from tidegate.node.probes import Reach
from tidegate.policy.modes import Mode
from tidegate.slo.latency import LatencyModel, rough

STAGE = "measuring how long steps take"
LARGEST_SLICE = 2048  # tokens; time is linear in them beyond


class Predictions(NamedTuple):
    model: LatencyModel
    source: str  # for people; "" for a guess


@dataclass(frozen=True)
class Subject:
    """Whose steps are to be predicted."""

    config: EngineConfig
    mode: Mode
    spec: ModelSpec
    pool: PoolSpec
    backend: Backend

    @property
    def key(self) -> Key:
        return Key(
            model=self.spec,
            quantization=self.config.quantization,
            kv_dtype=self.pool.kv_dtype,
            device=self.backend.description,
            processor=latency_cache.processor(),
            sharing=self.backend.sharing,
            lanes={lane.name: lane.phases for lane in self.mode.lanes},
            max_num_seqs=self.pool.max_num_seqs,
            block_size=self.pool.block_size,
        )

    @property
    def reach(self) -> Reach:
        traits = self.backend.traits
        return Reach.of(
            self.mode,
            self.pool,
            max_new=min(traits.max_prefill_tokens, LARGEST_SLICE),
            least_new=traits.slice_quantum_tokens,
            usual_new=int(traits.prefill_tokens_per_s * traits.slice_seconds),
            shares=traits.shares,
            sizes=traits.padding.tokens,
        )

    @property
    def slice_seconds(self) -> float:
        slice_ms = self.config.slice_ms
        return self.backend.traits.slice_seconds if slice_ms is None else slice_ms / 1e3

    def guess(self) -> Predictions:
        return Predictions(rough(self.backend.traits.prefill_tokens_per_s), "")

    def given(self) -> Predictions | None:
        """From a file that the user gave. Raises ConfigError if it can't be used."""
        place = self.config.latency_model
        if place is None:
            return None
        model, told = latency_cache.given(Path(place))
        return Predictions(model, f"as given: {told}")

    def kept(self) -> Predictions | None:
        """From an earlier start, unless it is to be measured again. Once the backend is open: only then it knows how it
        shares its device."""
        measured = None if self.config.recalibrate else latency_cache.cached(self.key)
        return Predictions(measured.model, f"measured before: {measured}") if measured else None

    def measure(self, lanes: LaneHost, progress: Progress) -> Predictions:
        """Now, and keeps it for the next start."""
        calibration, measured = self.calibrate(lanes, self.config.calibration_seconds, progress)
        source = f"measured in {calibration.passed_s:.0f} s: {measured}"
        latency_cache.keep(self.key, measured)
        if len(self.mode.lanes) > 1:
            share = self.config.prefill_share
            lanes.prepare_shares({"P": share, "D": 1.0 - share})  # the last ones measured were others
        return Predictions(measured.model, source)

    def calibrate(
        self, lanes: LaneHost, seconds: float, progress: Progress, fine: bool = False
    ) -> tuple[Calibration, Measured]:
        """On lanes that have been started and that nobody watches yet: once this returns they are up and at rest.
        Raises TidegateError if they can't be brought up."""
        reach = self.reach
        traits = self.backend.traits
        measure = Measure(lanes, self.pool, reach, self.spec.vocab_size, traits.settling_seconds, now_s)
        try:
            measure.wait_for({lane.name for lane in self.mode.lanes})
            padding = traits.padding
            calibration = Calibration(
                measure, now_s, seconds, self.slice_seconds, padding, lambda done: progress(STAGE, min(1.0, done))
            )
            return calibration, calibration.run(reach, fine)
        finally:
            measure.close()
