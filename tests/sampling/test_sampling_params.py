"""Every value that SamplingParams refuses, what it says, and the refusal of unknown names."""

import dataclasses
import math

import numpy as np
import pytest

from nanoinfer.common.errors import UnknownNameError, nearest
from nanoinfer.common.unsupported import SAMPLING, supported
from nanoinfer.outputs import CompletionOutput
from nanoinfer.sampling_params import SamplingParams


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "n": 1,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": 16,
        "min_tokens": 0,
        "thinking_token_budget": None,
        "stop": (),
        "stop_token_ids": (),
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": (),
        "ignore_eos": False,
        "include_stop_str_in_output": False,
        "detokenize": True,
        "skip_special_tokens": True,
        "seed": None,
        "logprobs": None,
        "prompt_logprobs": None,
        "structured_outputs": None,
    }


def test_vllms_neutral_values_are_taken():
    params = SamplingParams(max_tokens=None, min_tokens=50, seed=-1, skip_special_tokens=True)
    assert params.max_tokens is None and params.seed is None
    assert SamplingParams(max_tokens=-1).max_tokens is None
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("n", 0, "an integer in [1, 1024]"),
        ("n", 1025, "an integer in [1, 1024]"),
        ("n", True, "an integer in [1, 1024]"),
        ("n", 1.5, "an integer in [1, 1024]"),
        ("temperature", math.nan, "a finite number >= 0"),
        ("temperature", -0.1, "a finite number >= 0"),
        ("temperature", math.inf, "a finite number >= 0"),
        pytest.param("temperature", 10**400, "a finite number >= 0", id="temperature beyond any float"),
        ("temperature", "0.5", "a finite number >= 0"),
        ("temperature", True, "a finite number >= 0"),
        ("temperature", None, "a finite number >= 0"),
        ("top_k", -2, "an integer >= -1"),
        ("top_k", 2.0, "an integer >= -1"),
        ("top_k", False, "an integer >= -1"),
        ("top_p", 0, "a number in (0, 1]"),
        ("top_p", 1.01, "a number in (0, 1]"),
        ("top_p", math.nan, "a number in (0, 1]"),
        ("top_p", True, "a number in (0, 1]"),
        ("min_p", -0.01, "a number in [0, 1]"),
        ("min_p", 1.01, "a number in [0, 1]"),
        ("min_p", math.nan, "a number in [0, 1]"),
        ("min_p", False, "a number in [0, 1]"),
        ("repetition_penalty", 0, "a finite number > 0"),
        ("repetition_penalty", -1.0, "a finite number > 0"),
        ("repetition_penalty", math.nan, "a finite number > 0"),
        ("repetition_penalty", math.inf, "a finite number > 0"),
        ("repetition_penalty", True, "a finite number > 0"),
        pytest.param("repetition_penalty", 10**400, "a finite number > 0", id="repetition_penalty beyond any float"),
        ("presence_penalty", 2.01, "a number in [-2, 2]"),
        ("presence_penalty", -3, "a number in [-2, 2]"),
        ("presence_penalty", math.nan, "a number in [-2, 2]"),
        ("presence_penalty", True, "a number in [-2, 2]"),
        ("frequency_penalty", -2.5, "a number in [-2, 2]"),
        ("frequency_penalty", math.inf, "a number in [-2, 2]"),
        ("frequency_penalty", "1", "a number in [-2, 2]"),
        ("frequency_penalty", None, "a number in [-2, 2]"),
        ("max_tokens", 0, "an integer >= 1"),
        ("max_tokens", True, "an integer >= 1"),
        ("min_tokens", -1, "an integer >= 0"),
        ("thinking_token_budget", -2, "an integer >= 0"),
        ("min_tokens", 0.0, "an integer >= 0"),
        ("stop", "", "a string or a list of strings, none of them empty"),
        ("stop", ["a", ""], "a string or a list of strings, none of them empty"),
        ("stop", ["a", 3], "a string or a list of strings, none of them empty"),
        ("stop", b"a", "a string or a list of strings, none of them empty"),
        ("stop", 3, "a string or a list of strings, none of them empty"),
        ("stop_token_ids", [-1], "a list of token ids, integers >= 0"),
        ("stop_token_ids", [1.0], "a list of token ids, integers >= 0"),
        ("stop_token_ids", [True], "a list of token ids, integers >= 0"),
        ("stop_token_ids", "12", "a list of token ids, integers >= 0"),
        ("stop_token_ids", 12, "a list of token ids, integers >= 0"),
        ("logit_bias", [(5, 1.0)], "a dict of token ids, integers >= 0, and numbers"),
        ("logit_bias", {-1: 1.0}, "a dict of token ids, integers >= 0, and numbers"),
        ("logit_bias", {"five": 1.0}, "a dict of token ids, integers >= 0, and numbers"),
        ("logit_bias", {"9" * 30: 1.0}, "a dict of token ids, integers >= 0, and numbers"),
        ("logit_bias", {True: 1.0}, "a dict of token ids, integers >= 0, and numbers"),
        ("logit_bias", {1.5: 1.0}, "a dict of token ids, integers >= 0, and numbers"),
        ("logit_bias", {5: math.nan}, "a dict of token ids, integers >= 0, and numbers"),
        ("logit_bias", {5: "1"}, "a dict of token ids, integers >= 0, and numbers"),
        ("logit_bias", {5: True}, "a dict of token ids, integers >= 0, and numbers"),
        ("logit_bias", {5: None}, "a dict of token ids, integers >= 0, and numbers"),
        ("allowed_token_ids", [3, -1], "a list of token ids, integers >= 0"),
        ("allowed_token_ids", [3, "4"], "a list of token ids, integers >= 0"),
        ("allowed_token_ids", 3, "a list of token ids, integers >= 0"),
        ("bad_words", "word", "a list of strings, none of them blank"),
        ("bad_words", ["word", ""], "a list of strings, none of them blank"),
        ("bad_words", ["word", " \n"], "a list of strings, none of them blank"),
        ("bad_words", ["word", 3], "a list of strings, none of them blank"),
        ("ignore_eos", 1, "True or False"),
        ("skip_special_tokens", 0, "True or False"),
        ("seed", 1.0, "an integer in [-9223372036854775808, 18446744073709551615]"),
        ("seed", -(2**63) - 1, "an integer in [-9223372036854775808, 18446744073709551615]"),
        ("seed", 2**64, "an integer in [-9223372036854775808, 18446744073709551615]"),
        ("seed", True, "an integer in [-9223372036854775808, 18446744073709551615]"),
        ("logprobs", -1, "an integer in [0, 20]"),
        ("logprobs", 21, "an integer in [0, 20]"),
        ("logprobs", True, "an integer in [0, 20]"),
        ("prompt_logprobs", -1, "an integer in [0, 20]"),
        ("prompt_logprobs", 21, "an integer in [0, 20]"),
    ],
)
def test_a_refusal_says_what_was_given_what_is_allowed_and_what_to_do(name, value, allowed):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    given = [value] if name == "stop" and isinstance(value, str) else value
    text = str(error.value)
    assert text.startswith(f"{name} is ") and f"it must be {allowed}: " in text and text.endswith(".")
    assert repr(given).strip("[]()").rstrip(",") in text


