"""`surestep serve --help`: the settings in sections, as they are declared."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from .flag_values import FlagKind, kind_of_field, kind_of_flag, types_of
from .sections import SECTIONS
from .vllm_flags import FlagSupport, VllmFlag, vllm_flags

_INTRODUCTION = """\
Usage: surestep serve [MODEL] [FLAG ...]

Serve a model over HTTP with gateway, scheduler and workers on this machine. Flags are those of
vLLM's `serve` where it has them. Each flag --some-flag is also the variable SURESTEP_SOME_FLAG and
the key some-flag of the YAML file that --config names. Flags beat variables, variables the file.
"""
_MORE = """\
--help=SECTION shows one section, --help=WORD the flags with that word in their names, --help=all
also what becomes of the flags that vLLM has and we do not. Lists take several values, or commas;
JSON may be given as --flag.key VALUE; numbers of tokens and bytes may end in k, m, g (thousands) or
K, M, G (of 1024).
"""
_COLUMN = 34
_UNITS = {  # what a value is, by the end of the setting's name
    "_s": "SECONDS",
    "_memory": "GiB",
    "_bytes": "BYTES",
    "_rate": "BYTES",
    "_utilization": "FRACTION",
    "_listen": "HOST:PORT",
    "_master": "HOST:PORT",
    "_url": "HOST:PORT",
    "_addresses": "HOST:PORT",
}
_MULTIPLES = ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K"))
_AS_MULTIPLE = 1 << 16  # numbers from here on are shown as so many K, M or G
_TYPES = {bool: "", int: "INT", float: "NUMBER", Path: "PATH", dict: "JSON"}
_VERDICTS = {
    FlagSupport.RENAMED: "Flags of vLLM that go by another name here",
    FlagSupport.NO_EFFECT: "Flags of vLLM without effect here: accepted, with a warning",
    FlagSupport.NOT_YET: "Flags of vLLM that are not supported yet: refused",
    FlagSupport.NEVER: "Flags of vLLM that will not be supported: refused",
}


def help_text(cls: type[BaseModel], topic: str | None, width: int) -> str:
    """Return all of it, or what it has about a topic: a section, `all`, or a part of names."""
    width, fields = max(width, 60), cls.model_fields
    if topic is None or topic.lower() == "all":
        parts = [_INTRODUCTION, *(_section(name, fields, width) for name in SECTIONS), _MORE]
        if topic is not None:
            parts[-1:-1] = [_vllm_section(verdict, width) for verdict in _VERDICTS]
        return "\n".join(parts)
    word = topic.lower().replace("_", "-")
    for name in SECTIONS:
        if name.lower() == word:
            return _section(name, fields, width)
    found = [name for names in SECTIONS.values() for name in names if word in _flag(name)]
    others = [f for f in vllm_flags().by_name.values() if word in f.name and not _is_ours(f)]
    if not (found or others):
        return f"No section and no flag is called {topic!r}. Sections: {', '.join(SECTIONS)}.\n"
    lines = [entry(*declared(name, fields[name]), width) for name in found if name in fields]
    return "".join([*lines, *(entry(_usage(flag), _fate(flag), width) for flag in others)])


def _section(name: str, fields: Mapping[str, FieldInfo], width: int) -> str:
    known = [each for each in SECTIONS[name] if each in fields]
    return f"{name}\n" + "".join(entry(*declared(each, fields[each]), width) for each in known)


def _vllm_section(verdict: FlagSupport, width: int) -> str:
    flags = [flag for flag in vllm_flags().by_name.values() if flag.verdict is verdict]
    entries = (entry(_usage(flag), _fate(flag), width) for flag in flags)
    return f"{_VERDICTS[verdict]}\n" + "".join(entries)


def entry(usage: str, text: str, width: int) -> str:
    indent = " " * _COLUMN
    lines = textwrap.wrap(text, width - _COLUMN, break_on_hyphens=False) or [""]
    head = f"  {usage}"
    first = (
        f"{head:<{_COLUMN}}{lines[0]}" if len(head) < _COLUMN - 1 else f"{head}\n{indent}{lines[0]}"
    )
    return "".join(f"{line}\n" for line in [first, *(indent + line for line in lines[1:])])


def declared(name: str, field: FieldInfo) -> tuple[str, str]:
    """Return how a setting is written, and its description."""
    default = "on" if field.default is True else typed_default(field)
    told = f" (default: {default})" if default is not None else ""
    return usage(name, field), (field.description or "") + told


def usage(name: str, field: FieldInfo) -> str:
    """Return how a setting is written: short forms, flag, and the placeholder of its value."""
    flag = vllm_flags().by_name.get(_flag(name))
    value = metavar(name, field)
    if flag is not None and kind_of_flag(flag) is FlagKind.MANY:
        value += " ..."
    shorts = flag.shorts if flag is not None else ()
    long_form = f"--[no-]{_flag(name)}" if field.default is True else f"--{_flag(name)}"
    return f"{', '.join([*shorts, long_form])} {value}".rstrip()


def typed_default(field: FieldInfo) -> str | None:
    """Return the default as one would type it; None for switches and where there is none."""
    default = field.default
    if isinstance(default, SecretStr):  # what may hold a password is none until it is set
        default = default.get_secret_value()
    if field.is_required() or field.default_factory is not None:
        return None
    if isinstance(default, bool) or default in (None, "", (), []):
        return None
    if isinstance(default, tuple | list):
        return ",".join(map(str, default))
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, int) and default >= _AS_MULTIPLE:
        for size, suffix in _MULTIPLES:
            if default % size == 0:
                return f"{default // size}{suffix}"
    return str(default)


def metavar(name: str, field: FieldInfo) -> str:
    """Return the placeholder of a setting's value in its help; empty for a switch."""
    kind = kind_of_field(field)
    if kind is FlagKind.SWITCH:
        return ""
    if kind is FlagKind.MAPPING:
        return "JSON"
    if choices := _choices(field.annotation):
        own = typed_default(field)  # which may stand for one of them
        first = [own] if own is not None and own not in choices else []
        return "{" + ",".join([*first, *map(str, choices)]) + "}"
    ends = (unit for end, unit in _UNITS.items() if name.endswith(end))
    plain = (_TYPES[one] for one in types_of(field.annotation) if one in _TYPES)
    return next(ends, None) or next(plain, None) or "NAME"


def _choices(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((found for part in get_args(annotation) if (found := _choices(part))), ())


def _usage(flag: VllmFlag) -> str:
    return f"{', '.join([*flag.shorts, f'--{flag.name}'])} {flag.kind}".rstrip()


def _fate(flag: VllmFlag) -> str:
    return flag.why or f"--{flag.target}"


def _is_ours(flag: VllmFlag) -> bool:
    return flag.verdict is FlagSupport.SAME


def _flag(name: str) -> str:
    return name.replace("_", "-")
