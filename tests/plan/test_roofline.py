"""The roofline says what an H200 takes for a Llama-3-8B shape, as far as it claims to, and scales as hardware does."""

from itertools import pairwise

import pytest

from tidegate.plan.hardware import GPUS, cpu
from tidegate.plan.roofline import roofline
from tidegate.plan.shapes import KNOWN
from tidegate.slo.latency import Work

EIGHT_B, SEVENTY_B = KNOWN["llama-3.1-8b"], KNOWN["llama-3.3-70b"]
H200 = GPUS["h200"]

# Measured with this engine's CUDA graphs, bf16; a sample of 240 points, drawn at random.
# (SMs, prompt tokens, position of the first of them, decode rows, tokens of each, milliseconds)
MEASURED = {
    "decode": [
        (132, 0, 0, 1, 2048, 4.93),
        (132, 0, 0, 1, 4096, 5.03),
        (132, 0, 0, 32, 256, 5.6),
        (132, 0, 0, 64, 2048, 9.48),
        (132, 0, 0, 64, 4096, 13.21),
        (132, 0, 0, 96, 2048, 11.69),
        (132, 0, 0, 192, 256, 9.22),
        (132, 0, 0, 192, 1024, 13.45),
        (132, 0, 0, 192, 4096, 30.12),
        (132, 0, 0, 255, 4096, 37.07),
    ],
    "prefill": [
        (132, 64, 0, 0, 0, 5.22),
        (132, 128, 4096, 0, 0, 7.37),
        (132, 384, 0, 0, 0, 10.01),
        (132, 384, 1024, 0, 0, 10.95),
        (132, 1024, 0, 0, 0, 25.13),
        (132, 1024, 4096, 0, 0, 29.22),
        (132, 1536, 0, 0, 0, 36.74),
        (132, 1536, 4096, 0, 0, 44.2),
        (132, 1536, 12288, 0, 0, 54.99),
        (132, 2048, 1024, 0, 0, 51.3),
    ],
    "hybrid": [
        (132, 64, 512, 16, 512, 6.5),
        (132, 64, 512, 192, 512, 11.66),
        (132, 128, 512, 192, 512, 13.17),
        (132, 256, 512, 16, 2048, 9.92),
        (132, 256, 512, 128, 512, 13.03),
        (132, 384, 512, 128, 512, 15.68),
        (132, 512, 512, 128, 2048, 24.12),
        (132, 768, 512, 128, 512, 26.56),
        (132, 768, 512, 192, 512, 27.28),
        (132, 1024, 512, 64, 2048, 31.39),
    ],
    "prefill on a part": [
        (40, 256, 0, 0, 0, 18.46),
        (40, 256, 4096, 0, 0, 21.96),
        (56, 1024, 4096, 0, 0, 58.94),
        (72, 256, 0, 0, 0, 11.33),
        (88, 256, 0, 0, 0, 11.44),
        (88, 512, 4096, 0, 0, 20.99),
        (104, 512, 0, 0, 0, 16.8),
        (104, 1024, 4096, 0, 0, 40.03),
        (104, 2048, 0, 0, 0, 63.94),
        (104, 2048, 4096, 0, 0, 79.3),
    ],
    "decode on a part": [
        (28, 0, 0, 16, 512, 9.5),
        (28, 0, 0, 128, 512, 23.12),
        (28, 0, 0, 128, 2048, 35.99),
        (44, 0, 0, 64, 2048, 15.04),
        (44, 0, 0, 128, 512, 15.23),
        (60, 0, 0, 64, 512, 9.27),
        (60, 0, 0, 64, 2048, 12.96),
        (60, 0, 0, 128, 2048, 20.56),
        (76, 0, 0, 16, 2048, 6.72),
        (76, 0, 0, 128, 2048, 16.82),
    ],
    "prefill beside decode": [
        (40, 512, 512, 0, 0, 43.13),
        (40, 1024, 512, 0, 0, 83.65),
        (56, 1024, 512, 0, 0, 64.15),
        (56, 1024, 512, 0, 0, 64.55),
        (72, 512, 512, 0, 0, 24.89),
        (72, 1024, 512, 0, 0, 48.75),
        (88, 512, 512, 0, 0, 23.0),
        (88, 1024, 512, 0, 0, 43.66),
        (104, 1024, 512, 0, 0, 40.32),
        (104, 1024, 512, 0, 0, 40.56),
    ],
    "decode beside prefill": [
        (28, 0, 0, 64, 512, 20.02),
        (28, 0, 0, 64, 1024, 24.13),
        (28, 0, 0, 64, 2048, 29.47),
        (44, 0, 0, 16, 1024, 9.75),
        (44, 0, 0, 64, 512, 14.0),
        (44, 0, 0, 64, 2048, 19.61),
        (60, 0, 0, 16, 1024, 8.23),
        (60, 0, 0, 64, 1024, 13.45),
        (76, 0, 0, 64, 512, 9.37),
        (76, 0, 0, 128, 1024, 15.72),
    ],
}