def test_a_bias_is_cut_to_the_range_of_openai_and_its_ids_may_be_text():
    given = {5: 1, "6": -1000, np.int64(7): np.float32(0.5), 8: math.inf, 9: -math.inf, 10: 10**400}
    bias = SamplingParams(logit_bias=given).logit_bias
    assert bias == {5: 1.0, 6: -100.0, 7: 0.5, 8: 100.0, 9: -100.0, 10: 100.0}
    assert {type(token_id) for token_id in bias} == {int} and {type(one) for one in bias.values()} == {float}
    assert SamplingParams(logit_bias={}).logit_bias == {}


def test_limits_beyond_what_a_row_has_room_for_are_refused_by_name():
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.0)).logit_bias) == 1024
    with pytest.raises(ValueError, match="^logit_bias has 1025 token ids, 1024 are possible: give fewer, or allowed_"):
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))
    with pytest.raises(ValueError, match="^allowed_token_ids is empty: nothing could be generated"):
        SamplingParams(allowed_token_ids=[])
    with pytest.raises(ValueError, match="^allowed_token_ids is .*: -1 is not a token id") as error:
        SamplingParams(allowed_token_ids=[*range(10**5), -1])
    assert len(str(error.value)) < 300, "the whole list is shown"


def test_bad_words_are_kept_once_and_ids_as_a_tuple():
    params = SamplingParams(bad_words=["a", " b", "a"], allowed_token_ids=np.array([3, 5]))
    assert params.bad_words == ("a", " b") and params.allowed_token_ids == (3, 5)
    assert [type(token_id) for token_id in params.allowed_token_ids] == [int, int]
    copy = params.clone()
    copy.logit_bias = {3: 400}
    assert copy.logit_bias == {3: 100.0} and params.logit_bias is None
    assert copy.allowed_token_ids is params.allowed_token_ids, "a list as long as the vocabulary is checked once"


def test_min_tokens_above_max_tokens_are_refused_with_both_values():
    with pytest.raises(ValueError, match="min_tokens is 17, max_tokens is 16: .*lower min_tokens or raise max_tokens"):
        SamplingParams(min_tokens=17)
    assert SamplingParams(min_tokens=16).min_tokens == 16


