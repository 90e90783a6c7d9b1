"""One lane over a small model on the GPU, in bf16 unless asked otherwise, without an engine, and batches for it."""

import torch

from tidegate.base.batch import Batch, Slice
from tidegate.base.specs import PoolSpec
from tidegate.device.places import FORMS, Places
from tidegate.device.pool import Pool, kv_shape
from tidegate.models.linears import load, stored
from tidegate.models.sources import open_model
from tidegate.runner.shapes import Scratch, shape_for

BLOCKS, SEQS, LENGTH = 600, 8, 1024


class Lane:
    """Slot s owns blocks 64 s to 64 s + 63."""

    def __init__(self, path, pod_rule=None, quantization=None, kv_dtype="bfloat16"):
        from tidegate.device.green_contexts import SmParts  # only where there is a GPU
        from tidegate.runner.gpu_runner import GpuRunner

        source = open_model(path)
        spec = PoolSpec(BLOCKS + 1, 16, SEQS + 1, LENGTH, kv_dtype)
        weights = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
            for name, (dtype, shape) in stored(source.spec, quantization, "bfloat16").items()
        }
        load(source, weights)
        table = torch.zeros((spec.max_num_seqs, spec.max_blocks_per_seq), dtype=torch.int32)
        for slot in range(SEQS):
            table[slot, :64] = torch.arange(64 * slot, 64 * slot + 64)
        kv = torch.zeros(kv_shape(source.spec, spec), dtype=getattr(torch, kv_dtype), device="cuda")
        tokens = torch.zeros((spec.max_num_seqs, LENGTH + 1), dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        self.places = Places(SmParts(), FORMS["disjoint"])
        self.runner = GpuRunner(source.spec, weights, Pool(spec, kv, table, tokens), Scratch(BLOCKS, SEQS), pod_rule)

    def prefill(self, prompt, slot=0, setups=()):
        return Batch(0, 1.0, [Slice(slot, 0, prompt, True)], [], [], [], list(setups))

    def decode(self, *positions, setups=()):
        """Of slots 0, 1, …; the tokens at these positions are there."""
        return Batch(1, 1.0, [], list(range(len(positions))), list(positions), [], list(setups))

    def shape(self, batch):
        return shape_for(batch.num_prefill_tokens, len(batch.decode_slots))
