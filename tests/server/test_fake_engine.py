import asyncio

import pytest

from tidegate.base.errors import EngineDead
from tidegate.base.request import RequestSpec, SamplingParams
from tidegate.server.fake import FakeEngine, Script


def outputs(engine: FakeEngine, *specs: RequestSpec, during=lambda: None):
    """The outputs of each request, all submitted at once; ``during`` is called after the first step."""

    async def read(stream):
        return [output async for output in stream]

    async def run():
        streams = [engine.submit(spec) for spec in specs]
        asyncio.get_running_loop().call_later(0.05, during)
        return await asyncio.gather(*(read(stream) for stream in streams), return_exceptions=True)

    return asyncio.run(run())


def test_every_request_ends_once_at_its_limit_or_at_a_stop_id():
    until_limit = RequestSpec("a", [1, 2, 3], 5)
    until_stop = RequestSpec("b", [1, 2, 3], 5, SamplingParams(stop_token_ids=(2,)))
    barred = RequestSpec("c", [1, 2, 3], 9, SamplingParams(stop_token_ids=(2,), min_tokens=3))
    a, b, c = outputs(FakeEngine(), until_limit, until_stop, barred)
    assert [(token, out.finish) for out in a for token in out.tokens] == [
        *((token, None) for token in (1, 2, 3, 1)),
        (2, "length"),
    ]
    assert [out.tokens for out in b] == [[1], [2]]
    assert [out.tokens for out in c] == [[1], [2], [3], [1], [2]]
    assert b[-1].finish == c[-1].finish == "stop"


def test_an_aborted_request_ends_as_aborted_and_others_go_on():
    engine = FakeEngine(lambda spec: Script([7], wait_steps=10**9 if spec.id == "a" else 100), step_s=0.001)
    a, b = outputs(engine, RequestSpec("a", [1], 5), RequestSpec("b", [1], 5), during=lambda: engine.abort("a"))
    assert [out.finish for out in a] == ["abort"]
    assert b[-1].finish == "length"


def test_a_dead_engine_breaks_its_streams_and_takes_no_more():
    engine = FakeEngine(lambda spec: Script([7], wait_steps=10**9), step_s=0.001)
    (broken,) = outputs(engine, RequestSpec("a", [1], 5), during=engine.die)
    assert isinstance(broken, EngineDead)
    with pytest.raises(EngineDead):
        engine.submit(RequestSpec("b", [1], 5))
