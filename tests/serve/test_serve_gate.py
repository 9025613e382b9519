"""Web pages and the server: which may use it, and what it takes for a request."""

import asyncio
import json

import pytest
from serving import MODEL, make_served_checkpoint, metrics_of, serving

from nanoinfer.serve.gate import allowed_origins

PAGE = "http://localhost:3000"
BODY = dict(model=MODEL, prompt="w5", max_tokens=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


def test_a_body_must_be_called_json(path):
    types = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json", ""]

    async def ask():
        async with serving(path, app_options=dict(allowed_origins=[PAGE])) as served:
            del served.client.headers["content-type"]
            for url in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                pages = [{"Origin": PAGE}, {"Sec-Fetch-Mode": "no-cors"}, {"sec-fetch-site": "cross-site"}]
                for given, headers in [*((None, page) for page in pages), *((one, pages[0]) for one in types)]:
                    headers = headers if given is None else {**headers, "Content-Type": given}
                    response = await served.client.post(url, content=b'{"prompt": "w5"}', headers=headers)
                    assert response.status_code == 415, (url, given, response.text)
                    error = response.json()["error"]
                    assert "send Content-Type: application/json" in error["message"]
                    assert error["code"] == "unsupported_media_type"
                    assert ("is missing" if given is None else repr(given)) in error["message"]
                double = [("Content-Type", "text/plain"), ("Content-Type", "application/json"), ("Origin", PAGE)]
                assert (await served.client.post(url, content=b"{}", headers=double)).status_code == 415
            for given in ("application/json", "application/json; charset=utf-8", "Application/JSON ;x=y", None, *types):
                headers = {} if given is None else {"Content-Type": given}
                response = await served.client.post("/v1/completions", content=json.dumps(BODY), headers=headers)
                assert response.status_code == 200, response.text
            assert (await served.client.post("/ping")).status_code == 200, "it has no body"
            assert (await served.client.get("/v1/models")).status_code == 200
            headers = {"Origin": PAGE, "Content-Type": "text/plain"}
            for url, status in (("/v1/chat/completion", 404), ("/v1/models", 405)):
                assert (await served.client.post(url, content="{}", headers=headers)).status_code == status
            stats = await served.wait_until_idle()
            assert stats["num_prefill_tokens"] == 4 + len(types), "nothing that was refused has run"

    asyncio.run(ask())


def test_pages_of_others_are_refused(path):
    async def ask():
        async with serving(path, app_options=dict(allowed_origins=[PAGE])) as served:
            for url in ("/v1/completions", "/health", "/metrics", "/nothing"):
                for origin in ("http://evil.example", "null", "http://localhost:3001", "https://localhost:3000", ""):
                    response = await served.client.post(url, json=BODY, headers={"Origin": origin})
                    assert response.status_code == 403, (url, origin)
                    error = response.json()["error"]
                    assert repr(origin) in error["message"] and "--allowed-origins" in error["message"]
                    assert error["code"] == "origin_not_allowed"
                    assert "access-control-allow-origin" not in response.headers
            two = [("Origin", PAGE), ("Origin", "http://evil.example")]
            assert (await served.client.get("/health", headers=two)).status_code == 403
            asks = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
            assert (await served.client.options("/v1/completions", headers=asks)).status_code == 403
            assert (await metrics_of(served))["nanoinfer:http_responses_total other 403"] == 22
            assert (await served.client.post("/v1/completions", json=BODY)).status_code == 200, "no browser"

    asyncio.run(ask())


def test_pages_under_a_name_that_others_own_read_nothing(path):
    """As after DNS rebinding: the page and the server have one origin, so the browser sends no Origin with a GET."""
    page = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}
    own = ("127.0.0.1:8000", "localhost:8000", "[::1]:8000", "a.localhost", "box.example:3000")

    async def ask():
        allowed = dict(allowed_origins=["http://box.example:3000"])
        async with serving(path, app_options=allowed) as served:
            for url in ("/metrics", "/v1/models", "/health"):
                for host in ("evil.example", "evil.example:8000", ""):
                    response = await served.client.get(url, headers={**page, "Host": host})
                    assert response.status_code == 403 and response.json()["error"]["code"] == "host_not_allowed"
                    assert f"http://{host}" in response.json()["error"]["message"]
                for host in own:
                    assert (await served.client.get(url, headers={**page, "Host": host})).status_code == 200
                opened = {**page, "Sec-Fetch-Mode": "navigate", "Host": "evil.example"}
                assert (await served.client.get(url, headers=opened)).status_code == 200
                assert (await served.client.get(url, headers={"Host": "evil.example"})).status_code == 200, "no browser"

    asyncio.run(ask())