@pytest.mark.parametrize(
    "values",
    [
        {"n": 3, "temperature": 0, "top_k": -1, "top_p": 1, "min_p": 1, "repetition_penalty": 1e-3, "logprobs": 0},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 20},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"seed": -2},
        {"seed": -(2**63)},
        {"logprobs": 20},
        {"max_tokens": 10**9},
        {"top_k": 10**6},
    ],
)
def test_values_at_the_edge_of_their_range_are_taken(values):
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


def test_a_set_has_the_same_order_in_every_process():
    words = "a bb c dd e ff g hh".split()
    assert SamplingParams(stop={*words}, bad_words=frozenset(words)) == SamplingParams(stop=words, bad_words=words)


def test_stop_and_stop_token_ids_are_kept_as_tuples():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")
    assert SamplingParams(stop_token_ids=range(2)).stop_token_ids == (0, 1)


def test_numpy_numbers_become_plain_ones():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(4), stop_token_ids=np.array([3]))
    assert type(params.temperature) is float and type(params.top_k) is int
    assert [type(token_id) for token_id in params.stop_token_ids] == [int]


def test_params_can_be_assigned_to_compared_and_copied():
    params = SamplingParams(top_k=4, stop=["a"])
    copy = params.clone()
    copy.top_k, copy.stop = np.int64(5), "b"
    assert (copy.top_k, copy.stop, params.top_k) == (5, ("b",), 4) and type(copy.top_k) is int
    assert params == SamplingParams(top_k=4, stop="a") != copy
    for name, value, message in (
        ("top_k", -3, "top_k is -3"),
        ("min_tokens", 17, "min_tokens may be at most max_tokens"),
        ("detokenize", False, "detokenize is False: stop strings are found in the text"),
        ("top_kk", 3, "SamplingParams has no field 'top_kk': did you mean 'top_k'"),
    ):
        with pytest.raises(ValueError, match=message):
            setattr(copy, name, value)
    assert vars(copy) == vars(SamplingParams(top_k=5, stop="b"))
    assert dataclasses.replace(params, top_k=5).top_k == 5
    with pytest.raises(ValueError, match="top_k is -3"):
        dataclasses.replace(params, top_k=-3)


def test_greedy_is_what_is_too_cold_to_divide_by():
    assert SamplingParams(temperature=0).is_greedy and SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


@pytest.mark.parametrize("kind", [TypeError, ValueError])
def test_an_unknown_argument_is_refused_with_the_nearest_name(kind):
    with pytest.raises(
        kind,
        match="^SamplingParams got an unknown argument 'temprature': did you mean 'temperature'\\?$",
    ):
        SamplingParams(temprature=0.5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(best_of=3), "best_of=3 is not supported, but for 1: all n completions are returned"),
        (dict(logits_processors=[len]), r"logits_processors=.* is not supported, but for \[\]: leave it out"),
        (dict(use_beam_search=True), "use_beam_search=True is not supported, but for False: use n and sampling"),
        (dict(guided_json={}), r"guided_json={} is not supported: give structured_outputs, with one"),
    ],
)
def test_what_vllm_has_and_this_engine_does_not_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        SamplingParams(**arguments)


def test_what_is_not_supported_may_be_given_with_values_that_mean_doing_without():
    assert not SAMPLING.keys() & SamplingParams.__dataclass_fields__.keys()
    neutral = {name: (*values, None)[0] for name, (values, _) in SAMPLING.items()}
    assert SamplingParams(temperature=0, **neutral) == SamplingParams(temperature=0)
    assert SamplingParams(length_penalty=1.0) == SamplingParams(**dict.fromkeys(SAMPLING))


def test_positional_arguments_are_refused():
    with pytest.raises(TypeError, match="got 1 positional argument.*keywords only"):
        SamplingParams(0.5)


def test_known_names_are_taken_and_only_near_ones_guessed():
    assert supported(dict(model="x"), {}, ["model", "seed"], "LLM") == dict(model="x")
    with pytest.raises(UnknownNameError, match="^LLM got an unknown argument 'zzz'. Allowed: model, seed.$"):
        supported(dict(model="x", zzz=1), {}, ["model", "seed"], "LLM")
    assert nearest("gpu_memory_limt", ["gpu_memory_limit", "gpu_memory_utilization"]) == "gpu_memory_limit"
    assert nearest("zzz", ["model"]) is None


def test_a_completion_is_finished_when_it_has_a_reason():
    assert not CompletionOutput(index=0, text="", token_ids=[]).finished
    assert CompletionOutput(index=0, text="", token_ids=[], finish_reason="abort").finished
