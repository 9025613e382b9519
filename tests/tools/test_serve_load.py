"""A short load on a tiny model finds nothing wrong, and the tool can fail."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.sampled()
def test_a_short_load_finds_nothing(tmp_path, capfd):
    spec = importlib.util.spec_from_file_location("serve_load", ROOT / "tools" / "serve_load.py")
    serve_load = importlib.util.module_from_spec(spec)
    sys.modules["serve_load"] = serve_load
    spec.loader.exec_module(serve_load)
    out = tmp_path / "load.json"
    code = serve_load.main(["--tiny", "--clients", "20", "--seconds", "1.5", "--out", str(out)])
    figures = json.loads(out.read_text())
    assert code == 0 and figures["passed"], figures
    assert figures["outcomes"]["streamed"] and figures["outcomes"]["nonsense: 400"] and not figures["wrong_answers"]
    short = figures["time_to_first_token_of_short_prompts"]
    assert short["long_clients"] == 6 and min(short["alone"]["median_ms"], short["beside_long"]["median_ms"]) > 0
    # It must be able to fail.
    load = serve_load.Load(None, [], "exact")
    case = serve_load.Case(dict(prompt=[5], max_tokens=2), [7, 8])
    usage = dict(prompt_tokens=1, completion_tokens=2)
    for tokens, reason in (([7, 8], "length"), ([7, 9], "length"), ([7], "length"), ([7, 8], "stop")):
        load.judge(case, tokens, reason, usage)
    assert len(load.wrong) == 3 and "token 1 of 2 is 9 instead of 8" in load.wrong
