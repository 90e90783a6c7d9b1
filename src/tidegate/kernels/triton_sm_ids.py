"""Which SMs a stream's kernels really run on."""

import torch
import triton
import triton.language as tl

from tidegate.kernels.host_copies import to_host


@triton.jit
def _sm_ids_kernel(ids, spins):
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    total = 0.0
    for i in range(spins):  # long enough that every SM is given a program
        total += tl.sqrt(i + total)
    tl.store(ids + tl.program_id(0), tl.where(total < 0, sm + 1, sm))


class SmIds:
    """The SMs that programs of a kernel on ``stream`` run on. Making one enqueues the kernel and does not wait."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            ids = torch.full((4096,), -1, dtype=torch.int32, device=stream.device)
            _sm_ids_kernel[(4096,)](ids, 4000, num_warps=8)
            self._ids = to_host(ids)
            self._done = torch.cuda.Event()
            self._done.record(stream)

    def known(self) -> frozenset[int] | None:
        """None until the kernel has run."""
        return frozenset(self._ids.tolist()) if self._done.query() else None

    def wait(self) -> frozenset[int]:
        self._done.synchronize()
        return frozenset(self._ids.tolist())
