"""The page's files: how they are sent, that they name nothing elsewhere, and that the API needs none of them."""

import asyncio
import re
import sys

import pytest
from serving import make_served_checkpoint, serving

from nanoinfer.serve.page_files import FOLDER

OWN = [path for path in sorted(FOLDER.iterdir()) if path.is_file()]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


def test_the_page_and_what_it_names_are_sent_with_headers_that_let_nothing_else_run(path):
    async def work():
        async with serving(path, api_key="secret") as served:
            page = await served.client.get("/")
            assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
            policy = page.headers["content-security-policy"]
            for part in (
                "default-src 'self'",
                "img-src 'self' data:",
                "frame-ancestors 'none'",
                "trusted-types dompurify",
            ):
                assert part in policy
            assert "unsafe" not in policy and page.headers["referrer-policy"] == "no-referrer"
            named = re.findall(r'(?:src|href)="(?!data:)([^"]+)"', page.text)
            assert len(named) == 2
            for name in [*named, "page/render.js", "page/vendor/marked.js", "page/vendor/purify.js"]:
                file = await served.client.get(f"/{name}")
                assert file.status_code == 200 and file.headers["content-security-policy"] == policy
                assert file.headers["content-type"].split(";")[0] in ("text/javascript", "text/css")
                tag = {"If-None-Match": file.headers["etag"]}
                assert (await served.client.get(f"/{name}", headers=tag)).status_code == 304
            for name in ("page/none.js", "page/../app.py", "page/%2e%2e/app.py", "page/vendor/marked.LICENSE", "page/"):
                assert (await served.client.get(f"/{name}")).status_code == 404, name
            assert (await served.client.post("/", json={})).status_code == 405

    asyncio.run(work())


def test_the_api_needs_no_page(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nanoinfer.serve.page_files", None)

    async def work():
        async with serving(path, app_options=dict(page=False)) as served:
            for name in ("/", "/page/app.js"):
                assert (await served.client.get(name)).status_code == 404
            assert (await served.complete([20, 21], max_tokens=2))["usage"]["completion_tokens"] == 2

    asyncio.run(work())


def test_nothing_elsewhere_is_named_and_no_text_becomes_html():
    for path in OWN:
        text = path.read_text()
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)[\w.]+", text), path.name
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path.name
        )
        assert len(text.splitlines()) <= 400 and not re.search(r"\son\w+=|\sstyle=", text), path.name


def test_every_library_has_its_licence():
    libraries = {path.stem for path in (FOLDER / "vendor").glob("*.js")}
    assert libraries == {path.stem for path in (FOLDER / "vendor").glob("*.LICENSE")} and len(libraries) == 3
    notes = (FOLDER / "vendor" / "README.md").read_text()
    assert all(f"`{name}.js`" in notes for name in libraries)
