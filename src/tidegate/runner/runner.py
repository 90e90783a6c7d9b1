"""Runs batches over a pool, one after another: what a lane does between receiving a batch and answering it."""

import numpy as np
import torch

from tidegate.base.batch import Batch, BatchResult
from tidegate.base.clock import now_s
from tidegate.base.specs import ModelSpec
from tidegate.device.pool import Pool
from tidegate.kernels.attention import Attention
from tidegate.kernels.collectives import Collectives
from tidegate.kernels.host_copies import to_device
from tidegate.models.registry import Model
from tidegate.runner.inputs import StepInputs, build_inputs, store_tokens
from tidegate.runner.sampler import Sampled, Sampler


class Runner:
    """Owns nothing that a new runner over the same pool would miss, once the live slots' setups are sent again.

    It writes its batches' KV and tokens into the pool, and never the block table.
    """

    def __init__(
        self,
        model: Model,
        attention: Attention,
        pool: Pool,
        spec: ModelSpec,
        collectives: Collectives | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._pool = pool
        self._collectives = collectives
        self._sampler = Sampler(pool.tokens, spec.vocab_size)

    def run(self, batch: Batch) -> BatchResult:
        """Computes a batch of at least one row, whose table updates have been applied; on the CPU, where what
        ``launch`` gives is there when it returns."""
        started_s = now_s()
        sampled = self.launch(batch)
        tokens = sampled.tokens.tolist() if sampled else []
        logprobs = sampled.logprob_records() if sampled else None
        return BatchResult(batch.id, tokens, logprobs, now_s() - started_s)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Sampled | None:
        """Gives a batch's work to the device: to its current stream, where there are streams. None where no row
        samples."""
        self._sampler.apply(batch.setups)
        store_tokens(batch, self._pool.tokens)
        inputs = build_inputs(batch, self._pool.tokens)
        self._attention.plan(inputs.rows)
        hidden = self._model.forward(inputs.tokens, inputs.positions, inputs.sampled)
        return self._sample(hidden, inputs) if inputs.sampled_slots else None

    def _sample(self, hidden: torch.Tensor, inputs: StepInputs) -> Sampled:
        """Samples from the rows that ask, whose hidden states these are, and stores each token where the next step
        reads it."""
        logits = self._model.logits(hidden)
        sampled = self._sampler.sample(logits, inputs.sampled_slots, inputs.sampled_positions)
        if self._collectives is not None:
            self._collectives.first(sampled.tokens)  # sums of probabilities may differ between ranks in the last bit
        where = to_device(np.array([inputs.sampled_slots, inputs.sampled_positions]), hidden.device)
        self._pool.tokens[where[0], where[1]] = sampled.tokens.int()
        return sampled
