"""A headless Chromium, driven over its own protocol on two pipes.

What a person sees and clicks, and what the page complains of.

No driver and no library between: commands are JSON, each ended by a zero byte
(``--remote-debugging-pipe``). Chromium is found on PATH, or installed by apt-get where this user may; where
neither works the tests fail and say what to install.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH, HEIGHT = 1366, 860
ANSWER_SECONDS: Final = 60.0
_PIPES: Final = (
    "import fcntl, os, sys;"
    "theirs, ours = (fcntl.fcntl(int(each), fcntl.F_DUPFD, 20) for each in sys.argv[1:3]);"
    "os.dup2(theirs, 3); os.dup2(ours, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""Chromium reads commands from descriptor 3 and writes answers to descriptor 4."""


def find_chromium() -> str:
    """The browser's program, installed where it is not there and this user may.

    Raises AssertionError that says what to do.
    """
    found = _on_path()
    if not found and shutil.which("apt-get") and os.geteuid() == 0:
        apt = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y"]
        subprocess.run([*apt, "update"], stdout=sys.stderr, timeout=300, check=False)
        subprocess.run(
            [*apt, "install", "--no-install-recommends", "chromium"], stdout=sys.stderr, timeout=600, check=False
        )
        found = _on_path()
    assert found, f"no browser: install one of {', '.join(NAMES)} (Debian: `sudo apt-get install chromium`)"
    return found


