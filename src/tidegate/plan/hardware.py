"""What devices can do, by their makers, and how much of it an engine gets.

Peaks are per device; dense products, without structured sparsity. Sources:

    A100, 80 GB SXM4   NVIDIA A100 datasheet: 312 TFLOP/s bf16, 2,039 GB/s, NVLink 600 GB/s both ways; 108 SMs
                       (Ampere whitepaper); DGX A100: one 200 Gb/s adapter a GPU
    H100, 80 GB SXM5   NVIDIA H100 datasheet: 989 TFLOP/s bf16, 3.35 TB/s, NVLink 900 GB/s both ways; 132 SMs
                       (Hopper whitepaper); DGX H100: one 400 Gb/s adapter a GPU
    H200, 141 GB SXM   NVIDIA H200 datasheet: 989 TFLOP/s bf16, 4.8 TB/s, NVLink 900 GB/s both ways; 132 SMs
    CPU core           AVX2: two fused multiply-adds of 8 floats a cycle at 3 GHz; two channels of DDR4 for every four
                       cores

What an engine gets was measured on one H200 with a Llama-3-8B shape, for experts and latent attention with
DeepSeek-V2-Lite's (``EFFICIENCY``), and on two cores of an EPYC with SmolLM2-135M (``CPU_EFFICIENCY``; experts and
latent attention are taken to be as the rest there). Other GPUs are taken to be as efficient as the H200.
"""

import os
from typing import NamedTuple

from tidegate.base.errors import ConfigError

GB, TB, GIB = 1e9, 1e12, 1 << 30


class Efficiency(NamedTuple):
    """Parts of a peak that are had, and what is lost beside it."""

    products: float  # of the arithmetic, in matrix products with many rows
    experts: float  # the same, where each expert has some of the rows
    attention: float  # the same, in attention of prompts
    latent: float  # the same, where it is latent
    weights: float  # of the memory's bandwidth, reading weights
    kv: float  # the same, reading KV for decodes
    reused: float  # the same, for slices, whose few query rows leave much of a device idle
    link: float  # of a link's bandwidth
    layer_s: float  # for each layer of a step: small kernels, and the gaps between them
    latent_layer_s: float  # more of it where attention is latent
    reduce_s: float  # for each all-reduce, however small
    clock_gain: float  # a part of a GPU runs its share times 1 + gain · (1 - share): the power cap binds less
    contention: float  # by which batches of two lanes take longer while both run


EFFICIENCY = Efficiency(0.61, 0.3, 0.75, 0.24, 0.74, 0.89, 0.1, 0.75, 20e-6, 45e-6, 8e-6, 0.33, 1.25)
CPU_EFFICIENCY = Efficiency(0.8, 0.8, 0.4, 0.4, 0.8, 0.8, 0.4, 1.0, 50e-6, 0.0, 0.0, 0.0, 1.1)


class Hardware(NamedTuple):
    """One device. Bandwidths in bytes/s, links one way."""

    name: str
    title: str
    flops: float
    bandwidth: float
    memory_bytes: int
    nvlink: float  # to the devices of its node; 0: it has none
    network: float  # to other nodes
    pcie: float  # to the host
    parts: int  # into which its compute can be divided: SMs, cores
    per_node: int
    element_bytes: int  # of a weight or an element of KV
    efficiency: Efficiency

    @property
    def is_gpu(self) -> bool:
        return self.nvlink > 0

    def link(self, devices: int) -> float:
        """The bandwidth between two of so many devices, had in practice."""
        within = devices <= self.per_node and self.nvlink > 0
        return (self.nvlink if within else self.network) * self.efficiency.link


GPUS = {
    gpu.name: gpu
    for gpu in (
        Hardware(
            "a100", "A100 80 GB SXM", 312e12, 2039 * GB, 80 * GIB, 300 * GB, 25 * GB, 32 * GB, 108, 8, 2, EFFICIENCY
        ),
        Hardware(
            "h100", "H100 80 GB SXM", 989e12, 3.35 * TB, 80 * GIB, 450 * GB, 50 * GB, 64 * GB, 132, 8, 2, EFFICIENCY
        ),
        Hardware(
            "h200", "H200 141 GB SXM", 989e12, 4.8 * TB, 140 * GIB, 450 * GB, 50 * GB, 64 * GB, 132, 8, 2, EFFICIENCY
        ),
    )
}


def cpu(cores: int) -> Hardware:
    """A machine without a GPU, computing in float32."""
    bandwidth = 8 * GB * cores
    memory = 4 * GIB * cores
    title = f"{cores} CPU cores"
    return Hardware(
        f"cpu:{cores}", title, 96e9 * cores, bandwidth, memory, 0.0, 1.25 * GB, 8 * GB, cores, 1, 4, CPU_EFFICIENCY
    )


def hardware(name: str) -> Hardware:
    """``h200``, or ``cpu:4`` (``cpu``: this machine's cores). Raises ConfigError, naming what is known."""
    kind, _, cores = name.lower().partition(":")
    if kind in GPUS and not cores:
        return GPUS[kind]
    if kind == "cpu" and (not cores or cores.isdecimal()) and cores != "0":
        return cpu(int(cores or len(os.sched_getaffinity(0))))
    known = ", ".join([*GPUS, "cpu:CORES"])
    raise ConfigError(
        f"There is no entry for --gpu {name}; known are {known}. A device that was measured needs "
        "--latency-model beside the nearest of them."
    )
