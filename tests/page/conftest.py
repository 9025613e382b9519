"""The page in a real browser, which takes minutes: `make page-test` runs this, `make test` does not."""

import os
import shutil
from pathlib import Path

import pytest
from page_site import Watch, site
from serving import make_served_checkpoint

collect_ignore_glob = [] if os.environ.get("PAGE") else ["test_*.py"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PICTURES = os.environ.get("PICTURES")


@pytest.fixture(scope="session")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"there is no browser: install one of {', '.join(BROWSERS)}")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make page-test does it")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, request):
    """Opens a site in a tab, and checks at the end that nothing went wrong in it."""
    contexts = []

    def open_(site, *, width=1280, height=900, scheme="light", checks=True):
        context = browser.new_context(viewport=dict(width=width, height=height), color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.watch = Watch(page, site.url)
        page.checks = checks
        page.goto(site.url)
        page.wait_for_selector("main:not([hidden])")
        return page

    yield open_
    for context in contexts:
        for page in context.pages:
            if getattr(page, "checks", True) and hasattr(page, "watch"):
                page.watch.check()
        context.close()


@pytest.fixture
def picture():
    """Keeps a picture of a tab for people to look at, where PICTURES names a folder."""

    def keep(page, name):
        if PICTURES:
            Path(PICTURES).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=f"{PICTURES}/{name}.png")

    return keep


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(path):
    with site(path, max_model_len=2048) as made:
        yield made
