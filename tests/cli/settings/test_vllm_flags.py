"""Every flag of vLLM is acted on, named in the warning, or refused by name; none is ignored."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_settings import SettingsError
from surestep_cli.main import Serve
from surestep_cli.settings.flag_values import FlagKind, kind_of_field, kind_of_flag
from surestep_cli.settings.flags import FlagReader
from surestep_cli.settings.help import help_text
from surestep_cli.settings.sections import SECTIONS
from surestep_cli.settings.vllm_flags import FlagSupport, VllmFlag, vllm_flags

FLAGS = [flag for flag in vllm_flags().by_name.values() if "." not in flag.name]
KEYS = [flag for flag in vllm_flags().by_name.values() if "." in flag.name]
# Named in the table ahead of their settings.
SAMPLES = {
    FlagKind.ONE: ["17"],
    FlagKind.OPTIONAL: ["17"],
    FlagKind.MANY: ["17", "18"],
    FlagKind.REPEATED: ["17"],
    FlagKind.MAPPING: ['{"some": 17}'],
}


def ask(*arguments: str) -> FlagReader:
    asked = FlagReader(Serve.model_fields)
    asked.read_arguments(arguments)
    return asked


def refusals(asked: FlagReader) -> str:
    with pytest.raises(SettingsError) as raised:
        asked.check()
    return str(raised.value)


def typed(flag: VllmFlag) -> list[str]:
    """The flag with a value that asks for something."""
    if flag.kind:
        return [f"--{flag.name}", *SAMPLES[kind_of_flag(flag)]]
    return [f"--no-{flag.name}" if "on" in flag.neutral else f"--{flag.name}"]


def ids(flag: VllmFlag) -> str:
    return flag.name


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.acted_on], ids=ids)
def test_what_is_acted_on_reaches_its_setting(flag: VllmFlag) -> None:
    setting = flag.target.partition(".")[0].replace("-", "_")
    asked = ask(*typed(flag))
    asked.check()
    assert list(asked.values) == [setting]
    assert setting in Serve.model_fields
    assert asked.without_effect == {}
    key = flag.target.partition(".")[2]
    assert not key or list(asked.values[setting]) == [key]


@pytest.mark.parametrize("flag", [f for f in FLAGS if not f.acted_on], ids=ids)
def test_what_is_not_acted_on_is_told_by_name(flag: VllmFlag) -> None:
    (name, *values) = typed(flag)
    asked = ask(name, *values)
    assert asked.values == {}
    if flag.verdict is FlagSupport.NO_EFFECT:
        asked.check()
        assert asked.without_effect == {name: flag.why}
    else:
        assert refusals(asked).startswith(f"{name} is not supported")
        assert flag.why in refusals(asked)


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.neutral and not f.acted_on], ids=ids)
def test_what_asks_for_nothing_is_accepted(flag: VllmFlag) -> None:
    for value in flag.neutral:
        switch = {"on": f"--{flag.name}", "off": f"--no-{flag.name}"}
        given = [switch[value]] if not flag.kind else [f"--{flag.name}={value}"]
        asked = ask(*given)
        asked.check()
        assert (asked.values, asked.without_effect) == ({}, {})


@pytest.mark.parametrize("flag", KEYS, ids=ids)
def test_keys_of_mappings_have_a_fate_too(flag: VllmFlag) -> None:
    name, _, key = flag.name.partition(".")
    asked = ask(f"--{name}", f'{{"method": "ngram", "{key}": true}}')
    assert asked.values == {name.replace("-", "_"): {"method": "ngram"}}
    if flag.verdict is FlagSupport.NO_EFFECT:
        assert asked.without_effect == {f"--{flag.name}": flag.why}
    else:
        assert f"--{flag.name} is not supported" in refusals(asked)


@pytest.mark.parametrize("flag", FLAGS, ids=ids)
def test_all_forms_of_a_flag_ask_for_the_same(flag: VllmFlag) -> None:
    (name, *values) = typed(flag)
    plain = outcome(name, *values)
    assert outcome(f"--{name[2:].replace('-', '_')}", *values) == plain
    for short in flag.shorts:
        if values:
            assert outcome(short, *values) == plain
    if len(values) == 1:
        assert outcome(f"{name}={values[0]}") == plain
        for short in flag.shorts:
            assert outcome(f"{short}={values[0]}") == plain


def outcome(*arguments: str) -> tuple[Any, ...]:
    asked = ask(*arguments)
    return asked.values, asked.without_effect, asked.problems


def test_kinds_are_those_of_the_settings() -> None:
    """So that a value is never taken for the model, or the other way round."""
    wrong = {
        flag.name: (flag.kind, kind)
        for flag in FLAGS
        if flag.verdict is FlagSupport.SAME and (field := Serve.model_fields.get(_field(flag)))
        if (kind := kind_of_field(field)) is not kind_of_flag(flag)
        if {kind, kind_of_flag(flag)}
        not in ({FlagKind.REPEATED, FlagKind.ONE}, {FlagKind.REPEATED, FlagKind.MANY})
    }
    assert wrong == {"hf-token": ("[NAME]", FlagKind.ONE)}


def _field(flag: VllmFlag) -> str:
    return flag.name.replace("-", "_")


def test_no_setting_of_ours_has_another_fate_in_the_table() -> None:
    other = {f.name for f in FLAGS if f.verdict is not FlagSupport.SAME}
    assert {name for name in Serve.model_fields if name.replace("_", "-") in other} == set()


def test_every_setting_is_in_one_section() -> None:
    listed = [name for names in SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(Serve.model_fields)


def test_help_names_everything() -> None:
    text = help_text(Serve, "all", 80)
    assert max(map(len, text.splitlines())) <= 100
    assert [name for name in Serve.model_fields if name.replace("_", "-") not in text] == []
    assert [
        flag.name
        for flag in FLAGS
        if flag.name not in text and flag.verdict is not FlagSupport.SAME
    ] == []
    assert "--swap-space" not in help_text(Serve, None, 80)


def test_help_about_something() -> None:
    assert help_text(Serve, "memory", 80).startswith("Memory\n")
    found = help_text(Serve, "prefix", 80)
    assert "--[no-]enable-prefix-caching" in found
    assert "--prefix-caching-hash-algo" in found
    assert "--port" not in found
    assert "No section and no flag" in help_text(Serve, "nonsense", 80)
