"""The report in a real browser: narrow and wide, light and dark, without an error and without a request to anywhere."""
from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from nexus import artifact as stored_form
from nexus import report
from nexus.config import ROOT

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(BROWSER is None or DRIVER is None,
                                reason="chromium or chromedriver is not installed (Debian: chromium, chromium-driver)")
# Wide tables, long ones, a figure, and two runs of which each lacks what the other has.
RUNS = {"smollm2-135m": ("dkl_sweep", "gating_nogo", "l0_radix", "block_allocator", "calibrated_repair"),
        "qwen2.5-coder-1.5b": ("calibration", "sidecar_accuracy")}
WIDTHS = (360, 1440)
SCHEMES = ("light", "dark")
# WCAG 2.2, level AA, for text of usual size.
LEAST_CONTRAST = 4.5
CONTRAST = """
const [selector] = arguments, found = [];
function numbers(colour) { return colour.match(/[\\d.]+/g).map(Number); }
function luminance(colour) {
  const [r, g, b] = numbers(colour).map(value => value / 255)
    .map(value => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function behind(element) {
  for (; element; element = element.parentElement) {
    const colour = getComputedStyle(element).backgroundColor, parts = numbers(colour);
    if (parts.length < 4 || parts[3] > 0) return colour;
  }
  return "rgb(255, 255, 255)";
}
for (const element of document.querySelectorAll(selector)) {
  const pair = [luminance(getComputedStyle(element).color), luminance(behind(element))].sort((a, b) => b - a);
  found.push([element.className + " " + element.tagName, (pair[0] + 0.05) / (pair[1] + 0.05)]);
}
return found;
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("results with space")
    for run, experiments in RUNS.items():
        for experiment in experiments:
            target = stored_form.path_of(experiment, folder / run)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(stored_form.path_of(experiment, ROOT / "results" / run), target)
    return report.write([report.load(folder / run) for run in RUNS], folder / report.NAME, "toys")


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                     "--disable-background-networking", "--no-first-run"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(120)
    driver.set_script_timeout(120)
    yield driver
    driver.quit()


@pytest.fixture(params=[(width, scheme) for width in WIDTHS for scheme in SCHEMES], ids=lambda of: f"{of[0]}-{of[1]}",
                scope="module")
def shown(request, browser, page):
    """The browser with the page in a window of this width, in this colour scheme."""
    width, scheme = request.param
    # The window's own size has a lower bound of about 500 pixels.
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia",
                            {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    browser.get(page.as_uri())
    assert browser.execute_script("return innerWidth") == width
    return browser, width, scheme


def choose(browser, index: int) -> None:
    browser.execute_script("document.querySelector(arguments[0]).click()", f"label[for=tab-{index}]")


def test_nothing_is_wider_than_the_window_with_any_run_and_everything_unfolded(shown):
    browser, width, _ = shown
    for index in range(len(RUNS)):
        choose(browser, index)
        for unfolded in (False, True):
            browser.execute_script("document.querySelectorAll('details').forEach(one => one.open = arguments[0])",
                                   unfolded)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
            boxes = browser.execute_script("""
                return [...document.querySelectorAll('.scroll, pre, p, li, summary, label')]
                    .map(one => one.getBoundingClientRect()).map(box => [box.left, box.right])""")
            assert boxes and all(0 <= left and right <= width + 0.5 for left, right in boxes)


def test_wide_tables_and_figures_scroll_inside_their_box_and_can_be_reached_by_keyboard(shown):
    browser, width, _ = shown
    choose(browser, 0)
    boxes = browser.execute_script("""return [...document.querySelectorAll('.scroll')].filter(box => box.clientWidth)
        .map(box => [box.scrollWidth - box.clientWidth, getComputedStyle(box).overflowX, box.tabIndex,
                     box.getAttribute('aria-label')])""")
    assert len(boxes) > 5 and all(overflow == "auto" and tab == 0 and label for _, overflow, tab, label in boxes)
    if width == 360:
        assert sum(hidden > 0 for hidden, *_ in boxes) > 5


def test_figures_keep_a_size_at_which_they_can_be_read(shown):
    browser, _, _ = shown
    choose(browser, 0)
    sizes = browser.execute_script("""
        return [...document.querySelectorAll('.drawing svg')].filter(one => one.clientWidth)
            .map(one => one.getBoundingClientRect()).map(box => [box.width, box.height])""")
    assert len(sizes) == 3 and all(wide >= 600 and high >= 200 for wide, high in sizes)


def test_text_stands_out_from_what_is_behind_it(shown):
    browser, _, scheme = shown
    choose(browser, 0)
    found = browser.execute_script(CONTRAST, "p, li, th, td, a, code, summary, label, figcaption, h1, h2, h3, h4, h5, "
                                             ".verdict, .measured, .small, .counts span")
    assert len(found) > 500
    assert [(name, round(contrast, 2)) for name, contrast in found if contrast < LEAST_CONTRAST] == []
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 20, 20)"}[scheme]


def test_one_run_is_shown_at_a_time_by_mouse_and_by_keyboard(shown):
    browser, _, _ = shown

    def visible():
        return [panel.is_displayed() for panel in browser.find_elements(By.CSS_SELECTOR, ".panel")]

    for index in (1, 0):
        choose(browser, index)
        assert visible() == [index == 0, index == 1]
    chosen = browser.find_element(By.ID, "tab-0")
    browser.execute_script("arguments[0].focus()", chosen)
    chosen.send_keys(Keys.ARROW_RIGHT)
    assert visible() == [False, True]
    browser.find_element(By.ID, "tab-1").send_keys(Keys.ARROW_LEFT)
    assert visible() == [True, False]


def test_a_folded_claim_opens_and_shows_its_cells(shown):
    browser, _, _ = shown
    choose(browser, 0)
    details = browser.find_element(By.CSS_SELECTOR, "#run-0 details")
    browser.execute_script("arguments[0].open = false; arguments[0].querySelector('summary').click()", details)
    assert details.find_element(By.CSS_SELECTOR, "td").is_displayed()


def test_every_drawing_is_named_to_a_reader_that_does_not_see_it(shown):
    browser, _, _ = shown
    choose(browser, 0)
    names = [drawing.accessible_name for drawing in browser.find_elements(By.CSS_SELECTOR, ".drawing svg")
             if drawing.is_displayed()]
    assert len(names) == 3 and all(name.startswith("Figure ") for name in names)


# The last test: the logs are those of everything above.
def test_there_was_no_error_and_no_request_but_for_the_page_itself(browser, page):
    browser.get(page.as_uri())
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = {event["params"]["request"]["url"] for event in events
                 if event["method"] == "Network.requestWillBeSent"}
    assert page.as_uri() in requested
    assert {url for url in requested if not url.startswith("data:")} == {page.as_uri()}
