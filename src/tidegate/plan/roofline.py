"""A latency model from a model's shape and a device's peaks, where nothing was measured (Williams, Waterman and
Patterson, "Roofline", CACM 52, 2009).

Of a step with n tokens on one of ``tp`` devices that hold a model together, each 1/tp of its weights and KV heads:

    products    2 · weights · n / tp operations, at what the device does in large products: the weights that a prompt's
                token is multiplied with, which are few of those of a model with experts, and theirs at what is had
                there
    reading     weights / tp bytes, at what it reads: of experts those that any of n tokens goes to
    dense       (products^k + reading^k)^(1/k): nearly the larger one, and more where they are alike (k = OVERLAP)
    small       a time for each layer, whatever n is
    reduce      two all-reduces of n · hidden elements a layer, where tp > 1
    attention   4 · heads · head size · layers operations a pair of tokens; KV bytes for each token looked back at
                (with latent attention as it is computed: plan/parameters.py)

On a part of the device arithmetic grows with the part (and a little more, since the clock is higher), and bandwidth is
had nearly in full from half of it on: tanh(3 · part). How far this is from measurements: docs/plan.md.
"""

import math

from tidegate.base.specs import ModelSpec
from tidegate.plan.hardware import Hardware
from tidegate.plan.parameters import pair_flops, prompt_elements, read_elements
from tidegate.slo.latency import Costs, Division, LatencyModel, Padding

OVERLAP = 2.0
PART_OVERLAP = 1.3  # on a part of a device; the fewer SMs, the less of either hides the other
GPU_SIZES = (8, 32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048, 2304, 2560)
GPU_PADDING = Padding(GPU_SIZES, 16)  # as this engine pads the batches of a GPU
# With experts: what is read grows with each of the first tokens, and rows that only pad a batch all read the same.
EXPERT_SIZES = (1, 2, 4, 8, 16, *GPU_SIZES[1:])
CPU_SIZES = (1, 4, 16, 64, 128, 256, 512, 1024, 2048)
SHARES = (0.3, 0.42, 0.55, 0.67, 0.79)  # of prefill, where a device is divided


def kv_bytes_per_token(model: ModelSpec, device: Hardware, tp: int) -> float:
    """On each of ``tp`` devices, which have at least one KV head each."""
    heads = max(1.0, model.num_kv_heads / tp)
    return model.kv_elements_per_token * device.element_bytes * heads / model.num_kv_heads


def roofline(model: ModelSpec, device: Hardware, tp: int = 1) -> LatencyModel:
    """What batches of ``model`` take on ``tp`` devices."""
    place = _Place(model, device, tp)
    divisions = (
        Division(
            share,
            place.costs(share, PART_OVERLAP),
            place.costs(1.0 - share, PART_OVERLAP),
            device.efficiency.contention,
            device.efficiency.contention,
        )
        for share in SHARES
    )
    return LatencyModel(place.costs(1.0, OVERLAP), tuple(divisions))


class _Place:
    """A model over so many devices."""

    def __init__(self, model: ModelSpec, device: Hardware, tp: int) -> None:
        self._model, self._device, self._tp = model, device, tp

    def costs(self, part: float, overlap: float) -> Costs:
        """Of the whole (1.0) or a part of every device's compute."""
        model, device, gets = self._model, self._device, self._device.efficiency
        arithmetic = device.flops * part * (1.0 + gets.clock_gain * (1.0 - part)) * self._tp
        bandwidth = device.bandwidth * (math.tanh(3.0 * part) if part < 1.0 else 1.0)
        element_s = device.element_bytes / self._tp / (bandwidth * gets.weights)
        of_experts, others = prompt_elements(model)
        token_s = 2.0 * (others / gets.products + of_experts / gets.experts) / arithmetic
        sizes, padding = self._sizes()
        dense = []
        for size in sizes:
            reading_s = read_elements(model, size) * element_s
            products_s = ((token_s * size) ** overlap + reading_s**overlap) ** (1.0 / overlap)
            dense.append(products_s + self._each_step_s(size))
        pair_s = pair_flops(model) / (arithmetic * (gets.latent if model.latent else gets.attention))
        back_s = kv_bytes_per_token(model, device, self._tp) / bandwidth
        return Costs(sizes, tuple(dense), pair_s, back_s / gets.reused, back_s / gets.kv, padding)

    def _sizes(self) -> tuple[tuple[int, ...], Padding]:
        if not self._device.is_gpu:
            return CPU_SIZES, Padding()
        return (EXPERT_SIZES, Padding()) if self._model.experts else (GPU_SIZES, GPU_PADDING)

    def _each_step_s(self, size: int) -> float:
        """Small kernels, and all-reduces in a ring: each device sends 2 (tp - 1) / tp of the data."""
        model, device, tp = self._model, self._device, self._tp
        gets = device.efficiency
        seconds = model.num_layers * (gets.layer_s + (gets.latent_layer_s if model.latent else 0.0))
        if tp > 1:
            data = size * model.hidden_size * device.element_bytes
            sent = 2 * data * (tp - 1) / tp
            reduce_s = gets.reduce_s + sent / device.link(tp)
            seconds += 2 * model.num_layers * reduce_s
        return seconds
