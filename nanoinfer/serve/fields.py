"""From the body of an HTTP request to a checked one: which names of fields are known, and what becomes of others."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from nanoinfer.common.errors import SHOWN_CHARS, did_you_mean, shown, unknown
from nanoinfer.common.other_names import MEANT
from nanoinfer.common.unsupported import FIRST_COME, LEAVE_OUT, SAMPLING, by_advice, refusal
from nanoinfer.serve import json_body
from nanoinfer.serve.budgets import with_budget
from nanoinfer.serve.errors import BadRequestError
from nanoinfer.serve.images import WORDS, replace_images
from nanoinfer.serve.protocol import Body, GenerationRequest, StreamOptions

logger = logging.getLogger("nanoinfer.serve")
B = TypeVar("B", bound=Body)
_MAX_LOGGED = 200  # names; clients can make up any number

# Fields that common clients send and that do not influence the answer.
IGNORED = frozenset(
    (
        "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
        "parallel_tool_calls "
        # What only says how something is done that is off, or that is done here anyway.
        "cache_prompt keep_alive dry_allowed_length dry_base dry_penalty_last_n dry_range dry_sequence_breakers "
        "dynatemp_exponent mirostat_eta mirostat_tau repeat_last_n repetition_penalty_range smoothing_curve "
        "xtc_threshold adaptive_decay backend_sampling n_cache_reuse n_discard speculative.n_max speculative.n_min "
        "speculative.p_min session_id stream_interval max_dynamic_patch use_audio_in_video "
        # What an answer tells beside itself.
        "return_progress timings_per_token rid id_slot"
    ).split()
)
_SAMPLERS = "there are temperature, top_k, top_p, min_p and the penalties"
# Fields of OpenAI's, vLLM's and other servers' APIs that would change the answer and are not supported: the values that
# mean the same as leaving the field out, and what to do.
UNSUPPORTED = {name: row for name, row in SAMPLING.items() if name not in GenerationRequest.model_fields} | by_advice({
    "only text is generated": dict(modalities=(["text"],), audio=()),
    "use chat_template_kwargs if the model's chat template has a switch, and thinking_token_budget": dict(
        think=(), enable_thinking=(), thinking_forced_open=(),
    ),
    "use /v1/chat/completions, or give thinking_token_budget": dict(thinking=(), reasoning=()),
    "its end comes as the model writes it: leave it out": dict(
        reasoning_budget_message=("",), think_stop_sentence=("",),
    ),
    "give thinking_token_budget, logit_bias or bad_words": dict(
        custom_logit_processor=("",), custom_params=({},), vllm_xargs=({},),
    ),
    "what is thought stands in reasoning_content: start the server with --reasoning-parser none to have it in the "
    "content": dict(
        separate_reasoning=(True,), reasoning_format=("auto", "deepseek"), reasoning_in_content=(False,),
        stream_reasoning=(True,),
    ),
    "start the server with --tool-call-parser none, or send tool_choice=\"none\"": dict(parse_tool_calls=(True,)),
    "give return_token_ids=true, which lists them beside the text": dict(
        return_tokens_as_token_ids=(False,), return_tokens=(False,), return_prompt_token_ids=(False,),
    ),
    "give logprobs, in chats with top_logprobs": dict(
        n_probs=(0,), return_logprob=(False,), top_logprobs_num=(0,), token_ids_logprob=(), logprob_start_len=(-1,),
        post_sampling_probs=(False,), return_text_in_logprobs=(False,), details=(False,),
    ),
    "give prompt_logprobs": dict(decoder_input_details=(False,)),
    "give include_stop_str_in_output=true": dict(no_stop_trim=(False,), trim_stop=(True,)),
    "give stop: its strings are texts, not patterns": dict(stop_regex=("", [])),
    "give max_tokens: no answer is bounded by time": dict(
        t_max_predict_ms=(-1, 0), t_max_prompt_ms=(-1, 0), max_time=(0,),
    ),
    "give temperature=0": dict(do_sample=(True,)),
    "give ignore_eos=true": dict(ban_eos_token=(False,)),
    "give bad_words or logit_bias": dict(
        custom_token_bans=("",), banned_tokens=([],), banned_strings=([],),
    ),
    "give a message of the role system": dict(system=("",), system_prompt=("",), safe_prompt=(False,)),
    "give messages, or the prompt as token ids to /v1/completions": dict(input_ids=()),
    "shorten the prompt: what is too long is refused": dict(
        truncate=(), prompt_truncate_len=(), transforms=([],),
        context_length_exceeded_behavior=("error",),
    ),
    "the server keeps nothing between requests: send the whole conversation": dict(
        context=([],), session_params=({},),
    ),
    "give the server --chat-template FILE": dict(chat_template=()),
    FIRST_COME: dict(priority=(0,)),
    "the prefix cache is one for all requests": dict(cache_salt=()),
    "use /v1/completions with a finished prompt": dict(continue_final_message=(False,), raw=(False,), template=("",)),
    "give sampling fields beside the messages; the context is the server's --max-model-len": dict(options=({},)),
    "give response_format or structured_outputs": dict(
        format=("",), grammar=("",), json_schema=(), regex=("",), ebnf=("",), grammar_lazy=(False,),
        grammar_triggers=([],), preserved_tokens=([],),
    ),
    _SAMPLERS: dict(
        typical_p=(1,), typical=(1,), tfs=(1,), tfs_z=(1,), top_a=(0,), top_n_sigma=(-1, 0), nsigma=(0,),
        mirostat=(0,), mirostat_mode=(0,), dynatemp_range=(0,), dynamic_temperature=(False,), smoothing_factor=(0,),
        xtc_probability=(0,), dry_multiplier=(0,), epsilon_cutoff=(0,), eta_cutoff=(0,), penalty_alpha=(0,),
        no_repeat_ngram_size=(0,), encoder_repetition_penalty=(1,), guidance_scale=(1,), negative_prompt=("",),
        num_beams=(1,), adaptive_target=(-1,), samplers=(), sampler_priority=(), sampler_order=(), min_keep=(0,),
        dynatemp_low=(), dynatemp_high=(), skew=(0,), cfg_scale=(1,), watermark=(False,),
        token_healing=(False,), n_indent=(0,),
    ),
    "give tools and tool_choice, in /v1/chat/completions": dict(functions=([],), function_call=("none",)),
    "use /v1/chat/completions": dict(
        tools=([],), tool_choice=("none", "auto"), reasoning_effort=(), include_reasoning=(True, False),
    ),
    "merge the adapter into the weights": dict(lora=([],), lora_path=(), lora_request=()),
    LEAVE_OUT: dict(
        suffix=("",), prediction=(), verbosity=(), web_search_options=(), documents=([],), images=([],),
        prompt_embeds=(), input_prefix=("",), input_suffix=("",), n_keep=(0,), image_data=([],), multimodal_data=([],),
        media_io_kwargs=({},), mm_processor_kwargs=({},), kv_transfer_params=({},), ec_transfer_params=({},),
        return_hidden_states=(False,), return_routed_experts=(False,), return_token_offsets=(False,),
        return_prompt_text=(False,), return_meta_info=(False,), response_fields=([],), enable_search=(False,),
        plugins=([],), tool_prompt=("",), guideline=(),
    ),
})  # fmt: skip


class Fields:
    """Which names a server's requests may have. May be used on any thread.

    A name that no API has changes no answer: it is ignored, and the log says so once.

    Args:
        refuses_unknown: refuse such names with the nearest known one.
        replaces_images: a text stands in the place of images; else they are refused.
    """

    def __init__(self, *, refuses_unknown: bool = False, replaces_images: bool = False) -> None:
        self.refuses_unknown, self._replaces_images = refuses_unknown, replaces_images
        self._logged: set[str] = set()

    def leave_out(self, what: str, why: str) -> None:
        """Leave a part of a request out that changes the answer no more than a field that no API has.

        Raises:
            BadRequestError: such fields are refused.
        """
        what = what[:SHOWN_CHARS]
        if self.refuses_unknown:
            raise BadRequestError(f"{what} is not supported, as {why}: leave it out", code="unsupported_parameter")
        self.note(what, "requests have %s, which is left out, as %s; --strict refuses it", what, why)

    def take_image(self, where: str, kind: str, field: str) -> None:
        """Take a part of a conversation that is no text, such as an image. Raises BadRequestError where none may be."""
        if not self._replaces_images:
            raise BadRequestError(
                f"{where} has the type {kind!r}: {WORDS[kind]}s are not supported, only text is supported: leave it "
                "out, or start the server with --images replace, which puts a text in the place of each",
                param=field,
            )
        self.note(f"{kind} in a message", "requests have parts of the type %r: a text stands in their place", kind)

    def check(self, name: str, given: Mapping[str, Any], known: Collection[str], where: str) -> None:
        """Take a name that is given and not among the known ones. Raises BadRequestError."""
        value, name = given[name], name[:SHOWN_CHARS]
        ours = next((meant for meant in MEANT.get(name, ()) if meant in known), None)
        if ours is not None:  # it would change the answer, unless it says the same again
            if value is not None and given.get(ours) != value:
                message = f"{where} has the field {name!r}, which is {ours!r} here: give that"
                raise BadRequestError(message, param=name, code="unsupported_parameter")
        elif self.refuses_unknown:
            message = unknown(f"{where} has an unknown field", name, sorted(known))
            raise BadRequestError(message, param=name, code="unknown_parameter")
        else:
            text = "%s has a field %r that is not known%s: it is ignored, here and later; --strict refuses such fields"
            is_context = "max_model_len" in MEANT.get(name, ())
            hint = " (the context is --max-model-len)" if is_context else did_you_mean(name, known)
            self.note(name, text, where, name, hint)

    def note(self, name: str, text: str, *values: str) -> None:
        """Log what becomes of requests with this name, once."""
        if name not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(name)
            logger.warning(text, *values)


def parse(kind: type[B], body: bytes, fields: Fields) -> B:
    """Return a checked request from the body of an HTTP request.

    Raises:
        BadRequestError: the body is not a JSON object. And as `checked`.
    """
    try:
        given = json_body.load(body)
    except RecursionError as error:
        reason = "the body is nested too deeply, 200 levels are possible: send a flatter one"
        raise BadRequestError(reason, code="invalid_json") from error
    except ValueError as error:
        raise BadRequestError(f"the body is no valid JSON: {shown(str(error))}", code="invalid_json") from error
    if not isinstance(given, dict):
        raise BadRequestError("the body is no JSON object: send {...}", code="invalid_json")
    return checked(kind, given, fields)


def checked(kind: type[B], given: dict[str, Any], fields: Fields) -> B:
    """Return a checked request.

    Raises:
        BadRequestError: a field is not supported or has a wrong value.
    """
    replace_images(given, fields.take_image)
    given = with_budget(given, kind.model_fields)
    for name, value in given.items():
        if name in kind.model_fields or name in IGNORED or name in kind.ignored:
            continue
        table = kind.unsupported if name in kind.unsupported else UNSUPPORTED
        if name not in table:
            fields.check(name, given, kind.model_fields, "the request")
        elif message := refusal(name, value, table, shown, json.dumps):
            raise BadRequestError(message, param=name, code="unsupported_parameter")
    options = given.get("stream_options")
    for name in options if isinstance(options, dict) else ():
        if name not in StreamOptions.model_fields:
            fields.check(name, options, StreamOptions.model_fields, "stream_options")
    try:
        request = kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name, path = str(first["loc"][0]), ".".join(map(str, first["loc"]))
        message = f"{path} is {shown(first['input'])}: {first['msg']}"
        if first["type"] == "missing":
            message = f"{name} is missing: it is required"
        raise BadRequestError(message, param=name) from error
    request.check()
    return request
