"""A chat in the browser: it streams, is stopped, edited, asked again and kept; with a key, and when cut off."""

import json

from page_site import site, until


def ask(page, text):
    page.fill("#text", text)
    page.press("#text", "Enter")


def answers(page):
    return page.locator(".message.assistant")


def has_ended(page):
    page.wait_for_selector("#send:not([hidden])")


def limited(page, tokens):
    page.locator("#settings summary").click()
    page.fill("#set-max_tokens", str(tokens))
    page.fill("#set-temperature", "0")
    page.locator("#settings summary").click()


def test_a_chat_streams_and_survives_a_reload(served, opened, picture):
    page = opened(served)
    limited(page, 12)
    ask(page, "w20 w21")
    has_ended(page)
    text = answers(page).locator(".text").inner_text()
    assert len(text.split()) > 3 and "tokens in" in answers(page).locator("p.quiet").inner_text()
    ask(page, "w30")
    until(page, "document.querySelectorAll('.message.assistant').length === 2")
    has_ended(page)
    picture(page, "chat")
    page.reload()
    page.wait_for_selector("main:not([hidden])")
    assert answers(page).count() == 2 and answers(page).locator(".text").first.inner_text() == text
    assert page.input_value("#set-max_tokens") == "12"
    page.click("#clear")
    page.reload()
    page.wait_for_selector("main:not([hidden])")
    assert answers(page).count() == 0


def test_an_answer_is_stopped_a_message_edited_and_an_answer_asked_for_again(served, opened):
    page = opened(served)
    limited(page, 1500)
    ask(page, "w20 w21")
    until(page, "document.querySelector('.message.assistant .text')?.textContent.length > 10")
    assert page.locator("#send").is_hidden()
    page.click("#stop")
    has_ended(page)
    assert answers(page).locator("p.quiet").inner_text() == "stopped"
    until(page, "fetch('engine').then(r => r.json()).then(t => t.replicas[0].figures.num_running === 0)")
    limited(page, 5)
    page.locator(".message.user button", has_text="Edit").click()
    page.locator(".message.user textarea").fill("w40 w41")
    page.locator("button", has_text="Send again").click()
    page.wait_for_selector("#stop:not([hidden])", state="attached")
    has_ended(page)
    assert page.locator(".message.user .text").inner_text() == "w40 w41" and answers(page).count() == 1
    first = answers(page).locator(".text").inner_text()
    page.locator("button", has_text="Regenerate").click()
    has_ended(page)
    assert answers(page).count() == 1 and answers(page).locator(".text").inner_text() == first, "greedy"


def test_thinking_is_folded_and_calls_of_tools_are_shown_and_answered(served, opened, picture):
    page = opened(served)
    asked = []
    call = dict(index=0, id="c1", type="function", function=dict(name="weather", arguments='{"city": "Oslo"}'))
    scripts = [
        [dict(reasoning_content="Let me *see*."), dict(tool_calls=[call])],
        [dict(content="It **rains**.\n\n```python\nprint('rain')\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |")],
    ]

    def scripted(route):
        asked.append(json.loads(route.request.post_data))
        lines = [json.dumps(dict(choices=[dict(index=0, delta=one)])) for one in scripts.pop(0)]
        usage = json.dumps(dict(choices=[], usage=dict(prompt_tokens=5, completion_tokens=7)))
        body = "".join(f"data: {line}\n\n" for line in [*lines, usage, "[DONE]"])
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", scripted)
    page.locator("#settings summary").click()
    tool = dict(type="function", function=dict(name="weather", parameters=dict(type="object")))
    page.fill("#tools", "[")
    page.locator("#settings summary").click()
    ask(page, "How is it in Oslo?")
    assert "are no JSON" in page.locator("#tools-wrong").inner_text() and not asked
    page.fill("#tools", json.dumps([tool]))
    page.locator(".message.user button", has_text="Edit").click()
    page.locator("button", has_text="Send again").click()
    has_ended(page)
    thinking = answers(page).locator("details").first
    assert not thinking.get_attribute("open") and "Calls weather" in answers(page).inner_text()
    thinking.locator("summary").click()
    assert "Let me *see*." in thinking.inner_text()
    page.locator("label", has_text="Result of weather").locator("textarea").fill("rain")
    page.locator("button", has_text="Give the results").click()
    page.wait_for_selector(".message.assistant strong")
    assert asked[0]["tools"] == [tool] and [one["role"] for one in asked[1]["messages"]] == [
        "user",
        "assistant",
        "tool",
    ]
    assert asked[1]["messages"][1]["tool_calls"][0]["function"] == call["function"]
    assert asked[1]["messages"][1]["reasoning_content"] == "Let me *see*."
    assert answers(page).locator(".hljs-string").inner_text() == "'rain'" and answers(page).locator("td").count() == 2
    picture(page, "tools")


def test_the_key_is_asked_for_and_stands_in_no_address_or_store(path, opened):
    with site(path, api_key="the-secret") as guarded:
        page = opened(guarded, checks=False)  # the browser itself reports each 401
        page.wait_for_selector("#key[open]")
        page.fill("#key-text", "wrong")
        page.press("#key-text", "Enter")
        page.wait_for_selector("#key-why:has-text('not the one')")
        page.fill("#key-text", "the-secret")
        page.press("#key-text", "Enter")
        page.wait_for_selector("#picture .row")
        until(page, "document.querySelector('#model').textContent === 'tiny'")
        limited(page, 4)
        ask(page, "w20")
        has_ended(page)
        page.reload()
        page.wait_for_selector("#picture .row")
        kept = page.evaluate("JSON.stringify([localStorage, location.href, document.cookie, history.state])")
        assert "the-secret" not in kept and not any("secret" in url for url in page.watch.requests)
        assert page.watch.foreign == [] and all("401" in error for error in page.watch.errors)


def test_a_lost_connection_is_said_and_the_page_goes_on_when_it_is_back(path, opened):
    with site(path, max_model_len=2048) as made:
        page = opened(made, checks=False)  # the browser itself reports what it cannot reach
        limited(page, 1500)
        ask(page, "w20 w21")
        until(page, "document.querySelector('.message.assistant .text')?.textContent.length > 10")
        made.cut_off()
        has_ended(page)
        page.wait_for_selector("#status:has-text('trying again')")
        assert "connection was lost" in page.locator("#status").inner_text()
        assert "the connection is lost" in page.locator("#age").inner_text()
        made.begin()
        until(page, "!document.querySelector('#status').textContent.includes('trying again')")
        limited(page, 5)
        page.locator("button", has_text="Regenerate").click()
        until(page, "document.querySelector('.message.assistant p.quiet')?.textContent.includes('5 out')")


def test_all_is_reached_by_keys(served, opened):
    page = opened(served)
    seen = set()
    page.focus("body")
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"text", "send", "clear", "SUMMARY", "messages"} <= seen
