import httpx
import pytest
from conftest import eventually

from tidegate.server.fake import Script


@pytest.fixture(scope="module")
def endless(live):
    """Its model goes on for 8000 tokens, slowly."""
    return live(lambda request: Script([300]), step_s=0.002)


@pytest.fixture(scope="module")
def silent(live):
    """Its model never says its first token."""
    return live(lambda request: Script([300], wait_steps=10**9), step_s=0.002)


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_within_a_stream_ends_its_requests(endless, n):
    before = len(endless.engine.submitted)
    body = {"prompt": "hi", "max_tokens": 8000, "stream": True, "n": n}
    with endless.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    mine = {spec.id for spec in endless.engine.submitted[before:]}
    assert len(mine) == n
    eventually(lambda: mine <= set(endless.engine.aborted))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_ends_its_requests(silent, stream):
    before = len(silent.engine.submitted)
    with pytest.raises(httpx.ReadTimeout):
        silent.http.post("/v1/completions", json={"prompt": ["hi", "ho"], "stream": stream}, timeout=0.3)
    mine = {spec.id for spec in silent.engine.submitted[before:]}
    assert len(mine) == 2
    eventually(lambda: mine <= set(silent.engine.aborted))


def test_a_client_that_stays_is_not_disturbed_by_one_that_leaves(endless):
    with endless.http.stream(
        "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 200, "stream": True}
    ) as stays:
        lines = stays.iter_lines()
        next(lines)
        with endless.http.stream(
            "POST", "/v1/completions", json={"prompt": "b", "max_tokens": 8000, "stream": True}
        ) as leaves:
            next(leaves.iter_lines())
        assert sum('"text"' in line for line in lines) == 199


def test_a_request_that_finished_is_not_aborted(echo):
    echo.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3})
    assert echo.engine.submitted[-1].id not in echo.engine.aborted
