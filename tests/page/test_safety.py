"""What a model writes causes no request, runs nothing and leaves the page as it is."""

import json

import pytest

AWAY = "http://evil.example"
HOSTILE = [
    f"<img src={AWAY}/a.png>",
    f"![picture]({AWAY}/b.png)",
    f'![p]({AWAY}/c.png "title")\n\n[![x]({AWAY}/d.png)]({AWAY})',
    f"![ref][r]\n\n[r]: {AWAY}/e.png",
    "<script>window.ran = 1</script>",
    f"<script src={AWAY}/f.js></script>",
    "<img src=x onerror='window.ran = 1'>",
    "<svg onload='window.ran = 1'><circle r=9 /></svg>",
    "<svg><script>window.ran = 1</script></svg>",
    f"<iframe src={AWAY}></iframe>",
    "<iframe srcdoc='<script>parent.ran = 1</script>'></iframe>",
    f"<link rel=stylesheet href={AWAY}/g.css>",
    f"<link rel=prefetch href={AWAY}/h>\n\n<link rel=dns-prefetch href={AWAY}>",
    f"<style>body {{ display: none; background: url({AWAY}/i.png) }}</style>",
    f"<p style='position: fixed; inset: 0; background: url({AWAY}/j.png)'>over all</p>",
    "[click](javascript:window.ran=1)",
    "[click](JaVaScRiPt&colon;window.ran=1)",
    "[click](data:text/html,<script>window.ran=1</script>)",
    "<a href='vbscript:x' onclick='window.ran = 1' id=send name=send>click</a>",
    f"<form action={AWAY}><input name=q autofocus onfocus='window.ran = 1'><button id=stop>go</button></form>",
    f"<meta http-equiv=refresh content='0; url={AWAY}'>",
    f"<base href={AWAY}/>",
    f"<object data={AWAY}/k></object><embed src={AWAY}/l>",
    f"<video src={AWAY}/m autoplay></video><audio src={AWAY}/n autoplay></audio>",
    f"<math><mtext><table><mglyph><style><img src={AWAY}/o onerror='window.ran = 1'></style></mglyph></table></math>",
    "<noscript><p title='</noscript><img src=x onerror=window.ran=1>'></noscript>",
    "```html\n</code></pre><img src=x onerror='window.ran = 1'><script>window.ran = 1</script>\n```",
    '```"onmouseover="window.ran=1\nx\n```\n\n~~~<img src=x onerror=window.ran=1>\ny\n~~~',
    f"| a |\n|---|\n| <img src={AWAY}/p onerror='window.ran=1'> ![q]({AWAY}/q) |",
    "<div class='message user' id=messages><details open ontoggle='window.ran = 1'><summary>x</summary></details></div>"
    f"\n\n<{AWAY}/r>\n\n"
    f"<input type=image src={AWAY}/s><body onload='window.ran = 1' background={AWAY}/t>",
]


def answered(page, delta):
    def scripted(route):
        lines = [json.dumps(dict(choices=[dict(index=0, delta=delta, finish_reason="stop")])), "[DONE]"]
        body = "".join(f"data: {line}\n\n" for line in lines)
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", scripted)
    page.fill("#text", "Now?")
    page.press("#text", "Enter")
    page.wait_for_selector("#send:not([hidden])")


def check(page):
    assert page.evaluate("window.ran") is None
    bad = page.evaluate(
        """() => [...document.querySelectorAll('#messages *')].filter((one) =>
            /^(img|script|style|iframe|svg|object|embed|link|meta|base|form|input|video|audio|math)$/.test(one.localName)
            || (one.closest('.text') && one.id)
            || [...one.attributes].some((a) => /^on|^style$|^src/.test(a.name)
                || (a.name === 'href' && !/^(https?|mailto):/.test(a.value)))
        ).map((one) => one.outerHTML)"""
    )
    assert bad == []
    assert page.locator("#send").is_visible() and page.locator("#engine").is_visible()


@pytest.fixture
def page(served, opened):
    return opened(served)


def test_thirty_hostile_answers_cause_no_request_and_run_nothing(page):
    assert len(HOSTILE) == 30
    for text in HOSTILE:
        before = len(page.watch.requests)
        answered(page, dict(content=text))
        check(page)
        asked = [
            url for url in page.watch.requests[before:] if not url.endswith(("/completions", "/engine", "/events"))
        ]
        assert asked == [] and page.watch.errors == [], text
        page.locator(".message.assistant").last.hover()
        page.click("#clear")
    assert page.watch.foreign == []


def test_other_places_are_texts_too(page, served):
    text = HOSTILE[6]
    call = dict(index=0, id=text, type="function", function=dict(name=text, arguments=text))
    answered(page, dict(content=" ".join(HOSTILE), reasoning_content=text, tool_calls=[call]))
    page.evaluate("document.querySelectorAll('#messages details').forEach((one) => { one.open = true; })")
    forms = page.evaluate("document.querySelectorAll('#messages form').length")
    page.evaluate("document.querySelectorAll('#messages form').forEach((one) => one.remove())")
    check(page)
    assert forms == 1, "the form for the results of calls"
    page.reload()
    page.wait_for_selector("main:not([hidden])")
    page.evaluate("document.querySelectorAll('#messages form').forEach((one) => one.remove())")
    check(page)


def test_the_policy_holds_where_the_page_itself_would_not(page):
    """Even HTML that came into the page runs nothing and loads nothing from elsewhere."""
    page.checks = False  # the browser reports each refusal
    refused = page.evaluate("() => { try { document.body.innerHTML = '<p>'; return false } catch { return true } }")
    assert refused, "text became HTML without the library that cleans it"
    page.evaluate(f"const one = document.createElement('img'); one.src = '{AWAY}/z.png'; document.body.append(one)")
    page.evaluate(
        """() => {
            const one = document.createElement('button');
            document.body.append(one);
            try { one.setAttribute('onclick', 'window.ran = 1'); } catch {}
            one.click();
        }"""
    )
    page.wait_for_timeout(200)
    assert page.evaluate("window.ran") is None
    assert any("Content Security Policy" in error for error in page.watch.errors)
