"""Which SMs a stream's kernels really run on."""

import torch
import triton
import triton.language as tl


@triton.jit
def _sm_ids_kernel(ids, spins):
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    total = 0.0
    for i in range(spins):  # long enough that every SM is given a program
        total += tl.sqrt(i + total)
    tl.store(ids + tl.program_id(0), tl.where(total < 0, sm + 1, sm))


def sm_ids(stream: torch.cuda.Stream, device: torch.device) -> frozenset[int]:
    """The SMs that programs of a kernel on ``stream`` ran on; waits for it."""
    ids = torch.full((4096,), -1, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()
    with torch.cuda.stream(stream):
        _sm_ids_kernel[(4096,)](ids, 4000, num_warps=8)
    stream.synchronize()
    return frozenset(ids.tolist())
