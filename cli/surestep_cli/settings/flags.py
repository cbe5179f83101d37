"""The flags and keys of `surestep serve`, in all the forms that users write them in.

Dashes or underscores; `--flag VALUE` or `--flag=VALUE`; short forms; the beginning of one flag;
`--no-flag`, and `--disable-x` for `--enable-x`; several values after one flag; JSON,
`key=value,key=value` or `--flag.key VALUE` for mappings. The keys of a config file go the same way,
so that one table decides about both.
"""

from __future__ import annotations

import difflib
import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo
from pydantic_settings import SettingsError
from surestep_common.config import human_int

from .flag_values import (
    TRUTH,
    FlagKind,
    kind_of_field,
    kind_of_flag,
    mapping,
    merged,
    names,
    nested,
    scalar,
    truth,
)
from .vllm_flags import FlagSupport, VllmFlag, VllmFlags, vllm_flags

_GIB = 1 << 30
_NUMBER = re.compile(r"-\d+(\.\d+)?")
_ATTACHED = re.compile(r"-([A-Za-z])=?(.+)")  # -O3
_FOREIGN = {  # flags of llama.cpp, and what to give here
    **dict.fromkeys(("-m", "-hf", "--hf-repo"), "the model stands without a flag"),
    "-c": "give --max-model-len, the context of one request",
    "-np": "give --max-num-seqs",
    "-t": "give --cpu-threads",
    "-ngl": "give --device cuda, for the whole model",
}
_OPPOSITES = (("no-", ""), ("enable-", "disable-"), ("disable-", "enable-"))


class _Name(NamedTuple):
    """A flag as it was found; `on` is the value of a switch in this form."""

    name: str
    on: bool = True


