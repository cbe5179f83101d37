"""Grammars' processes: what they answer, what ends them, and who is refused for it."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import psutil
import pytest
from llguidance import LLMatcher
from support.checkpoints import ascii_tokenizer
from support.hostile_grammars import costly_to_compile, costly_to_follow
from support.parity.grammars import OBJECT
from surestep_common.errors import InvalidRequest, Unavailable, UnsupportedParameter
from surestep_proto import sampling_pb2 as pb
from surestep_worker.grammar import compiler as compiler_module
from surestep_worker.grammar import table as table_module
from surestep_worker.grammar.compiler import MAX_CACHED_GRAMMARS, Compiler, Process
from surestep_worker.grammar.table import GrammarTable
from surestep_worker.grammar.walk import allows
from surestep_worker.grammar.window import Ask, Window
from tokenizers import Tokenizer

pytestmark = pytest.mark.timeout(300)
VOCAB, EOS = 160, 2
TIMEOUT_S = 200.0
REGEX = LLMatcher.grammar_from_regex


@pytest.fixture(autouse=True)
def others_may_have_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge by processor time: tests of others may leave none for a minute."""
    monkeypatch.setattr(compiler_module, "_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(table_module, "_TIMEOUT_S", TIMEOUT_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ascii_tokenizer.save(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def compiler(folder: Path) -> Compiler:
    return Compiler(folder / "tokenizer.json", VOCAB, [EOS])


@pytest.fixture(scope="module")
def spell(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture
def table(compiler: Compiler) -> Iterator[GrammarTable]:
    table = GrammarTable(VOCAB, compiler)
    yield table
    for slot in range(4):
        table.free(slot)


def ids_of(spell: Tokenizer, text: str) -> list[int]:
    ids: list[int] = spell.encode(text).ids
    return ids


def request(source: str, *begins_after: int) -> pb.SamplingParams:
    grammar = pb.Grammar(source=source, begins_after=begins_after)
    return pb.SamplingParams(grammar=grammar, stop_token_ids=[EOS])


def window(
    table: GrammarTable, slot: int, emitted: Sequence[int], proposed: Sequence[int] = ()
) -> Window:
    return table.windows({slot: Ask(emitted, proposed, 8)})[slot]


def assert_same(one: Window, other: Window) -> None:
    """As far as both were drafted in their time."""
    assert one.fault == other.fault
    assert all(a == b for a, b in zip(one.drafts, other.drafts, strict=False))
    assert all(np.array_equal(a, b) for a, b in zip(one.masks, other.masks, strict=False))


def pid_of(process: Process) -> int:
    info = Path(f"/proc/self/fdinfo/{process._pidfd}").read_text()
    return int(info.partition("Pid:")[2].split()[0])


def compiled(compiler: Compiler, source: str) -> Process:
    return compiler.start(source).result(TIMEOUT_S)


def test_a_grammar_is_compiled_once_and_the_oldest_are_given_up(compiler: Compiler) -> None:
    first = compiled(compiler, REGEX("first"))
    for i in range(MAX_CACHED_GRAMMARS - 1):
        compiled(compiler, REGEX(f"another{i}"))
    assert compiled(compiler, REGEX("first")) is first
    for i in range(MAX_CACHED_GRAMMARS):
        compiled(compiler, REGEX(f"more{i}"))
    assert compiled(compiler, REGEX("first")) is not first


def test_no_owner_finds_what_another_had_compiled(compiler: Compiler) -> None:
    def of(owner: str) -> Process:
        return compiler.start(OBJECT, owner).result(TIMEOUT_S)

    first = of("one")
    assert of("one") is first
    assert of("other") is not first
    assert of("") is not first


def test_wrong_grammars_are_refused_in_one_line(compiler: Compiler) -> None:
    for _ in range(2):  # the second time nobody looks
        with pytest.raises(InvalidRequest, match="missing") as refused:
            compiled(compiler, "start: missing")
        assert refused.value.param == "grammar"
        assert "\n" not in refused.value.message


def test_a_tokenizer_that_does_not_fit_is_named(folder: Path) -> None:
    compiler = Compiler(folder / "tokenizer.json", VOCAB - 40, [EOS])
    with pytest.raises(UnsupportedParameter, match="tokenizer cannot be used"):
        compiled(compiler, REGEX("a"))


def test_a_grammar_that_takes_too_long_ends_alone_and_is_known(compiler: Compiler) -> None:
    hostile = [compiler.start(costly_to_compile(seed)) for seed in range(2)]
    honest = [compiler.start(REGEX(f"honest{i}")) for i in range(3)]
    assert all(future.result(TIMEOUT_S).connection for future in honest)
    assert not any(future.done() for future in hostile)
    for future in hostile:
        with pytest.raises(InvalidRequest, match=r"processor time to compile|more memory"):
            future.result(TIMEOUT_S)
    with pytest.raises(InvalidRequest, match=r"processor time|more memory"):
        assert compiler.start(costly_to_compile(0)).result(0)


def test_a_compilation_that_nobody_waits_for_any_more_is_dropped(compiler: Compiler) -> None:
    source = costly_to_compile(2)
    first, second = compiler.start(source), compiler.start(source)
    while (process := compiler._jobs["", source].process) is None:
        time.sleep(0.01)
    pid = pid_of(process)
    first.cancel()
    assert psutil.pid_exists(pid)
    assert not second.done()
    second.cancel()
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=TIMEOUT_S)
    assert ("", source) not in compiler._jobs


def test_a_process_that_is_killed_while_it_compiles_is_replaced(compiler: Compiler) -> None:
    source = costly_to_compile(3)
    future: Future[Process] = compiler.start(source)
    while (first := compiler._jobs["", source].process) is None:
        time.sleep(0.01)
    first.kill()
    with pytest.raises(InvalidRequest, match=r"processor time|more memory"):
        future.result(TIMEOUT_S)


def test_the_process_with_the_tokenizer_is_replaced(compiler: Compiler) -> None:
    follows = compiled(compiler, REGEX("before"))
    template = psutil.Process(pid_of(follows)).parent()
    assert template is not None
    template.kill()
    assert pid_of(compiled(compiler, REGEX("after")))
    assert compiled(compiler, REGEX("before")) is follows  # and what was there goes on


def test_without_files_there_is_no_process_for_a_while(folder: Path) -> None:
    fresh = Compiler(folder / "tokenizer.json", VOCAB, [EOS])  # nothing is open yet
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Fewer than are open: numbers may have gaps, and as many as are open would leave those.
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(Unavailable, match=r"no process for it: .*Too many open files"):
            fresh.start(REGEX("a")).result(TIMEOUT_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert compiled(fresh, REGEX("a"))


def test_a_state_is_a_function_of_the_tokens(table: GrammarTable, spell: Tokenizer) -> None:
    """However they come: one by one, in windows, or all at once after a loss."""
    ids = ids_of(spell, '{"name":"Ada","age":3')
    for slot in (0, 1):
        table.admit(slot, request(OBJECT), prompt_len=4)
    for i in range(len(ids) + 1):
        table.admit(2, request(OBJECT), prompt_len=9)
        assert table.upto(2) == 9
        at_once = window(table, 2, ids[:i])
        assert table.upto(2) == 9 + i
        one_by_one = window(table, 0, ids[i - 1 : i] if i else [])
        assert_same(at_once, one_by_one)
        if i % 3 == 0:
            assert_same(window(table, 1, ids[max(i - 3, 0) : i]), at_once)
        if i % 4 == 0:  # what it knew is told again to the next one
            process = table._tenants[0].process
            assert process is not None
            os.kill(pid_of(process), signal.SIGKILL)


def test_tokens_that_do_not_belong_to_the_grammar_are_its_fault(
    table: GrammarTable, spell: Tokenizer
) -> None:
    """A client may resume with whatever it likes: that request fails, and no other."""
    table.admit(0, request(OBJECT), prompt_len=4)
    table.admit(1, request(OBJECT), prompt_len=4)
    found = window(table, 0, ids_of(spell, "beta"), [5])
    assert "does not belong to it" in found.fault
    assert found.drafts == []
    assert not any(allows(found.masks[0], token) for token in range(VOCAB))
    assert "does not belong to it" in window(table, 0, [5], [5]).fault  # and stays so
    assert not window(table, 1, []).fault


def test_a_grammar_that_exceeds_a_limit_is_at_fault(
    compiler: Compiler, table: GrammarTable, spell: Tokenizer
) -> None:
    """Steps show it, where there are more ways on than may be kept."""
    keys = {f"k{i}": {"type": "string"} for i in range(20)}
    variants = [{"type": "object", "properties": keys, "required": [f"k{i}"]} for i in range(200)]
    hostile = request(LLMatcher.grammar_from_json_schema({"anyOf": variants}))
    compiled(compiler, hostile.grammar.source)  # finds nothing wrong with it
    table.admit(0, hostile, prompt_len=1)
    faults = [window(table, 0, [token]).fault for token in ids_of(spell, '{"k1":')]
    assert any("max is" in fault for fault in faults)
    assert "\n" not in faults[-1]


def test_a_step_that_takes_too_long_ends_its_grammar_alone(
    compiler: Compiler, table: GrammarTable, spell: Tokenizer
) -> None:
    source, leads_there = costly_to_follow()
    compiled(compiler, source)
    table.admit(0, request(source), prompt_len=1)
    table.admit(1, request(OBJECT), prompt_len=1)
    assert not window(table, 0, []).fault
    both = table.windows({0: Ask(ids_of(spell, leads_there), [], 0), 1: Ask([], [], 8)})
    assert "processor time to say what may come next" in both[0].fault
    assert (both[1].fault, both[1].num_forced > 0) == ("", True)


def test_ranks_that_follow_nothing_compile_nothing() -> None:
    table = GrammarTable(VOCAB, None, "not served: no tokenizer")
    table.admit(2, request(OBJECT), prompt_len=1)
    table.free(2)
    table.free(2)
    with pytest.raises(UnsupportedParameter, match="no tokenizer"):
        table.compile(pb.Grammar(source=OBJECT))
