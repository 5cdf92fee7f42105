"""The template environment: as transformers runs templates, and bounded."""

from __future__ import annotations

import datetime
import json
from typing import Any

import jinja2
import jinja2.sandbox
import pytest
from vocabularies import template_source

from ds4grpc.chat.template import MAX_RENDER_CHARACTERS, Template
from ds4grpc.errors import InvalidRequest, ModelError

GOLDEN = (
    "GLM-4.6",
    "HuggingFaceTB-SmolLM3-3B",
    "LFM2-8B-A1B",
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-ai-DeepSeek-V3.1",
    "google-gemma-2-2b-it",
    "meta-llama-Llama-3.3-70B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Finds <b>é</b> & more",
        "parameters": {
            "type": "object",
            "properties": {"line": {"type": "string", "description": "Which"}},
            "required": ["line"],
        },
    },
}
CALL = {"id": "call00001", "type": "function"}
CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": " Hi <é> \n"}], "add_generation_prompt": True},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes?", "reasoning_content": "A greeting."},
            {"role": "user", "content": "Bye"},
        ],
        "add_generation_prompt": True,
        "enable_thinking": False,
    },
    {
        "messages": [
            {"role": "user", "content": "Look it up"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {**CALL, "function": {"name": "lookup", "arguments": {"line": "é"}}}
                ],
            },
            {"role": "tool", "content": "42", "name": "lookup", "tool_call_id": "call00001"},
        ],
        "tools": [TOOL],
        "add_generation_prompt": True,
    },
]


def _plain_environment() -> jinja2.Environment:
    """A second, plain set-up of what transformers documents, to compare with."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    return environment


@pytest.mark.parametrize("name", GOLDEN)
def test_real_template_renders_what_a_plain_environment_does(name: str) -> None:
    source = template_source(name)
    # The tag only marks training text; the plain environment does not know it.
    plain_source = source.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    plain = _plain_environment().from_string(plain_source)
    template = Template(source)
    for variables in CONVERSATIONS:
        variables = {"bos_token": "<s>", "eos_token": "</s>", "tools": None, **variables}
        try:
            expected = plain.render(**variables)
        except Exception:
            with pytest.raises(InvalidRequest):
                template.render(variables)
        else:
            assert template.render(variables) == expected


def test_generation_tag_renders_its_body() -> None:
    source = "{% for m in messages %}{% generation %}\n<{{ m }}>{% endgeneration %}{% endfor %}"
    assert Template(source).render({"messages": ["a", "b"]}) == "<a><b>"


def test_tojson_is_plain_json_and_takes_options() -> None:
    value = {"b": "<é>", "a": [1]}
    assert Template("{{ v | tojson }}").render({"v": value}) == '{"b": "<é>", "a": [1]}'
    sorted_source = "{{ v | tojson(sort_keys=true, separators=(',', ':'), indent=none) }}"
    assert Template(sorted_source).render({"v": value}) == '{"a":[1],"b":"<é>"}'


def test_template_refusal_carries_its_message() -> None:
    template = Template("{{ raise_exception('Roles must alternate ' + '!' * 2000) }}")
    with pytest.raises(InvalidRequest, match="Roles must alternate") as caught:
        template.render({})
    assert caught.value.reason == "TEMPLATE_REFUSED"
    assert len(caught.value.message) < 600


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ missing.name }}",
        "{{ 1 / 0 }}",
        "{{ 'a' * 100000000 }}",
        "{{ [1] * 100000000 }}",
        "{{ 9 ** 9999 }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' + 1 }}",
    ],
)
def test_template_that_fails_or_reaches_out_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template fails") as caught:
        Template(source).render({"messages": []})
    assert caught.value.reason == "TEMPLATE_FAILED"


def test_runaway_template_is_cut_off() -> None:
    template = Template(
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ text }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(InvalidRequest, match="makes more than"):
        template.render({"text": "a" * (MAX_RENDER_CHARACTERS // 64)})


def test_source_that_is_no_template_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="does not compile: line 2"):
        Template("a\n{% if %}")