class FlagReader:
    """Collects the values of flags or keys; the table of vLLM's flags decides about each."""

    def __init__(self, fields: Mapping[str, FieldInfo], vllm: VllmFlags | None = None) -> None:
        self._vllm = vllm or vllm_flags()
        self._fields = {name.replace("_", "-"): field for name, field in fields.items()}
        known = {*self._fields, *self._vllm.by_name}
        self._names = sorted(name for name in known if "." not in name)
        self.values: dict[str, Any] = {}  # of settings, by their names
        self.without_effect: dict[str, str] = {}  # flags that are accepted, and why they do nothing
        self.more_models: list[str] = []  # behind the first
        self.swallowed: str | None = None  # a flag that took more than one value
        self.problems: list[str] = []

    def check(self) -> None:
        """Raise SettingsError with a line for each flag that cannot be served."""
        if self.problems:
            raise SettingsError("\n".join(self.problems))

    def read_arguments(self, arguments: Sequence[str]) -> None:
        """Read the command line after `serve`."""
        words = deque(arguments)
        while words:
            word = words.popleft()
            if not _is_flag(word):
                self._model(word)
                continue
            head, equals, value = word.partition("=")
            given = [value] if equals else None
            if (flag := self._long_form(head)) is None and (match := _ATTACHED.fullmatch(word)):
                flag, given = self._long_form(f"-{match[1]}"), [match[2]]
            self._read(flag if flag is not None else head, given, words)

    def read_keys(self, content: Mapping[str, Any]) -> None:
        """Read the keys of a config file."""
        for key, value in content.items():
            if value is None or value == []:
                continue
            name = self._find(str(key).replace("_", "-"))
            if name is None:
                self._unknown("setting", str(key))
            else:
                self._ask(name, value)

    def _long_form(self, head: str) -> str | None:
        """Return --name or --name.key for the text before `=`; None for an unknown short form."""
        name, dot, keys = head.partition(".")
        if name.startswith("--"):
            return f"--{name[2:].replace('_', '-')}{dot}{keys}"
        flag = self._vllm.by_short.get(name)
        return None if flag is None else f"--{flag.name}{dot}{keys}"

    def _read(self, flag: str, given: list[str] | None, words: deque[str]) -> None:
        """Read one flag, with the value after `=` or those that follow."""
        text, dot, keys = flag.removeprefix("--").partition(".")
        name = self._find(text) or self._begun(text)
        if name is None or (dot and self._kind(name.name) is not FlagKind.MAPPING):
            self._unknown("flag", flag)
            if given is None:
                _following(FlagKind.MANY, words)  # they are its values, and no models
            return
        kind = FlagKind.ONE if dot else self._kind(name.name)
        values = given if given is not None else _following(kind, words)
        if not values and kind not in (FlagKind.SWITCH, FlagKind.OPTIONAL):
            self.problems.append(f"{flag} needs a value")
        elif dot:
            self._ask(name, nested(keys, values[0]))
        elif kind is FlagKind.MANY:
            self.swallowed = flag if len(values) > 1 else self.swallowed
            self._ask(name, values)
        else:
            self._ask(name, values[0] if values else True)

    def _find(self, name: str) -> _Name | None:
        """Return the flag that a name means, and its value as a switch."""
        if name in self._vllm.by_name or name in self._fields:
            return _Name(name)
        for prefix, other in _OPPOSITES:
            positive = other + name.removeprefix(prefix)
            if name.startswith(prefix) and self._kind(positive) is FlagKind.SWITCH:
                return _Name(positive, on=False)
        found = self._find(name.removeprefix("no-")) if name.startswith("no-") else None
        return None if found is None or found.on else found._replace(on=True)

    def _begun(self, text: str) -> _Name | None:
        """Return the only flag with this beginning; argparse, and so vLLM, accepts that."""
        found = [name for name in self._names if name.startswith(text)]
        return _Name(found[0]) if len(found) == 1 else None

    def _kind(self, name: str) -> FlagKind | None:
        flag, field = self._vllm.by_name.get(name), self._fields.get(name)
        if field is None:
            return None if flag is None else kind_of_flag(flag)
        greedy = flag is not None and kind_of_flag(flag) in (FlagKind.MANY, FlagKind.OPTIONAL)
        return kind_of_flag(flag) if flag is not None and greedy else kind_of_field(field)

    def _model(self, word: str) -> None:
        if "model" in self.values:
            self.more_models.append(word)
        else:
            self.values["model"] = word

    def _ask(self, name: _Name, value: Any) -> None:
        """Record the value of one flag."""
        kind = self._kind(name.name)
        flag = self._vllm.by_name.get(name.name)
        try:
            if kind is FlagKind.SWITCH:
                value = truth(value) == name.on
            elif kind is FlagKind.MAPPING and (flag is None or flag.acted_on):
                known = mapping(value)
                value = self._known_keys(name.name, known) if known is not None else None
            elif kind in (FlagKind.REPEATED, FlagKind.MANY):
                value = names(value)
            if flag is not None and flag.kind == "BYTES":
                value = human_int(str(value)) / _GIB
        except ValueError as error:
            self.problems.append(f"--{name.name}: {error}")
            return
        shown = f"--{name.name}" if name.on else f"--no-{name.name}"
        self._decide(shown, name.name if flag is None else flag, value)

    def _known_keys(self, name: str, mapping: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of a mapping that the setting has; the table decides about others."""
        kept = {}
        for key, value in mapping.items():
            flag = self._vllm.by_name.get(f"{name}.{key}")
            if flag is None:
                kept[key] = value
            elif value is not None:  # null asks for nothing
                self._decide(f"--{flag.name}", flag, value)
        return kept

    def _decide(self, shown: str, flag: VllmFlag | str, value: Any) -> None:
        """Follow the table; a flag that it does not list is a setting."""
        if isinstance(flag, str):
            self._set(flag, value)
        elif flag.is_neutral(value):
            return
        elif flag.verdict is FlagSupport.NO_EFFECT or flag.is_idle(value):
            self.without_effect[shown] = flag.why
        elif flag.acted_on:
            self._set(flag.target, value)
        else:
            yet = " yet" if flag.verdict is FlagSupport.NOT_YET else ""
            self.problems.append(f"{shown} is not supported{yet}: {flag.why}")

    def _set(self, target: str, value: Any) -> None:
        setting, _, key = target.partition(".")
        setting = setting.replace("-", "_")
        if key:
            value = {key: scalar(value)}
        known = self.values.get(setting)
        if isinstance(value, dict) and isinstance(known, dict):
            value = merged(known, value)
        elif isinstance(value, list) and isinstance(known, list):
            value = known + value
        self.values[setting] = value

    def _unknown(self, what: str, name: str) -> None:
        if name in _FOREIGN:
            self.problems.append(f"unknown {what} '{name}': {_FOREIGN[name]}")
            return
        bare = name.removeprefix("--").removeprefix("-").removeprefix("no-").replace("_", "-")
        near = nearest(bare, self._names)
        dashes = "--" if what == "flag" else ""
        hint = f": did you mean {dashes}{near}?" if near else ""
        self.problems.append(f"unknown {what} '{name}'{hint}")


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and _NUMBER.fullmatch(word) is None


def _following(kind: FlagKind | None, words: deque[str]) -> list[str]:
    """Take the values of a flag from the words behind it."""
    if kind is FlagKind.SWITCH:
        return [words.popleft()] if words and words[0].lower() in TRUTH else []
    values: list[str] = []
    while words and not _is_flag(words[0]) and (kind is FlagKind.MANY or not values):
        values.append(words.popleft())
    return values


def nearest(name: str, names: Collection[str]) -> str | None:
    """Return the name that was probably meant; None if there is nothing like it."""
    near = difflib.get_close_matches(name, names, n=1)
    return near[0] if near else min((n for n in names if n.startswith(name)), key=len, default=None)