def _on_path() -> str:
    return next((path for name in NAMES if (path := shutil.which(name))), "")


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser with a profile of its own in `folder`, and its one page; gone with the block."""
    commands, to_us = os.pipe(), os.pipe()
    arguments = [
        "--headless=new",
        "--no-sandbox",  # tests may run as root; it opens our own pages alone
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--hide-scrollbars",
        "--no-proxy-server",
        f"--user-data-dir={folder}",
        f"--window-size={WIDTH},{HEIGHT}",
        "--remote-debugging-pipe",
    ]
    with (folder / "chromium.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _PIPES, str(commands[0]), str(to_us[1]), find_chromium(), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(commands[0], to_us[1]),
            start_new_session=True,
        )
    os.close(commands[0])
    os.close(to_us[1])
    try:
        yield Page(_Wire(commands[1], to_us[0]))
    finally:
        os.close(commands[1])  # it ends when nobody can command it any more
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=15)
        os.close(to_us[0])


class _Wire:
    """Commands out, answers and events in."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        self._number += 1
        said = {"id": self._number, "method": method, "params": parameters} | (
            {"sessionId": session} if session else {}
        )
        os.write(self._write, json.dumps(said).encode() + b"\0")
        end = time.monotonic() + ANSWER_SECONDS
        while True:
            found = self._next(end - time.monotonic())
            assert found is not None, f"{method}: the browser does not answer"
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                return dict(found["result"])
            self.events.append(found)

    def listen(self) -> None:
        """Take in what has come."""
        while (found := self._next(0)) is not None:
            self.events.append(found)

    def _next(self, seconds: float) -> dict[str, Any] | None:
        end = time.monotonic() + seconds
        while b"\0" not in self._rest:
            if not wait([self._read], max(0.0, end - time.monotonic())):
                return None
            more = os.read(self._read, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        message, self._rest = self._rest.split(b"\0", 1)
        return dict(json.loads(message))


class Page:
    """One page. What it complained of and what it fetched stand in :attr:`errors` and :attr:`fetched`."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire
        target = wire.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = wire.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self.size(WIDTH, HEIGHT)

    def size(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def theme(self, name: str) -> None:
        """`light` or `dark`, as the reader's system has it; whoever keeps a choice of its own is not asked."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def cookie(self, url: str, name: str, value: str) -> None:
        """Have the browser send a cookie to where `url` is."""
        self._call("Network.setCookie", url=url, name=name, value=value)

    def open(self, url: str, *, ready: str = "document.readyState === 'complete'") -> None:
        """Go to `url` and wait until the expression `ready` is true there."""
        self._call("Page.navigate", url=url)
        self.wait(f"location.href !== 'about:blank' && ({ready})", what=f"{url}: {ready}")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; a promise is waited for."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait(self, expression: str, *, seconds: float = 45.0, what: str = "") -> Any:
        """Wait until the expression is true; its value. A page that is being replaced is asked again."""
        end = time.monotonic() + seconds
        while True:
            found = self._call(
                "Runtime.evaluate",
                expression=f"(() => {{ try {{ const it = ({expression}); return it?.nodeType ? true : it }} catch"
                f" {{ return null }} }})()",
                returnByValue=True,
            )
            if found["result"].get("value"):
                return found["result"]["value"]
            assert time.monotonic() < end, (
                f"{what or expression}: not within {seconds:.0f} s; the page says:\n{self.text()[:2000]}"
            )
            time.sleep(0.1)  # the poll interval of a wait with a deadline

    def text(self) -> str:
        """What a reader sees of the page."""
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def click(self, element: str) -> None:
        """Click the element that the expression `element` gives, with the mouse, once it is
        there, uncovered, and stands still.
        """
        box = (
            f"(() => {{ const it = {element}; if (!it || it.disabled) return null; "
            f" it.scrollIntoView({{block: 'nearest'}});"
            " const box = it.getBoundingClientRect(), place = [box.x + box.width / 2, box.y + box.height / 2];"
            " const top = box.width ? it.ownerDocument.elementFromPoint(...place) : null;"
            " return top && (it.contains(top) || top.contains(it)) ? place : null; })()"
        )
        before = None
        end = time.monotonic() + 45
        while (found := self.wait(box, what=f"{element} can be clicked")) != before:
            assert time.monotonic() < end, f"{element} does not stand still"
            before = found
            time.sleep(0.1)  # between two looks at where it is
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=found[0], y=found[1], button="left", clickCount=1)

    def click_until(self, element: str, expression: str, *, seconds: float = 45.0) -> None:
        """Click, and again while nothing comes of it, as a person does.

        A page that is just being replaced takes no click.
        """
        end = time.monotonic() + seconds
        while True:
            self.click(element)
            try:
                self.wait(expression, seconds=5.0)
                return
            except AssertionError:
                if time.monotonic() >= end:
                    raise

    def type(self, element: str, text: str) -> None:
        """Put `text` into a field in place of what it holds, as a person types it."""
        self.click(element)
        self.evaluate(f"{element}.select && {element}.select()")
        self._call("Input.insertText", text=text)

    def picture(self, file: Path, *, whole: bool = False) -> None:
        """A picture of what is seen, or of the whole page, once its fonts are there and nothing moves."""
        self.evaluate(
            "document.fonts.ready.then(() => new Promise((done) => "
            "requestAnimationFrame(() => requestAnimationFrame(() => done(1)))))"
        )
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = self._call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole, **({"clip": clip} if whole else {})
        )
        file.write_bytes(base64.b64decode(taken["data"]))

    @property
    def errors(self) -> list[str]:
        """Exceptions of the page's scripts, and what its console calls an error, so far."""
        self._wire.listen()
        found = []
        for each in self._wire.events:
            parameters = each.get("params", {})
            if each.get("method") == "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                found.append(str(details.get("exception", {}).get("description") or details.get("text")))
            elif each.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                found.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
            elif each.get("method") == "Runtime.consoleAPICalled" and parameters["type"] == "error":
                found.append(" ".join(str(one.get("value") or one.get("description")) for one in parameters["args"]))
        return found

    @property
    def fetched(self) -> list[str]:
        """Addresses that the page asked for so far."""
        self._wire.listen()
        sent = [
            each["params"]["request"]["url"]
            for each in self._wire.events
            if each.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in sent if url.startswith(("http", "ws"))]

    def forget(self) -> None:
        """Begin a new list of errors and addresses."""
        self._wire.listen()
        self._wire.events.clear()

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._wire.call(method, self._session, **parameters)
