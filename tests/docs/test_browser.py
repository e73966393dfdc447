"""The built site in a browser: without errors, within the window, on one host, and its search finds what people type."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.explain import browser

SITE = Path(__file__).parents[2] / "build" / "site"
HOME = SITE / "docs" / "index.html"
# the page at the root only leads to HOME
PAGES = [page for room in ("docs", "benchmarks", "slurm") for page in sorted((SITE / room).rglob("*.html"))]
WINDOWS = ((1280, 800), (390, 844))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.find() is None, reason="no Chromium here: tools/install_chromium.sh installs it"),
    pytest.mark.skipif(not HOME.is_file(), reason="the site is not built: make docs-site"),
]


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[browser.Tab]:
    with browser.opened(HOME, tmp_path / "profile") as tab:
        yield tab


def resize(tab: browser.Tab, width: int, height: int) -> None:
    """Emulate a screen; a real window is never as narrow as a phone."""
    tab.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)


def test_every_page_fits_the_window_and_asks_no_other_host(tab: browser.Tab) -> None:
    """On a laptop and a phone, in light and dark, without an error on the console."""
    too_wide = []
    for page in PAGES:
        tab.open(page)
        tab.run("window.MathJax?.startup?.promise.then(() => 0)")
        for width, height in WINDOWS:
            resize(tab, width, height)
            for theme in ("light", "dark"):
                tab.run(f"document.documentElement.dataset.theme = '{theme}'")
                if tab.run("document.documentElement.scrollWidth") > width:
                    too_wide.append((str(page.relative_to(SITE)), width, theme))
    assert not too_wide
    errors = [
        event["params"]
        for event in tab.events
        if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")
        or (event.get("method") == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "warning"))
    ]
    assert errors == []
    urls = [
        event["params"]["request"]["url"] for event in tab.events if event.get("method") == "Network.requestWillBeSent"
    ]
    assert len(urls) > len(PAGES) > 25
    assert [url for url in urls if not url.startswith((SITE.as_uri(), "data:"))] == []


def test_search_finds_what_people_type_and_the_keyboard_reaches_it(tab: browser.Tab) -> None:
    for _ in range(12):
        tab.press("Tab")
        if tab.run("document.activeElement.matches('[class*=search]')"):
            break
    else:
        pytest.fail("12 presses of Tab do not reach the search")
    for word in ("gspo", "zigzag", "clip_low"):
        tab.open(SITE / "search.html", f"?q={word}")
        limit = time.monotonic() + 20
        while not tab.run("document.querySelectorAll('#search-results li a').length"):
            assert time.monotonic() < limit, f"search does not find {word}"
            time.sleep(0.1)
