"""The engine's picture in the browser: while blocks and experts stream, at a switch, on a phone, for who cannot see."""

import json
import re
import threading
from pathlib import Path

import httpx
import pytest
from page_site import site, until
from tiny_models import make_checkpoint

SIZES = {"wide": (1280, 900), "phone": (320, 640)}


def complete(served, tokens, prompt=60, count=1):
    """Ask the server for completions, beside the page."""
    body = dict(prompt=[[5 + i] * prompt for i in range(count)], max_tokens=tokens, ignore_eos=True, temperature=0)
    thread = threading.Thread(target=lambda: httpx.post(f"{served.url}v1/completions", json=body, timeout=120))
    thread.start()
    return thread


def said(page, name):
    """What stands beside a row of the picture; "" where there is none."""
    return page.evaluate(
        """(name) => [...document.querySelectorAll('#picture .row')].filter((row) => !row.hidden
            && row.querySelector('.name').textContent === name)
            .map((row) => row.querySelector('.said').textContent)[0] || ''""",
        name,
    )


def wait_for(page, name, pattern):
    found = []

    def look():
        found[:] = [said(page, name)]
        return re.search(pattern, found[0])

    for _ in range(1000):
        if look():
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"{name}: {found[0]!r} has no {pattern}")


def test_blocks_that_stream_and_a_switch_are_seen(path, opened, picture):
    with site(path, max_model_len=1024, enable_cpu_offload="auto", num_gpu_blocks_override=40) as made:
        page = opened(made)
        wait_for(page, "KV blocks", "^0 blocks held")
        assert "resident mode" in page.locator("#age").inner_text()
        running = complete(made, 400, prompt=200, count=4)
        wait_for(page, "Batch", r"^[1-4] of at most \d+ sequences run")
        wait_for(page, "KV blocks that a step reads", r"resident, [1-9]\d* through the ring")
        assert "offload mode" in page.locator("#age").inner_text(), "the switch was not seen"
        wait_for(page, "↑ Copies", r"^0\.0*[1-9]|^[1-9]")
        wait_for(page, "Tokens", r"^[1-9]")
        until(page, "document.querySelectorAll('#plots polyline').length >= 3")
        picture(page, "streaming")
        running.join()
        wait_for(page, "Batch", r"^0 of at most")
        wait_for(page, "Tokens", r"^0 a second out")
        page.locator("summary", has_text="All figures").click()
        until(page, "document.querySelectorAll('#figures tr').length > 50")
        counted = page.locator("#figures tr", has_text="streamed_bytes").first.locator("td").first
        assert float(counted.inner_text().split()[0].replace(",", "")) > 0


def test_drafts_are_seen_where_there_are_some(path, opened):
    with site(path, max_model_len=1024, speculative_config={"method": "suffix"}) as made:
        page = opened(made)
        wait_for(page, "Tokens", "^0 a second")
        assert said(page, "Drafts") == ""
        running = complete(made, 200, prompt=40)
        wait_for(page, "Drafts", r"^[1-9]\d* % of [1-9]\d* guessed tokens were right")
        running.join()


def test_experts_in_slots_and_brought_are_seen(tmp_path, opened, picture):
    path = make_checkpoint("qwen3_moe", tmp_path)
    with site(path, skip_tokenizer_init=True, expert_slots=3, max_model_len=1024) as made:
        page = opened(made)
        wait_for(page, "Experts in slots", r"^3 of \d+ in each of \d+ layers; none are asked for")
        running = complete(made, 300, prompt=20)
        wait_for(page, "Experts in slots", r"[1-9]\d* % of those chosen were found there")
        wait_for(page, "Experts brought", r"^[1-9]")
        picture(page, "experts")
        running.join()


def test_a_link_and_each_replica_of_a_fleet_are_seen(served, opened, picture):
    """What a server with a GPU says, and a fleet, which has no events: the page asks again and again."""
    told = httpx.get(f"{served.url}engine").json()
    (one,), asked = told["replicas"], []

    def answer(route):
        asked.append(route.request.url)
        counted = dict(streamed_bytes=5 * 10**9 * len(asked), num_generated_tokens=40 * len(asked))
        counted |= dict(num_decode_steps=10 * len(asked), num_decode_tokens=30 * len(asked), step_floor_seconds=0.02)
        blocks = dict(kv_blocks_resident=10, kv_blocks_streamed=30, host_blocks_total=100, host_blocks_used=40)
        figures = one["figures"] | counted | blocks | {"link_busy_fraction": 0.9}
        facts = one["facts"] | {"is_host": False, "link_bytes_per_second": 50e9}
        replica = one | {"facts": facts, "figures": figures, "age": 0.0}
        body = told | {"replicas": [replica | {"name": "a"}, replica | {"name": "b", "figures": one["figures"]}]}
        route.fulfill(status=200, content_type="application/json", body=json.dumps(body))

    page = opened(served)
    page.route("**/engine", answer)
    page.reload()
    wait_for(page, "↑ Link to the GPU", r"^[4-6]\.?\d* GB/s of 50, busy 90 %")
    wait_for(page, "Tokens", r"a second out, where link and memory at full speed allow 150(\.0)? in decode steps")
    assert said(page, "KV blocks that a step reads").startswith("10 resident, 30 through the ring of")
    assert page.locator("#picture h3").all_inner_texts() == ["GPU", "Between them", "Host memory", "Speed"]
    picture(page, "link")
    page.select_option("#replica", "b")
    wait_for(page, "KV blocks that a step reads", "^0 resident")


@pytest.mark.parametrize("view", ["chat", "engine"])
def test_nothing_is_wider_than_a_narrow_phone(served, opened, picture, view):
    page = opened(served, width=320, height=640)
    page.click(f"#show-{view}")
    if view == "chat":
        wide = "```\n" + "x" * 300 + "\n```\n\n" + "|a" * 30 + "|\n" + "|-" * 30 + "|\n\n" + "w" * 200
        said = dict(content=wide, reasoning=wide, calls=[], note="")
        kept = json.dumps(dict(messages=[dict(role="user", content=wide), dict(role="assistant", **said)]))
        page.add_init_script(f"localStorage.setItem('nanoinfer-chat', {json.dumps(kept)})")
        page.reload()
        page.wait_for_selector(".message.assistant table")
        page.locator(".message.assistant summary").click()
    else:
        page.locator("summary", has_text="All figures").click()
        page.wait_for_selector("#figures tr")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    assert (
        page.evaluate(
            """() => [...document.querySelectorAll('body *')].filter((one) => one.getBoundingClientRect().right > 321
            && !one.closest('pre, .text table, .wide, .unseen')).map((one) => one.outerHTML.slice(0, 80))"""
        )
        == []
    )
    picture(page, f"phone-{view}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_axe_finds_nothing_serious(served, opened, picture, scheme, size):
    axe = pytest.importorskip("axe_playwright_python", reason="make page-test installs axe-core")
    source = (Path(axe.__file__).parent / "axe.min.js").read_text()
    page = opened(served, width=SIZES[size][0], height=SIZES[size][1], scheme=scheme)
    page.locator("#settings summary").click()
    page.fill("#set-max_tokens", "8")
    page.fill("#text", "w20")
    page.press("#text", "Enter")
    page.wait_for_selector("#send:not([hidden])")
    page.evaluate(source)
    for view in ("chat", "engine") if size == "phone" else ("chat",):
        if size == "phone":
            page.click(f"#show-{view}")
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        page.wait_for_timeout(300)
        found = page.evaluate("axe.run()")["violations"]
        serious = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
        assert serious == []
        picture(page, f"{scheme}-{size}-{view}")
