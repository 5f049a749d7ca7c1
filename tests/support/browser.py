"""A headless Chromium for tests of pages; skipped, with the reason, where it is not installed."""

import shutil
from contextlib import contextmanager

import pytest

CONTRAST = """
const linear = (value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
const weights = [0.2126, 0.7152, 0.0722];
const luminance = (colour) =>
  weights.reduce((sum, weight, i) => sum + weight * linear(colour[i] / 255), 0);
const parsed = (text) => {
  const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
  return [r, g, b, a];
};
const over = ([r, g, b, a], below) => [r, g, b].map((value, i) => value * a + below[i] * (1 - a));
const ground = (element) => {
  if (!element) return [255, 255, 255];
  const colour = parsed(getComputedStyle(element).backgroundColor);
  return colour[3] === 1 ? colour.slice(0, 3) : over(colour, ground(element.parentElement));
};
const grounds = (element) => {
  const bar = element.closest("td")?.querySelector(".bar"), below = ground(element);
  if (!bar) return [below];
  const style = getComputedStyle(bar), [r, g, b] = parsed(style.backgroundColor);
  return [below, over([r, g, b, Number(style.opacity)], below)];
};
const found = new Map();
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const element = texts.currentNode.parentElement;
  const text = texts.currentNode.data.trim();
  if (!text || element.closest("script, style, .plot") || !element.checkVisibility()) continue;
  const colour = parsed(getComputedStyle(element).color);
  for (const below of grounds(element)) {
    const both = [luminance(over(colour, below)), luminance(below)];
    const [dark, light] = both.sort((a, b) => a - b);
    const ratio = (light + 0.05) / (dark + 0.05), name = `${element.tagName} ${element.className}`;
    if (!(found.get(name)?.[0] <= ratio)) found.set(name, [ratio, text.slice(0, 40)]);
  }
}
const lines = [...found].map(([name, [ratio, text]]) => [ratio, name, text]);
return lines.sort((a, b) => a[0] - b[0]);
"""
"""Script that returns the least contrast with what is below it, for each kind of visible text."""


@contextmanager
def opened(path, width=1280, height=900):
    """Return a driver with a page open."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        pytest.skip(
            f"{' and '.join(missing)} not installed; Debian: apt-get install chromium chromium-driver"
        )
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{argument}")
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        resize(driver, width, height)
        driver.get(path.as_uri())
        yield driver
    finally:
        driver.quit()


def resize(driver, width, height, *, is_phone=False):
    """Give the page a viewport of this size."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def prefer(driver, media="", **features):
    """Emulate a medium, and preferences such as ``prefers_color_scheme="dark"``."""
    chosen = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": chosen})


def complaints(driver):
    """Return what the page wrote to the console since the last call."""
    return [entry["message"] for entry in driver.get_log("browser")]
