"""A real headless Chromium, driven over the W3C WebDriver protocol by its own chromedriver; no client library."""

import base64
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

HOW_TO_GET: Final = "needs Chromium and its driver: apt-get install chromium chromium-driver (scripts/install-browser)"
ELEMENT: Final = "element-6066-11e4-a52e-4f735466cecf"
"""The protocol's key of a reference to an element."""
REDRAWN: Final = "stale element reference"
"""The protocol's error for an element that has left the page since it was found."""


def is_installed() -> bool:
    """Whether there is a browser to drive."""
    return bool(shutil.which("chromedriver") and (shutil.which("chromium") or shutil.which("google-chrome")))


@dataclass(slots=True)
class Browser:
    """One window."""

    http: httpx.Client
    session: str

    def open(self, url: str) -> None:
        """Go to `url`."""
        self._post("url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What `script` returns in the page."""
        return self._post("execute/sync", {"script": script, "args": list(arguments)})

    def click(self, selector: str) -> None:
        """Click the middle of an element, which must be visible there."""
        self._to_element(selector, lambda element: self.http.post(f"{element}/click", json={}))

    def type(self, selector: str, text: str) -> None:
        """Type into an element."""
        self._to_element(selector, lambda element: self.http.post(f"{element}/value", json={"text": text}))

    def text(self, selector: str) -> str:
        """The text that a person sees in an element."""
        return str(self._to_element(selector, lambda element: self.http.get(f"{element}/text")))

    def until(self, condition: Callable[[], object], what: str, seconds: float = 90.0) -> None:
        """Wait for `condition`; fails showing the page's text and its console."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self.text('body')}\n{self.complaints()}"
            time.sleep(0.05)

    def complaints(self) -> list[str]:
        """What the browser's console says of errors since last asked."""
        entries = self._post("se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def screenshot(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode(self._get("screenshot"))

    def emulate(self, **features: str) -> None:
        """Pretend that the reader's system prefers something, as `prefers_color_scheme="dark"`."""
        media = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self._post("goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": {"features": media}})

    def _to_element(self, selector: str, act: Callable[[str], httpx.Response]) -> Any:
        """Find an element and act on it, again where the page has drawn itself anew in between."""
        while True:
            found = self._post("element", {"using": "css selector", "value": selector})[ELEMENT]
            response = act(f"/session/{self.session}/element/{found}")
            if response.is_success or response.json()["value"]["error"] != REDRAWN:
                return _value(response)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _value(self.http.post(f"/session/{self.session}/{path}", json=body))

    def _get(self, path: str) -> Any:
        return _value(self.http.get(f"/session/{self.session}/{path}"))


def _value(response: httpx.Response) -> Any:
    value = response.json()["value"]
    assert response.status_code == 200, value
    return value


@contextmanager
def browser(directory: Path, width: int = 1280, height: int = 900) -> Iterator[Browser]:
    """A browser with a profile of its own under `directory`."""
    log = directory / "chromedriver.log"
    with log.open("wb") as output:
        driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=output, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=_address(driver, log), trust_env=False, timeout=120) as http:
            session = _value(http.post("/session", json=_wanted(directory, width, height)))["sessionId"]
            yield Browser(http, session)
            http.delete(f"/session/{session}")
    finally:
        driver.terminate()
        driver.wait(60)


def _address(driver: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + 90
    while not (found := re.search(r"started successfully on port (\d+)", log.read_text(errors="replace"))):
        assert driver.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.05)
    return f"http://127.0.0.1:{found[1]}"


def _wanted(directory: Path, width: int, height: int) -> dict[str, Any]:
    arguments = [
        "--headless=new",
        "--no-sandbox",  # it can't be had as root or in most containers; the page under test is our own
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--no-proxy-server",
        f"--window-size={width},{height}",
        f"--user-data-dir={directory / 'profile'}",
    ]
    options = {"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}
    return {"capabilities": {"alwaysMatch": {"browserName": "chrome", **options}}}
