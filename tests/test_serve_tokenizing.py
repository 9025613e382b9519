"""Texts and conversations to token ids and back over HTTP, and what clients may not ask of it."""

import asyncio

import pytest
from serving import make_served_checkpoint, serving

from nanoinfer.serve.protocol import ChatRequest

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "w31"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


def test_names_that_are_no_variables_of_the_template_are_refused(path):
    async def ask():
        async with serving(path) as served:
            for url in (CHAT, "/tokenize"):
                for name in sorted(ChatRequest._reserved):
                    response = await served.post(url, messages=[USER], chat_template_kwargs={name: 1})
                    assert response.status_code == 400, f"{url} {name}: {response.text}"
                    error = response.json()["error"]
                    assert error["param"] == "chat_template_kwargs" and f"may not set '{name}'" in error["message"]
            # Names of this package's and of Jinja's own are the template's to use.
            names = "variables template_arguments work text num_chars context args kwargs environment loop None".split()
            for name in [*names, "", "a b"]:
                response = await served.post("/tokenize", messages=[USER], chat_template_kwargs={name: 1})
                assert response.status_code == 200 and response.json()["tokens"] == [7, 31, 9], name
            broken = dict(messages=[{"role": "nobody", "content": ""}], chat_template_kwargs={"raise_exception": 1})
            response = await served.post("/tokenize", **broken)
            assert response.status_code == 400 and response.json()["error"]["param"] == "messages"

    asyncio.run(ask())
