"""The live page in a real browser, over a server whose engine is a fake that tests can set."""

import asyncio
import threading

import httpx
import pytest
import uvicorn
from browser import CHROMIUM, Browser

from tidegate.base.stats import LaneStats
from tidegate.server.app import create_app
from tidegate.server.fake import FakeEngine
from tidegate.server.run import listen
from tidegate.server.settings import ServerSettings
from tidegate.slo.goodput import Slo

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

EASY = Slo(60.0, 60.0)
DRAWN = """[...document.querySelectorAll('canvas')].every(canvas => {
    const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    return pixels.some(value => value > 0);
})"""


class Server:
    def __init__(self, slo):
        self.engine = FakeEngine()
        stats = self.engine.statistics
        stats.gate, stats.order = "static", "shortest"
        if slo is not None:
            stats.slo_ttft_s, stats.slo_tpot_s, stats.slo_metric = slo.ttft_s, slo.tpot_s, str(slo.metric)
        listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = create_app(self.engine, None, ServerSettings(model_names=("tiny",), slo=slo))
        self._feed = app.state.feed
        self._server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(listener)))
        self._thread.start()

    async def _main(self, listener):
        self._loop = asyncio.get_running_loop()
        await self._server.serve([listener])

    def complete(self, prompt_tokens, slo=None):
        body = {"prompt": [1] * prompt_tokens, "max_tokens": 5}
        headers = {"X-SLO": slo} if slo else {}
        assert httpx.post(f"{self.url}/v1/completions", json=body, headers=headers).status_code == 200

    def call(self, function):
        self._loop.call_soon_threadsafe(function)

    def close(self):
        self._server.should_exit = True
        self.call(self._feed.close)
        self._thread.join()


@pytest.fixture
def start():
    servers = []

    def one(slo=EASY):
        servers.append(Server(slo))
        return servers[-1]

    yield one
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    running = Browser(tmp_path_factory.mktemp("browser"))
    yield running
    running.close()
    assert running.problems == []


def text(browser, selector):
    return browser.value(f"document.querySelector({selector!r}).innerText")


def wait_for_text(browser, selector, part):
    browser.wait_for(f"document.querySelector({selector!r})?.innerText.includes({part!r})")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 380])
def test_everything_is_drawn_and_fits_the_window(start, browser, width, scheme):
    server = start()
    for i in range(8):
        server.complete(10 * i + 1, "ttft=1us" if i % 4 == 0 else None)
    server.engine.statistics.blocks_used = 256
    browser.show(f"{server.url}/ui", width, 900, scheme)
    wait_for_text(browser, "#attainment .now", "75 % of 8 requests")
    wait_for_text(browser, "#gate .tags", "mode semi")
    wait_for_text(browser, "#lanes tbody", "prefill")
    browser.wait_for(DRAWN)
    assert "4,096 of 16.4\u00a0k tokens" in text(browser, "#kv .now")
    assert "2 by TTFT" in text(browser, "#attainment .missed")
    assert "SLO" in text(browser, "#attainment .tags")
    assert browser.value("document.querySelectorAll('.quartiles tr').length") == 4
    assert browser.value("document.documentElement.scrollWidth") <= width
    shade = browser.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(shade) < 150) == (scheme == "dark")


def test_an_idle_engine_without_an_slo_says_both(start, browser):
    server = start(slo=None)
    browser.show(f"{server.url}/ui")
    wait_for_text(browser, "#state", "idle")
    wait_for_text(browser, "#attainment", "No SLO")
    wait_for_text(browser, "#ttft", "No request has ended lately")


def test_one_lane_has_nothing_to_divide(start, browser):
    server = start()
    server.engine.statistics.lanes = {"D": LaneStats(alive=True, phases="PD"), "P": LaneStats()}
    browser.show(f"{server.url}/ui")
    wait_for_text(browser, "#gate", "nothing to divide")
    wait_for_text(browser, "#lanes .now", "1 in mode")
    assert browser.value("document.querySelectorAll('#lanes tbody tr').length") == 1


def test_what_the_gate_chose_is_named_also_where_the_page_does_not_know_the_word(start, browser):
    server = start()
    stats = server.engine.statistics
    browser.show(f"{server.url}/ui")
    wait_for_text(browser, "#gate .tags", "static")
    stats.gate_choices = {"decode beside prefill": 30, "<b>surf</b>": 10}
    wait_for_text(browser, "#gate .now", "side by side 75 %")
    wait_for_text(browser, "#gate", "<b>surf</b>")


def test_a_death_is_told_and_the_figures_stay(start, browser):
    server = start()
    server.complete(5)
    browser.show(f"{server.url}/ui")
    wait_for_text(browser, "#attainment .now", "100 % of 1 request")
    server.call(server.engine.die)
    wait_for_text(browser, "#state", "engine stopped")
    assert "100 %" in text(browser, "#attainment .now")


def test_a_server_that_ends_says_so(start, browser):
    server = start()
    browser.show(f"{server.url}/ui")
    wait_for_text(browser, "#state", "idle")
    server.call(server._feed.close)
    wait_for_text(browser, "#state", "shutting down")


def test_ten_minutes_can_be_shown_instead_of_two(start, browser):
    server = start()
    browser.show(f"{server.url}/ui")
    wait_for_text(browser, "#state", "idle")
    browser.value("document.querySelector('[data-seconds=\"600\"]').click()")
    assert browser.value("document.querySelector('[data-seconds=\"600\"]').ariaPressed") == "true"
    assert browser.value("document.querySelector('[data-seconds=\"120\"]').ariaPressed") == "false"
