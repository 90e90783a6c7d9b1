"""Chromium without a window, told what to do over the DevTools protocol's pipe: needs nothing but the browser."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync"),
    *("--disable-quic", "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
]


class Browser:
    """One page. Needs CHROMIUM not to be None; ``profile`` is an empty folder."""

    def __init__(self, profile: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # The browser reads commands from descriptor 3 and writes to 4.
        program = ["bash", "-c", f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"', "browser"]
        self._process = subprocess.Popen(
            [*program, CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._from, self._to = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb", 0)
        self._rest = b""
        self._asked = 0
        self._session: str | None = None
        self.problems: list[str] = []  # what the page complained of
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.tell(f"{domain}.enable")

    def tell(self, method: str, **parameters):
        """Carries out a command, and returns its result."""
        self._asked += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._asked, "method": method, "params": parameters, **session}
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._asked:
                assert "error" not in answer, answer
                return answer["result"]

    def show(self, url: str, width: int = 1280, height: int = 1000, scheme: str = "light") -> None:
        """Opens a page in a window of this size, for people who like light or dark pages."""
        self.tell(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.tell("Page.navigate", url=url)

    def value(self, expression: str):
        """Of JavaScript in the page."""
        result = self.tell("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 20) -> None:
        for _ in range(int(seconds / 0.1)):
            if self.value(expression):
                return
            time.sleep(0.1)
        raise AssertionError(f"never came true: {expression}\n{self.value('document.body.innerText')}")

    def screenshot(self, path: Path) -> None:
        """Of the whole page, as PNG."""
        shot = self.tell("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._from.close()
        self._to.close()

    def _next(self):
        while b"\0" not in self._rest:
            piece = os.read(self._from.fileno(), 1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        told = json.loads(message)
        if told.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(told["params"]["exceptionDetails"]))
        if told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
            self.problems.append(told["params"]["entry"]["text"])
        return told
