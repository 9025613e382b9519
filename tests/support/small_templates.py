"""Small chat templates, one of each kind that published ones are of: each drops or refuses something in its own way."""

_CALLS = (
    "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "</call>{% endfor %}"
)
_TOOLS = "{% for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>{% endfor %}"
_SAID = "<{{ message.role }}>{{ message.content }}"
_BEGIN = "{% if add_generation_prompt %}<assistant>{% endif %}"


def _loop(inner: str, *, before: str = "", over: str = "messages") -> str:
    return f"{before}{_TOOLS}{{% for message in {over} %}}{inner}{{% endfor %}}{_BEGIN}"


def _refusing(condition: str, inner: str = f"{_SAID}{_CALLS}\n") -> str:
    return f"{{% if {condition} %}}{{{{ raise_exception('no such turn') }}}}{{% endif %}}{inner}"


_OTHERS = "message.role not in ['system', 'user', 'assistant', 'tool']"
_ALTERNATING = (
    "{% set ns = namespace(n=0) %}{% for message in messages if message.role != 'system' and message.role != 'tool' "
    "and not message.tool_calls %}{% if (message.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('no turn') }}"
    "{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}"
)
_LAST_QUESTION = (
    "{% set ns = namespace(last=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_THOUGHT = (
    "{% if message.reasoning_content and loop.index0 > ns.last %}<think>{{ message.reasoning_content }}</think>"
    "{% endif %}"
)

SMALL = {
    "takes all": _loop(f"{_SAID}{_CALLS}\n"),
    "drops roles": _loop(f"{{% if not ({_OTHERS}) %}}{_SAID}{_CALLS}\n{{% endif %}}"),
    "refuses roles": _loop(_refusing(_OTHERS)),
    "knows developer": _loop(_refusing(_OTHERS.replace("'user'", "'user', 'developer'"))),
    "drops late system": _loop(f"{{% if loop.first or message.role != 'system' %}}{_SAID}{_CALLS}\n{{% endif %}}"),
    "refuses late system": _loop(_refusing(f"{_OTHERS} or message.role == 'system' and not loop.first")),
    "collects system": _loop(
        f"{_SAID}{_CALLS}\n",
        before="{% for message in messages if message.role == 'system' %}{{ message.content }}\n{% endfor %}",
        over="messages | rejectattr('role', 'equalto', 'system')",
    ),
    "own system": _loop(
        f"{_SAID}{_CALLS}\n",
        before="{% if not messages | selectattr('role', 'equalto', 'system') | list %}<system>Be good.\n{% endif %}",
    ),
    "last system": _loop(
        f"{_SAID}{_CALLS}\n",
        before="{% set ns = namespace(s='') %}{% for message in messages if message.role == 'system' %}"
        "{% set ns.s = message.content %}{% endfor %}{{ ns.s }}",
        over="messages | rejectattr('role', 'equalto', 'system')",
    ),
    "wants turns": _loop(_refusing(f"{_OTHERS} or message.role == 'system' and not loop.first"), before=_ALTERNATING),
    "system at the end": _loop(
        "{% if message.role != 'system' %}"
        "{% if loop.last and message.role == 'user' and messages[0].role == 'system' %}"
        f"{{{{ messages[0].content }}}}{{% endif %}}{_SAID}{_CALLS}\n{{% endif %}}",
        before=_ALTERNATING,
    ),
    "forgets thoughts": _loop(
        _refusing(
            f"{_OTHERS} or message.role == 'system' and not loop.first",
            f"<{{{{ message.role }}}}>{_THOUGHT}{{{{ message.content }}}}{_CALLS}\n",
        ),
        before=_LAST_QUESTION,
    ),
    "one call": _loop(
        f"{_SAID}{{% if message.tool_calls %}}<call>{{{{ message.tool_calls[0].function | tojson }}}}</call>"
        "{% endif %}\n"
    ),
    "arguments by name": _loop(
        f"{_SAID}{{% for call in message.tool_calls or [] %}}<call>{{{{ call.function.name }}}}{{% for name, value in "
        "call.function.arguments.items() %}<{{ name }}>{{ value }}</{{ name }}>{% endfor %}</call>{% endfor %}\n"
    ),
    "call or text": _loop(
        f"<{{{{ message.role }}}}>{{% if message.tool_calls %}}{_CALLS}{{% else %}}{{{{ message.content }}}}"
        "{% endif %}\n"
    ),
    "arguments as text": _loop(
        f"{_SAID}{{% for call in message.tool_calls or [] %}}"
        "{{ '<call>' + call.function.name + ' ' + call.function.arguments + '</call>' }}{% endfor %}\n"
    ),
    "calls or content": _loop(
        "<{{ message.role }}>{% if message.content is none %}{% for call in message.tool_calls %}"
        "{{ '<call>' + call.function.name + ' ' + call.function.arguments + '</call>' }}{% endfor %}{% else %}"
        "{{ message.content.split('</think>')[-1] }}{% endif %}\n"
    ),
    "parts": _loop(
        "<{{ message.role }}>{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
        f"{_CALLS}\n"
    ),
    "tools by another name": _loop(f"{_SAID}{_CALLS}\n").replace("tools or", "xml_tools or"),
    "reads schemas": "{% for tool in tools or [] %}{% for name, value in tool.function.parameters.properties.items() %}"
    "{{ name + value.description }}{% endfor %}{% if 'x' in tool.function.parameters.required %}x"
    "{% endif %}{% endfor %}" + _loop(f"{_SAID}{_CALLS}\n"),
}  # fmt: skip
