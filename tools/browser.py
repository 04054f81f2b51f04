"""Chromium without a window, driven through its DevTools protocol: what a page draws, logs and asks of the network, and
its plots as SVG, which plotly writes in a browser only.

`make browser` installs it. Messages are JSON with a zero byte at the end, over descriptors 3 and 4 of the browser.
"""

import base64
import json
import os
import re
import select
import shutil
import subprocess
import time
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

PATIENCE = 600.0  # seconds for an answer
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe"]
# A mouse, which no headless machine has.
FLAGS += ["--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4"]
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Browser:
    """A page at a time. `log` has what its console and its policy complain of, `requests` what it asked for."""

    def __init__(self, profile: Path) -> None:
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            raise FileNotFoundError(f"browser: must be one of {', '.join(PROGRAMS)}, got none. Run make browser.")
        reads, self._out = os.pipe()
        self._in, writes = os.pipe()

        connected = ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "bash"]
        command = [*connected, program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=(reads, writes), **quiet)
        os.close(reads)
        os.close(writes)
        self._received, self._number = b"", 0
        self.log: list[str] = []
        self.requests: list[str] = []
        try:
            target = self.send("Target.createTarget", session=False, url="about:blank")["targetId"]
            attached = self.send("Target.attachToTarget", session=False, targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.send(f"{domain}.enable")
        except BaseException:
            self._process.kill()  # no one else knows of it
            self._process.wait()
            raise

    def close(self) -> None:
        self.send("Browser.close", session=False)
        self._process.wait(PATIENCE)
        os.close(self._in)
        os.close(self._out)

    def open(self, path: Path, *, width: int, dark: bool = False, touch: bool = False) -> None:
        """Until everything is drawn. `touch`: as a phone has it, with fingers and no mouse."""
        self.send("Page.navigate", url="about:blank")
        self.log, self.requests = [], []
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=touch)
        self.send("Emulation.setTouchEmulationEnabled", enabled=touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + PATIENCE
        while self.run("document.documentElement?.dataset.drawn") != "true":
            if time.monotonic() > end:
                raise TimeoutError(f"browser: {path} must be drawn in {PATIENCE:.0f} s, was not. It said: {self.log}")
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """The value of a line of JavaScript."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"browser: {script!r} must run, got {answer['exceptionDetails']}.")
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float) -> None:
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def picture(self, path: Path) -> None:
        """Of the whole page."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def svg(self, plot: str, *, title: str, description: str, width: int = 720, height: int = 400) -> str:
        """A plot by its id, as a picture on white that a screen reader can name. The same plot gives the same bytes."""
        size = f"{{format: 'svg', width: {width}, height: {height}}}"
        address: str = self.run(f"Plotly.toImage(document.getElementById({plot!r}), {size})")
        drawn = unquote(address.partition(",")[2])
        drawn = re.sub(r"\b(defs-|topdefs-|clip|legend|scatter trace)[0-9a-f]{6}", r"\1", drawn)  # drawn at random
        head, _, body = drawn.partition(">")
        ground = f'<rect width="{width}" height="{height}" fill="#FFFFFF"/>'
        return f"{head}><title>{escape(title)}</title><desc>{escape(description)}</desc>{ground}{body}\n"

    def send(self, method: str, *, session: bool = True, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"browser: {method} must succeed, got {answer['error']}.")
        found: dict[str, Any] = answer["result"]
        return found

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._in], [], [], PATIENCE)
            if not ready:
                raise TimeoutError(f"browser: must answer in {PATIENCE:.0f} s, did not.")
            received = os.read(self._in, 2**20)
            if not received:
                raise ConnectionError("browser: must answer, has ended instead. Look for what killed it.")
            self._received += received
        message, _, self._received = self._received.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        about = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning", "assert"):
                self.log.append(f"console: {about['args']}")
            case "Runtime.exceptionThrown":
                self.log.append(f"exception: {about['exceptionDetails']}")
            case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                self.log.append(f"{about['entry']['source']}: {about['entry']['text']}")
            case "Network.requestWillBeSent" if not about["request"]["url"].startswith("data:"):
                self.requests.append(about["request"]["url"])
