from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import tiny_tokenizer
from surestep_common.errors import InvalidRequest
from surestep_gateway.text.chat_template import ChatTemplate

USER = {"role": "user", "content": "hi"}


def tiny() -> ChatTemplate:
    return ChatTemplate(tiny_tokenizer.CHAT_TEMPLATE, {})


def test_messages_and_generation_prompt() -> None:
    assert tiny().render([USER]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tiny().render([USER], add_generation_prompt=False).endswith("hi<|im_end|>\n")


def test_the_final_message_can_be_continued() -> None:
    chat = [USER, {"role": "assistant", "content": "Sure,  "}]
    text = tiny().render(chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nSure,  ")
    trimming = ChatTemplate("{{ messages[-1]['content'] | trim }}!", {})
    assert trimming.render(chat, continue_final_message=True) == "Sure,"


def test_a_template_that_drops_the_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate("fixed", {}).render([USER], continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_the_templates_complaint_reaches_the_client() -> None:
    template = ChatTemplate("{{ raise_exception('no system role') }}", {})
    with pytest.raises(InvalidRequest, match="no system role") as caught:
        template.render([USER])
    assert caught.value.param == "messages"


def test_what_templates_expect_to_find() -> None:
    source = (
        "{{ bos_token }}{{ messages | tojson }}{{ enable_thinking }}{{ strftime_now('%Y')[:2] }}"
        "{% generation %}x{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}"
    )
    text = ChatTemplate(source, {"bos_token": "<s>"}).render(
        [{"role": "user", "content": "<é>"}], variables={"enable_thinking": False}
    )
    assert text == '<s>[{"role": "user", "content": "<é>"}]False20x'


# As templates of DeepSeek and of GLM go through calls.
JOINED = (
    "{% for m in messages %}{% if m['content'] is none %}{% for call in m['tool_calls'] %}"
    "{{ '[' + call['function']['name'] + ' ' + call['function']['arguments'] + ']' }}"
    "{% endfor %}{% else %}{{ m['content'] + ';' }}{% endif %}{% endfor %}"
)
KEYS = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}[{{ call.function.name }}"
    "{% for k, v in call.function.arguments.items() %} {{ k }}={{ v | tojson }}{% endfor %}]"
    "{% endfor %};{% endfor %}{{ messages | tojson }}"
)


def test_calls_are_objects_and_text() -> None:
    function = {"name": "weather", "arguments": {"city": "é", "days": 2}}
    chat: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
    ]
    joined = ChatTemplate(JOINED, {}).render(chat)
    assert joined == 'hi;[weather {"city": "é", "days": 2}]'
    shown = json.dumps(chat, ensure_ascii=False)
    assert ChatTemplate(KEYS, {}).render(chat) == f'hi;[weather city="é" days=2];{shown}'
    said = [{**chat[1], "content": "so"}]
    assert ChatTemplate(JOINED, {}).render(said) == "so;"


def test_templates_that_ask_for_no_content_and_cannot_take_it() -> None:
    """Templates like Ministral-3's: empty text is none to them, and what is no text has a length."""
    source = (
        "{% for m in messages %}{% if (m.content is none or m.content == '') and not m.tool_calls %}"
        "{{ raise_exception('empty') }}{% endif %}{% if m.content is string %}{{ m.content }}"
        "{% elif m.content | length > 0 %}{{ m.content[0].text }}{% endif %}"
        "{% for call in m.tool_calls or [] %}({{ call.function.name }}){% endfor %};{% endfor %}"
    )
    calls = [{"function": {"name": "weather", "arguments": {}}}]
    template = ChatTemplate(source, {})
    chat: list[dict[str, Any]] = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    assert template.render(chat) == "hi;(weather);"
    with pytest.raises(InvalidRequest, match="empty"):
        template.render([USER, {"role": "assistant", "content": ""}])


def test_roles_whose_contents_are_lists_of_parts() -> None:
    """Some templates read both forms, and some another one in instructions."""
    each, part = "{% for m in messages %}", "{% for part in m.content %}{{ part.text }}{% endfor %}"
    text = "{{ m.content }}"
    loop = f"{each}{part}{{% endfor %}}"
    both = (
        f"{each}{{% if m.content is string %}}{text}{{% else %}}{part}{{% endif %}}{{% endfor %}}"
    )
    listed = both.replace("m.content is string", "m.content is string and m.role != 'system'")
    every = {"system", "developer", "user", "assistant"}
    assert ChatTemplate(loop, {}).roles_in_parts(tools=False) == every
    assert not ChatTemplate(both, {}).roles_in_parts(tools=False)
    assert ChatTemplate(listed, {}).roles_in_parts(tools=False) == {"system"}
    assert not ChatTemplate(loop, {}, tool_source=both).roles_in_parts(tools=True)
    assert ChatTemplate(both, {}).replaced_by(loop).roles_in_parts(tools=True) == every


def test_templates_are_sandboxed() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", {})
    with pytest.raises(InvalidRequest):
        template.render([USER])


def test_variables_cannot_replace_the_messages() -> None:
    with pytest.raises(InvalidRequest) as caught:
        tiny().render([USER], variables={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_a_model_without_template_says_so() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate(None, {}).render([USER])


def test_a_broken_template_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate("{% if %}", {})


def test_places_a_folder_keeps_its_template(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    named = [
        {"name": "default", "template": "named {{ eos_token }}"},
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
    ]
    config.write_text(json.dumps({"chat_template": named, "eos_token": {"content": "</s>"}}))
    assert ChatTemplate.load(tmp_path).render([USER]) == "named </s>"
    assert ChatTemplate.load(tmp_path).render([USER], tools=[{}]) == "tools 1"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.load(tmp_path).render([USER]) == "file"
    assert ChatTemplate.load(tmp_path).render([USER], tools=[{}]) == "file"
    override = tmp_path / "other.jinja"
    override.write_text("override")
    assert ChatTemplate.load(tmp_path, str(override)).render([USER]) == "override"
    with pytest.raises(InvalidRequest):
        ChatTemplate.load(tmp_path, str(tmp_path / "missing.jinja"))
