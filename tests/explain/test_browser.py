"""The page in a browser: silent, reachable by keyboard, readable on a laptop, a phone and paper."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_rl import PolicyLossFn
from parallel_rl.explain import StepInfo
from parallel_rl.explain.page import page
from tests.explain import browser
from tests.explain.steps import dumped, policy_batch
from tests.explain.test_page import PPO

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.find() is None, reason="no Chromium here: tools/install_chromium.sh brings it"),
]
WORDS = [" the", " sum", " of", " 1", " and", " 2", " is", " 3", ".", "\n", "<b>"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps side by side: every section, and tables that are wide."""
    folder, info = tmp_path_factory.mktemp("page"), StepInfo("a step", WORDS.__getitem__)
    steps = [
        dumped(folder / str(seed), PolicyLossFn(PPO), *policy_batch(rows=12, width=60, seed=seed), info)
        for seed in (0, 1)
    ]
    target = folder / "page.html"
    target.write_text(page(steps, most_samples=3), encoding="utf-8")
    return target


@pytest.fixture(scope="module", params=[(1280, 800), (390, 844)], ids=["laptop", "phone"])
def window(
    file: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[browser.Tab]:
    with browser.opened(file, tmp_path_factory.mktemp("profile"), *request.param) as tab:
        yield tab


@pytest.fixture
def tab(window: browser.Tab, file: Path) -> browser.Tab:
    """The page, loaded again."""
    window.events.clear()
    window.open(file)
    return window


def test_it_is_silent_and_stays_in_the_window(tab: browser.Tab, file: Path) -> None:
    """Nothing on the console, nothing loaded, nothing beyond the right edge."""
    tab.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    said = [
        event
        for event in tab.events
        if event.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
    ]
    assert said == []
    asked = [
        event["params"]["request"]["url"] for event in tab.events if event.get("method") == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith("data:")] == [file.as_uri()]
    assert tab.run("document.documentElement.scrollWidth") <= tab.run("innerWidth")
    assert tab.run("document.querySelectorAll('main svg').length") == 6
    assert tab.run("[...document.querySelectorAll('main svg')].every(x => x.getBoundingClientRect().height > 60)")


def test_everything_is_reached_by_the_keyboard(tab: browser.Tab) -> None:
    """Tab stops at each link, table, fold and text, in the order of the page, and one sees where; arrows go through a text."""
    stops = """[...document.querySelectorAll('a[href], summary, .wide, div.text > [tabindex="0"]')]"""
    wanted = tab.run(f"{stops}.filter(x => x.checkVisibility()).length")
    seen: list[str] = []
    place = "document.activeElement"
    for _ in range(wanted):
        tab.press("Tab")
        style = tab.run(f"getComputedStyle({place}).outlineStyle + ' ' + getComputedStyle({place}).outlineWidth")
        name = tab.run(
            f"{place}.tagName + ' ' + ({place}.getAttribute('aria-label') || {place}.textContent).slice(0, 40)"
        )
        assert style == "solid 3px" or name.startswith("A Skip"), (name, style)
        seen.append(name)
        if name.startswith("SUMMARY"):  # opens and closes, and what is in it is reached
            tab.press("Enter")
            assert tab.run(f"{place}.parentElement.open")
            tab.press("Enter")
    assert seen[0].startswith("A Skip") and len(seen) == wanted
    assert sum(name.startswith("SPAN") for name in seen) == 6
    tab.run("document.querySelector('div.text .t').focus()")
    tab.press("End")
    last = tab.run("[...document.querySelector('div.text').children].indexOf(document.activeElement)")
    assert last == tab.run("document.querySelector('div.text').children.length") - 1
    panel = tab.run("document.querySelector('.panel').textContent")
    assert f"at {last}" in panel and "∂L/∂log π" in panel and "why" in panel
    tab.press("ArrowLeft")
    assert f"at {last - 1}" in tab.run("document.querySelector('.panel').textContent")
    assert tab.run("document.querySelectorAll('div.text')[0].querySelectorAll('[tabindex=\"0\"]').length") == 1


def test_text_stands_out_from_its_colour(tab: browser.Tab) -> None:
    """WCAG AA: 4.5 : 1 for every kind of token and for the page's greys."""
    contrast = """(() => {
      const part = (x) => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4;
      const weights = [.2126, .7152, .0722];
      const light = (c) => c.match(/[\\d.]+/g).slice(0, 3).reduce((sum, x, i) => sum + part(x / 255) * weights[i], 0);
      const behind = (e) => {
        for (; e; e = e.parentElement) {
          const colour = getComputedStyle(e).backgroundColor;
          if (!colour.endsWith(', 0)')) return colour;
        }
        return 'rgb(255, 255, 255)';
      };
      const ratio = (e) => {
        const two = [light(getComputedStyle(e).color), light(behind(e))];
        return (Math.max(...two) + .05) / (Math.min(...two) + .05);
      };
      return Math.min(...[...document.querySelectorAll('.t, p, th, td, a, footer, .side1, .side2')].map(ratio));
    })()"""
    assert tab.run(contrast) >= 4.5


def test_paper_shows_what_is_folded_and_not_what_is_pressed(tab: browser.Tab) -> None:
    shown = "[...document.querySelectorAll('details table')].filter(x => x.checkVisibility()).length"
    assert tab.run(shown) == 0
    tab.send("Emulation.setEmulatedMedia", media="print")
    assert tab.run(shown) == tab.run("document.querySelectorAll('details:not(.screen) table').length") > 5
    assert tab.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert tab.run("getComputedStyle(document.querySelector('.panel')).display") == "none"
    tab.send("Emulation.setEmulatedMedia", media="")
    pdf = base64.b64decode(tab.send("Page.printToPDF", printBackground=False)["data"])
    assert pdf.startswith(b"%PDF") and 3 <= pdf.count(b"/Type /Page\n") <= 40