@pytest.mark.parametrize("given", ["Bearer secret", "bearer secret", "BEARER  secret"])
def test_the_scheme_of_the_key_may_be_written_in_any_case(path, given):
    async def ask():
        async with serving(path, api_key="secret") as served:
            models = [
                await served.client.get("/v1/models", headers={"Authorization": one}) for one in (given, "bearer x")
            ]
            assert [one.status_code for one in models] == [200, 401]

    asyncio.run(ask())


def test_pages_that_may_use_the_server_can_read_its_answers_and_errors(path):
    async def ask():
        async with serving(path, api_key="secret", app_options=dict(allowed_origins=[PAGE])) as served:
            asks = {
                "Origin": PAGE,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
            }
            may = await served.client.options("/v1/completions", headers=asks)
            assert may.status_code == 200, "a browser asks without the key"
            assert may.headers["access-control-allow-origin"] == PAGE
            assert "POST" in may.headers["access-control-allow-methods"]
            assert "x-stainless-os" in may.headers["access-control-allow-headers"]
            right = {"Authorization": "Bearer secret"}
            for headers, status in ((right, 200), ({}, 401), (right | {"Content-Type": "text/plain"}, 415)):
                for stream in (False, True):
                    body = BODY | {"stream": stream}
                    headers = {"Origin": PAGE, **headers}
                    response = await served.client.post("/v1/completions", json=body, headers=headers)
                    assert response.status_code == status
                    assert response.headers["access-control-allow-origin"] == PAGE
                    assert "Origin" in response.headers["vary"]
                    assert response.headers["access-control-expose-headers"] == "Retry-After"

    asyncio.run(ask())


def test_all_pages_may_be_allowed(path):
    async def ask():
        async with serving(path, app_options=dict(allowed_origins=["*"])) as served:
            for origin in ("http://any.example", "null"):
                response = await served.client.post("/v1/completions", json=BODY, headers={"Origin": origin})
                assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "*"

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", 200),
        ("http://[::1]:8000", "[::1]:8000", 200),
        ("https://localhost:8000", "localhost:8000", 200),
        ("http://LocalHost:8000", "localhost:8000", 200),
        ("http://a.localhost", "a.localhost", 200),
        ("http://127.0.0.1:8001", "127.0.0.1:8000", 403),
        ("http://localhost:8000", "127.0.0.1:8000", 403),
        # Whoever owns a name can have it lead to this machine.
        ("http://evil.example:8000", "evil.example:8000", 403),
        ("http://localhost.evil.example", "localhost.evil.example", 403),
        ("http://evillocalhost:8000", "evillocalhost:8000", 403),
        ("http://[bad", "[bad", 403),
    ],
)
def test_a_page_of_the_server_itself_may_use_it(path, origin, host, status):
    async def ask():
        async with serving(path) as served:
            response = await served.client.get("/health", headers={"Origin": origin, "Host": host})
            assert response.status_code == status

    asyncio.run(ask())


def test_allowed_origins_are_a_json_list():
    assert allowed_origins("[]") == []
    origins = ["http://localhost:3000", "https://a.example", "chrome-extension://abc", "null", "*"]
    assert allowed_origins(json.dumps(origins)) == origins
    wrong = ["", "*", "http://a", '"http://a"', "[1]", '{"a": 1}', '["a.example"]', '["http://a/"]', '["HTTP://a"]']
    for text in [*wrong, '["http://a b"]', '["https://u@a"]', '[""]']:
        with pytest.raises(ValueError, match="--allowed-origins .*localhost:3000"):
            allowed_origins(text)


def test_the_command_refuses_what_it_cannot_use(path, capsys):
    from nanoinfer.commands.main import main

    for option, value, message in (
        ("--allowed-origins", "*", "is no JSON"),
        ("--max-queue-bytes", "1MiB", "at least 33554432"),
        ("--max-queue-bytes", "many", "is no size"),
        ("--api-key", "", "--api-key is empty: give a key"),
        ("--body-timeout", "0", "must be more than 0 seconds"),
        ("--max-step-seconds", "-1", "must be more than 0 seconds"),
    ):
        assert main(["serve", str(path), "--port", "0", option, value]) == 2
        error = capsys.readouterr().err
        assert message in error and (option in error or option[2:].replace("-", "_") in error)
