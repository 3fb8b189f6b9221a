"""A real browser: headless Chromium through its driver, one for the tests of a module."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

_SWITCHES = (
    "--headless",
    "--no-sandbox",  # as root there is none
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--window-size=1200,1400",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Chromium with an empty profile; its console is kept, so that a test can ask what it complained about."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.fail("no Chromium with its driver here; on Debian, as root: apt-get install chromium chromium-driver")
    options = ChromeOptions()
    options.binary_location = chromium
    profile: Path = tmp_path_factory.mktemp("profile")
    for switch in (*_SWITCHES, f"--user-data-dir={profile}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options=options, service=Service(executable_path=driver))
    chrome.set_page_load_timeout(60)
    yield chrome
    chrome.quit()
