"""Prompts of a file, and what is said of those that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from surestep_cli.verify.prompts import (
    CHATS,
    COMPLETIONS,
    built_in,
    crowd,
    near_limit,
    parameters,
    read_prompts,
)
from surestep_common.errors import InvalidRequest


def test_lines_of_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffWhy?\r\n\n  {not: json}\n".encode())
    first, second = read_prompts(path)
    assert (first.path, first.body) == (COMPLETIONS, {"prompt": "Why?"})
    assert second.body == {"prompt": "  {not: json}"}
    assert first.name == "prompts.txt:1 Why?"
    assert second.name.startswith("prompts.txt:3 ")


def test_bodies_and_batches(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a\u2028b " * 40}], "top_p": 0.5}
    batch = {"custom_id": "x", "method": "POST", "url": CHATS, "body": chat}
    path = tmp_path / "prompts.JSONL"
    lines = (json.dumps(each, ensure_ascii=False) for each in (chat, batch, {"prompt": [1, 2]}))
    path.write_text("\n".join(lines))
    prompts = read_prompts(path)
    assert [p.path for p in prompts] == [CHATS, CHATS, COMPLETIONS]
    assert prompts[0].body == prompts[1].body == chat
    assert len(prompts[0].name) < 70
    assert prompts[2].name == "prompts.JSONL:3 [1, 2]"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"\n \n", "holds no prompt"),
        ("a.jsonl", b'{"prompt": "x"}\n{', "a.jsonl:2 is no JSON"),
        ("a.jsonl", b"[1]", "a.jsonl:1 is no request"),
        ("a.jsonl", b'{"prompt": "x", "messages": []}', "is no request"),
        ("a.jsonl", b'{"input": "x"}', "is no request"),
        ("a.txt", b"\xff\xfe", "not text in UTF-8"),
    ],
)
def test_what_is_no_prompt(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=said):
        read_prompts(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(InvalidRequest, match="more than 64 MiB"):
        read_prompts(path)


def test_messages_of_any_kind_have_a_name(tmp_path: Path) -> None:
    """What is wrong with them is for the server to say."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": []}\n{"messages": "x"}\n{"messages": [3]}\n')
    assert len(read_prompts(path)) == 3


def test_prompts_run_into_the_limit_one_after_the_other() -> None:
    made = near_limit([1, 2, 3], 64)
    sizes = {(len(each.body["prompt"]), each.body["max_tokens"]) for each in made}
    assert len(sizes) >= 8
    assert {sum(size) for size in sizes} == {64}


def test_parameters_are_no_plain_prompts() -> None:
    assert all(prompt.is_plain for prompt in built_in())
    assert not any(prompt.is_plain for prompt in parameters())
    assert not any(prompt.is_plain for prompt in crowd(8))


def test_the_built_in_set_runs_to_its_end() -> None:
    assert len({prompt.name for prompt in built_in()}) == len(built_in()) >= 6
    assert all(prompt.body["ignore_eos"] for prompt in built_in())
