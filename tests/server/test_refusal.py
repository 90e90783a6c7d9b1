"""A request that would be far too late for its SLO is refused as OpenAI's clients expect it, with the time to wait."""

import msgspec
import openai
import pytest

from tidegate.base.request import Output
from tidegate.node.wire import Outputs, pack
from tidegate.server.fake import Script


@pytest.mark.parametrize(("wait_s", "header"), [(0.2, "1"), (3.1, "4"), (None, "1")])
@pytest.mark.parametrize("stream", [False, True])
def test_it_is_told_after_how_many_whole_seconds_to_try_again(live, wait_s, header, stream):
    reason = "its first token would come in 4.2 s, too late for its SLO"
    server = live(lambda request: Script([1], finish="rejected", reason=reason, retry_after_s=wait_s))
    with pytest.raises(openai.RateLimitError) as caught:
        server.openai.completions.create(model="smol", prompt="hi", stream=stream)
    assert caught.value.status_code == 429
    assert caught.value.response.headers["retry-after"] == header
    assert caught.value.code == "overloaded" and reason in caught.value.message


def test_the_time_to_wait_crosses_the_wire():
    sent = Outputs([Output("a", [], "rejected", "why", retry_after_s=1.5), Output("b", [7])])
    assert msgspec.msgpack.decode(pack(sent)[4:], type=Outputs) == sent
