"""Without a GPU, mode pod serves with ordinary attention, and says so once."""

import asyncio

from engine_driver import EngineDriver

from tidegate.node.client import start_engine
from tidegate.node.config import EngineConfig
from tidegate.node.doctor import report


def config(model, mode):
    return EngineConfig(model=model[0], device="cpu", mode=mode, max_model_len=2100, num_blocks=300, max_num_seqs=8)


def test_the_start_says_once_that_attention_is_not_fused_and_why(tiny_model):
    async def stages(mode):
        told = []
        engine = await start_engine(config(tiny_model, mode), lambda stage, fraction: told.append(stage))
        await engine.close()
        return [stage for stage in told if "attention" in stage]

    assert asyncio.run(stages("pod")) == [
        "attention of prompts and decodes runs in two kernels: one kernel for both needs a GPU"
    ]
    assert asyncio.run(stages("chunked")) == []


def test_answers_are_transformers_and_no_choice_is_counted(tiny_model, references):
    with EngineDriver(config(tiny_model, "pod")) as engine:
        short = [expected for expected in references if len(expected.prompt) < 200]
        answers = engine.answers([engine.spec(r.prompt, len(r.tokens)) for r in short])
        for expected, answer in zip(short, answers, strict=True):
            expected.check(answer.tokens)
        stats = engine.stats()
        assert stats.mode == "pod" and stats.lanes["D"].hybrid_attention == {}


def test_doctor_says_it_as_well(monkeypatch):
    monkeypatch.setattr("tidegate.node.doctor.why_no_gpu", lambda: "there is none")
    assert "ordinary attention" in dict(report())["pod"]