def predicted(kind, sms, new, start, rows, context):
    work = Work(new, new * (start + new / 2), start if new else 0, rows, rows * context)
    lane = "P" if kind.startswith("prefill") else "D"
    return roofline(EIGHT_B, H200).seconds(work, lane, sms / H200.parts, "beside" in kind)


@pytest.mark.parametrize("kind", MEASURED)
def test_steps_take_what_was_measured_within_an_eighth_half_of_the_time_and_a_quarter_always(kind):
    errors = sorted(abs(predicted(kind, *point) / (ms / 1e3) - 1.0) for *point, ms in MEASURED[kind])
    assert errors[len(errors) // 2] < 0.125
    assert errors[-1] < 0.25


# The same, of shapes with experts: prompt tokens (of a prompt of 4,096, the mean of its slices), decode rows at 1,024.
MEASURED_WITH_EXPERTS = {
    "deepseek-v2-lite": [
        (0, 64, 10.99), (128, 0, 11.70), (256, 0, 13.77), (512, 0, 18.32), (1024, 0, 26.86), (2048, 0, 46.82),
        (128, 64, 14.01), (256, 64, 15.95), (512, 64, 21.08), (1024, 64, 29.56),
    ],
    "qwen3-30b-a3b": [
        (0, 64, 19.09), (1024, 0, 22.39), (2048, 0, 41.77), (128, 64, 22.29), (256, 64, 24.49), (1024, 64, 36.46),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED_WITH_EXPERTS)
def test_steps_with_experts_take_what_was_measured_within_a_quarter(name):
    costs = roofline(KNOWN[name], H200).whole
    for new, rows, ms in MEASURED_WITH_EXPERTS[name]:
        starts = range(0, 4096, new) if new else [0]
        decodes = Work(rows=rows, context=rows * 1024)
        works = [decodes.and_slice(start, new) if new else decodes for start in starts]
        mean_ms = sum(map(costs.seconds, works)) / len(works) * 1e3
        assert mean_ms == pytest.approx(ms, rel=0.25), (new, rows)


def test_a_decode_step_reads_the_weights_once_whatever_its_rows_are():
    costs = roofline(EIGHT_B, H200).whole
    assert costs.seconds(Work(rows=32)) < 1.15 * costs.seconds(Work(rows=1))
    assert costs.seconds(Work(rows=1)) > 15e9 / H200.bandwidth


def test_a_large_batch_takes_its_arithmetic_and_no_design_beats_the_peak():
    costs = roofline(EIGHT_B, H200).whole
    least_s = 2 * 6.98e9 * 2048 / H200.flops
    assert least_s < costs.dense(2048) < 2 * least_s


@pytest.mark.parametrize("tokens", [1, 256, 2048])
def test_more_devices_are_faster_but_never_as_many_times_as_they_are(tokens):
    seconds = [roofline(SEVENTY_B, H200, tp).whole.dense(tokens) for tp in (1, 2, 4, 8)]
    for one, twice in pairwise(seconds):
        assert one / 2 < twice < one


def test_gpus_with_the_same_arithmetic_differ_by_their_memory_only():
    h100, h200 = (roofline(EIGHT_B, GPUS[name]).whole for name in ("h100", "h200"))
    assert h100.context_s / h200.context_s == pytest.approx(4.8 / 3.35)
    assert h100.pair_s == h200.pair_s
    assert roofline(EIGHT_B, GPUS["a100"]).whole.dense(2048) > 2.5 * h100.dense(2048)


def test_decode_keeps_most_of_its_speed_on_half_of_a_device_and_prefill_about_half():
    model = roofline(EIGHT_B, H200)
    half = min(model.divisions, key=lambda division: abs(division.share - 0.5))
    decode, prefill = Work(rows=32, context=32 * 4096), Work().and_slice(0, 2048)
    assert half.decode.seconds(decode) < 1.3 * model.whole.seconds(decode)
    assert 1.4 * model.whole.seconds(prefill) < half.prefill.seconds(prefill)


def test_a_small_cpu_is_as_slow_as_it_is():
    """SmolLM2-135M in float32 on two cores prefills 578 tokens/s and decodes 21 tokens/s alone (docs/plan.md)."""
    costs = roofline(KNOWN["smollm2"], cpu(2)).whole
    assert 512 / costs.seconds(Work().and_slice(0, 512)) == pytest.approx(578, rel=0.25)
    assert 1 / costs.seconds(Work(rows=1, context=100)) == pytest.approx(21, rel=0.25)
