"""The page, in a real headless browser, before a real group of two stages: what a person sees and can do."""

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from boards.browser import HOW_TO_GET, Browser, browser, is_installed
from oracles.tiny_models import write_tiny_llama
from processes.gateway_harness import MODEL, RunningGateway, eventually, group, running_gateway, write_endpoints
from processes.running_group import running_group
from processes.scripted_engine import ScriptedEngine
from stageline_api.endpoints import GroupEndpoint
from stageline_gateway.settings import GatewaySettings

pytestmark = [pytest.mark.skipif(not is_installed(), reason=HOW_TO_GET), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as window:
        yield window


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A gateway before a real group, and one group more that isn't ready."""
    directory = tmp_path_factory.mktemp("served")
    model = write_tiny_llama(directory / "model", num_layers=4)
    with (
        running_group(directory / "group", model, 2, dtype="float32") as served,
        running_gateway(GatewaySettings(directory / "endpoints.json")) as gateway,
    ):
        stages = httpx.get(f"{served.url}/stages", trust_env=False, timeout=60).json()
        names = {"model": stages["served_name"], "incarnation": stages["incarnation"]}
        real = GroupEndpoint(**names, group=0, url=served.url, ready=True)
        write_endpoints(
            gateway.endpoints, real, group("http://127.0.0.1:1", 1, real.model, ready=False, message="stage 1 loads")
        )
        eventually(lambda: gateway.http.get("/readyz").status_code == 200, "not ready")
        yield gateway


def pixels(window: Browser, selector: str) -> dict[str, int]:
    """How many pixels of a canvas have each colour."""
    script = """
    const canvas = document.querySelector(arguments[0]), found = {};
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    for (let at = 0; at < data.length; at += 4) {
      const colour = data.slice(at, at + 3).join();
      found[colour] = (found[colour] || 0) + 1;
    }
    return found;"""
    return dict(window.run(script, selector))


def ask(window: Browser, text: str) -> None:
    window.type("#prompt", text)
    window.click("#send")


def test_models_chat_and_pipeline(gateway: RunningGateway, window: Browser) -> None:
    window.open(gateway.url)
    window.until(lambda: "stage 1 loads" in window.text("#models"), "no models")
    # While everything else starts, the group may be slow to answer a probe.
    window.until(lambda: re.match(r"\S+ 0 ready \d+\n", window.text("#models")), "group 0 is not ready")
    # The longest: the answer must still be in the picture when a busy machine has got round to looking at it.
    window.run("document.querySelector('#window').value = '10'")
    ask(window, "Once upon a time")
    window.until(lambda: "tokens in" in window.text("#speed"), "no answer")
    assert window.text("#talk .you") == "Once upon a time"
    assert window.run("return document.querySelector('#talk .model').textContent")
    window.until(lambda: "Bubble:" in window.text("#bubble"), "no picture")
    assert window.run("return document.querySelectorAll('.lane canvas').length") == 2
    busy_waiting_idle = {"224,123,22", "59,120,216", "221,226,232"}

    def lanes() -> list[dict[str, int]]:
        return [pixels(window, f".lane:nth-child({lane}) canvas") for lane in (1, 2)]

    # A picture of the last seconds of a loaded machine may hold no idle moment yet.
    window.until(lambda: all(busy_waiting_idle <= painted.keys() for painted in lanes()), "busy, waiting or idle lacks")
    for lane in ("1", "2"):
        spoken = window.run("return document.querySelector(arguments[0]).ariaLabel", f".lane:nth-child({lane}) canvas")
        assert re.match(r"Stage \d: busy \d+ %, waiting \d+ %", spoken), spoken
    assert window.complaints() == []


def test_a_group_without_a_picture_says_why(gateway: RunningGateway, window: Browser) -> None:
    window.open(gateway.url)
    window.until(lambda: window.run("return document.querySelectorAll('#group option').length") == 2, "no groups")
    window.run("document.querySelector('#group').selectedIndex = 1")
    window.until(lambda: "does not answer" in window.text("#bubble"), "no reason")


def test_colours_follow_the_reader(gateway: RunningGateway, window: Browser) -> None:
    def contrast() -> float:
        script = "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
        ink, ground = (_luminance(colour) for colour in window.run(script))
        return (max(ink, ground) + 0.05) / (min(ink, ground) + 0.05)

    grounds = []
    for scheme in ("light", "dark"):
        window.emulate(prefers_color_scheme=scheme)
        window.open(gateway.url)
        grounds.append(window.run("return getComputedStyle(document.body).backgroundColor"))
        assert contrast() > 7, f"{scheme}: WCAG's enhanced contrast"
    assert grounds[0] != grounds[1]
    window.emulate(prefers_color_scheme="light")


def _luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)` (WCAG 2.2)."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_everything_has_a_name(gateway: RunningGateway, window: Browser) -> None:
    """What a screen reader says of each control is something."""
    window.open(gateway.url)
    script = """return [...document.querySelectorAll("input, select, textarea, button")]
      .filter((control) => !(control.labels?.length || control.textContent.trim() || control.ariaLabel))
      .map((control) => control.outerHTML)"""
    assert window.run(script) == []
    assert window.run("return document.documentElement.lang") == "en"
    assert window.run("return document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"


def test_a_key_is_asked_for_and_text_is_never_markup(tmp_path: Path, window: Browser, engine: ScriptedEngine) -> None:
    keys, secret = tmp_path / "keys.yaml", "sk-page-0123456789"
    keys.write_text(f"keys: [{{name: page, key: {secret}}}]")
    with running_gateway(GatewaySettings(tmp_path / "e.json", keys_path=keys)) as gateway:
        write_endpoints(gateway.endpoints, group(engine.url, message=""))
        window.open(gateway.url)
        window.until(lambda: "API key" in window.text("#notice"), "no word of a key")
        window.type("#key", secret)
        window.click("#key-form button")
        window.until(lambda: MODEL in window.text("#models"), "the key does not open")
        ask(window, "<img src=x onerror=alert(1)>")
        window.until(lambda: "Hello world" in window.text("#talk"), "no answer")
        assert window.run("return document.querySelectorAll('#talk img').length") == 0
        assert secret not in window.run("return document.documentElement.outerHTML")
        window.run("sessionStorage.clear()")


def test_the_kept_screenshot_is_a_small_picture() -> None:
    """`docs/images/page.png` was made from the page by scripts/page-screenshot."""
    content = (Path(__file__).parents[3] / "docs" / "images" / "page.png").read_bytes()
    assert len(content) < 200_000
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 1000
    assert height >= 600
    assert zlib.crc32(content[12:29]) == struct.unpack(">I", content[29:33])[0], "its header is whole"
