"""The page in a real browser: typing, streaming, tints, details, two methods side by side, keyboard, phone width."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.conftest import Reached

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.browser

PAGE = Path(__file__).parents[2] / "src" / "vivace" / "serve" / "playground.html"
PROMPT = "Describe: name[Green Man], food[Indian], area[riverside]"


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no chromium on this machine")
    with playwright.sync_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        found = driver.chromium.launch(executable_path=program, args=flags)
        yield found
        found.close()


@pytest.fixture
def page(browser: playwright.Browser, server: Reached) -> Iterator[playwright.Page]:
    context = browser.new_context(viewport={"width": 1100, "height": 800})
    found = context.new_page()
    asked: list[str] = []
    complaints: list[str] = []
    found.on("request", lambda request: asked.append(request.url))
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    found.goto(server.url)
    found.wait_for_function("document.querySelector('#method').value")
    yield found
    context.close()
    assert complaints == []
    assert all(url.startswith((server.url, "data:")) for url in asked), "the page asks nothing of other machines"


def say(page: playwright.Page, prompt: str) -> None:
    page.locator("#prompt").fill(prompt)
    page.locator("#prompt").press("Enter")


def test_tokens_stream_and_are_tinted_by_step(page: playwright.Page) -> None:
    page.select_option("#model", "alpha")
    page.select_option("#method", "multirate")
    page.locator("#limit").fill("40")
    say(page, PROMPT)
    page.locator(".token").first.wait_for()
    page.locator(".answer[data-done]").wait_for()
    steps = page.evaluate(
        "[...document.querySelectorAll('.token')].map(t => [t.info.step, getComputedStyle(t).backgroundColor])"
    )
    assert len({step for step, _ in steps}) > 1
    tints = {step: {color for other, color in steps if other == step} for step, _ in steps}
    assert all(len(colors) == 1 for colors in tints.values()), "one tint for the tokens of a step"
    assert tints[0] != tints[1]
    assert re.search(r"\d tokens/s", page.locator(".rate").inner_text())
    assert page.locator(".bars figure").count() > 0
    page.locator(".token").nth(2).hover()
    assert "%" in page.locator("#card").inner_text()


def test_tokens_are_tinted_by_the_layer_they_left_at(page: playwright.Page) -> None:
    page.select_option("#model", "early")
    page.select_option("#method", "dynamic")
    page.locator("#limit").fill("30")
    say(page, PROMPT)
    page.locator(".answer[data-done]").wait_for()
    seen = page.evaluate(
        "[...document.querySelectorAll('.token')].map(t => [t.info.layer, getComputedStyle(t).backgroundColor])"
    )
    tints = {layer: {color for other, color in seen if other == layer} for layer, _ in seen}
    assert set(tints) == {1, 2}
    assert all(len(colors) == 1 for colors in tints.values()), "one tint for a layer"
    assert tints[1] != tints[2]
    page.locator(".token").nth([layer for layer, _ in seen].index(1)).hover()
    assert "Left after layer 1 of 2" in page.locator("#card").inner_text()
    assert "left early" in page.locator(".facts").inner_text()


def test_two_methods_side_by_side_say_the_same(page: playwright.Page) -> None:
    page.check("#compare")
    page.select_option("#method", "lookup")
    page.select_option("#other", "plain")
    page.locator("#limit").fill("24")
    say(page, PROMPT)
    page.locator(".answer[data-done]").nth(1).wait_for()
    texts = page.locator(".tokens").all_inner_texts()
    assert len(texts) == 2
    assert texts[0] == texts[1]
    assert page.locator(".answer").first.get_attribute("data-method") == "lookup"


def test_the_keyboard_suffices(page: playwright.Page) -> None:
    page.locator("#limit").fill("12")
    page.locator("#prompt").focus()
    page.keyboard.type("abc")
    page.keyboard.press("Enter")
    page.locator(".answer[data-done]").wait_for()
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    first = page.locator("#card").inner_text()
    page.keyboard.press("ArrowRight")
    assert page.locator("#card").inner_text() != first
    page.keyboard.press("Escape")
    assert page.locator("#card").is_hidden()


def test_escape_stops(page: playwright.Page, server: Reached) -> None:
    page.locator("#limit").fill("900")
    page.select_option("#method", "plain")
    say(page, PROMPT)
    page.locator(".token").first.wait_for()
    page.keyboard.press("Escape")
    page.locator(".answer[data-done]").wait_for()
    server.wait_idle()
    written = page.locator(".token").count()
    assert 0 < written < 900, "what was written stays, and nothing follows it"
    page.wait_for_timeout(300)
    assert page.locator(".token").count() == written


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_width_in_both_schemes(page: playwright.Page, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 360, "height": 700})
    page.check("#compare")
    page.locator("#limit").fill("20")
    say(page, PROMPT)
    page.locator(".answer[data-done]").nth(1).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
    lightness = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
    assert (lightness > 128) == (scheme == "light")


def test_the_page_is_one_file() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href)=\"(?!data:)", text)
    assert "http" not in text.replace("https-", "")


def test_a_picture_for_the_docs(browser: playwright.Browser) -> None:
    """Written only where a server with the model that ships is named: VIVACE_PLAYGROUND=http://..."""
    url = os.environ.get("VIVACE_PLAYGROUND")
    if not url:
        pytest.skip("VIVACE_PLAYGROUND names no server")
    page = browser.new_page(viewport={"width": 1100, "height": 700}, color_scheme="light")
    page.goto(url)
    page.wait_for_function("document.querySelector('#method').value")
    page.check("#compare")
    page.select_option("#method", "multirate")
    say(page, "Describe: name[Green Man], food[Indian], area[riverside], customer rating[high]")
    page.locator(".answer[data-done]").nth(1).wait_for()
    page.locator(".token.accepted").nth(3).hover()
    page.screenshot(path=Path(__file__).parents[2] / "docs" / "images" / "playground.png")
