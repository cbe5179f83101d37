"""The trainer of draft heads: what it computes, what it learns from, and that it can be stopped."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3 import training
from eagle3.conversations import ChatFormat, Sampling, Written, converse
from eagle3.files import Conversations, Parts, draft_vocabulary, save_head
from eagle3.head import Eagle3Head, HeadShape, initial_head
from eagle3.model import ModelParts
from eagle3.training import Plan, Trainer, Vocabularies, accepted, losses
from eagle3.writing import Observed, Writer
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import make_tiny_checkpoint
from support.parity.bench import HEAD, Neighbours, build_runner, load
from support.parity.proposals import proposals
from support.references.eagle3 import Eagle3Reference, captured_states
from surestep_worker.distributed.tensor_parallel import TensorParallel
from torch import Tensor
from train_eagle3 import main
from transformers import AutoModelForCausalLM

LAYERS = (1, 2, 4)
CHAT = ChatFormat([1, 5, 9], [2, 7], [2, 9], frozenset({2}), [[11], [12, 13]])
GREEDY = Sampling(0.0, 1.0)


def shape_of(width: int) -> HeadShape:
    return HeadShape(
        hidden_size=width,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        num_captured=3,
    )


def test_a_row_of_a_draft_step_is_that_of_the_definition() -> None:
    """Of every window: rows of the model first, then one for each draft, fed with the last one."""
    torch.manual_seed(0)
    shape, length, steps = shape_of(64), 9, 4
    head = Eagle3Head(shape)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    config = {
        **{key: getattr(shape, key) for key in ("hidden_size", "intermediate_size", "head_dim")},
        "vocab_size": 50,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 10_000.0,
    }
    reference = Eagle3Reference(
        config, 64, 3, draft_vocab=20, fc_norm=True, norm_before_residual=True
    )
    missing, unexpected = reference.load_state_dict(head.state_dict(), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    captured, embedded = torch.randn(1, length, 192), torch.randn(1, length, 64)
    with torch.no_grad():
        unrolled = list(head.unroll(captured, embedded, steps))
        first = reference.read(captured.unflatten(-1, (3, 64)).unbind(-2))
        for begin in range(length - steps):
            rows = first[:, : begin + 1]
            for step in range(steps):
                feedback = reference(rows, embedded[:, : begin + 1 + step])[:, -1:]
                made = unrolled[step][:, begin + step]
                torch.testing.assert_close(made, reference.norm(feedback)[:, 0])
                rows = torch.cat([rows, feedback], dim=1)


def test_turns_follow_the_template_and_answers_alone_count() -> None:
    for seed in range(40):
        story = converse(CHAT, random.Random(seed), GREEDY, answer_tokens=6)
        turn = next(story)
        assert tuple(turn.ids[:3]) == (1, 5, 9)
        assert turn.stops == {2}
        asked = [20, 21, 2] if seed % 2 else [20, 21, 22]  # ended, or cut off
        answer = story.send(asked)
        assert [*asked, *answer.ids] == [20, 21, *([] if seed % 2 else [22]), 2, 7]
        said = [*turn.ids, *asked, *answer.ids]
        with pytest.raises(StopIteration) as end:
            story.send([30, 31])  # an answer that did not end: nothing can follow
        assert end.value.value == Written([*said, 30, 31], [False] * len(said) + [True, True])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token depends on the newest one alone: a head can learn it soon."""
    folder = make_tiny_checkpoint(
        tmp_path_factory.mktemp("pair"),
        vocab=160,
        hidden=32,
        heads=2,
        kv_heads=1,
        intermediate=48,
        layers=4,
    )
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()
    weights["lm_head.weight"] *= 6  # so that it is sure of what it says
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def conversations(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Conversations:
    parts = Parts(tmp_path_factory.mktemp("work"), LAYERS)
    writer = Writer(pair, LAYERS, slots=12, device="cpu")
    for observed in writer.write(CHAT, Sampling(0.8, 0.95), 40, seed=0):
        parts.add(observed)
        if parts.tokens() > 5_000:
            break
    return parts.read()


@torch.no_grad()
def test_states_are_those_of_the_model(pair: Path, conversations: Conversations) -> None:
    target = AutoModelForCausalLM.from_pretrained(pair, dtype=torch.float32)
    for observed in conversations.held_out[:3]:
        ids = torch.tensor([observed.written.ids])
        states = torch.cat(captured_states(target, ids, LAYERS), dim=-1)[0]
        # The last token has been drawn, and not been read.
        torch.testing.assert_close(observed.captured[:-1], states[:-1], atol=1e-4, rtol=1e-3)
        logits = target.lm_head(observed.hidden[:-1])
        torch.testing.assert_close(logits, target(ids).logits[0, :-1], atol=1e-4, rtol=1e-3)


def trained(
    pair: Path, conversations: Conversations, folder: Path, plan: Plan, **options: Any
) -> tuple[Eagle3Head, Vocabularies]:
    """A head, from a checkpoint in the folder if there is one."""
    parts = ModelParts.read(pair)
    ids = draft_vocabulary(conversations.train, 150, parts.config.vocab_size)
    vocabularies = Vocabularies.of(parts.embedding, parts.lm_head, ids, "cpu")
    torch.manual_seed(1)
    head = initial_head(shape_of(32), parts.weights, parts.config.num_layers - 1, 0.1)
    Trainer(head, plan, folder / "checkpoint.pt").train(
        conversations.train, vocabularies, lambda line: None, **options
    )
    return head, vocabularies


PLAN = Plan(2.0, draft_steps=3, batch_tokens=512, learning_rate=2e-2, seed=0, device="cpu")


def test_what_is_learnt_is_drafted_by_our_engine(
    pair: Path, conversations: Conversations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses fall, and of the drafts more are right, by the trainer's count and in the worker."""
    shares, right, last = list[float](), list[float](), list[list[float]]()
    for epochs in (0.01, 6.0):
        folder = tmp_path / str(epochs)
        folder.mkdir()
        head, vocabularies = trained(pair, conversations, folder, PLAN._replace(epochs=epochs))
        batch = training.Batch.of(conversations.held_out, "cpu")
        with torch.no_grad():
            last.append([x.item() for x in losses(head, batch, vocabularies, 3)])
        shares.append(accepted(head, conversations.held_out, vocabularies, 3, 512, "cpu")[0])
        right.append(_right_in_worker(pair, head, vocabularies, folder, monkeypatch))
    assert all(after < before - 0.3 for before, after in zip(*last, strict=True))
    assert shares[1] > shares[0] + 0.1
    assert right[1] > right[0] + 0.1


def _right_in_worker(
    pair: Path,
    head: Eagle3Head,
    vocabularies: Vocabularies,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> float:
    """Share of first drafts that are what the model says next."""
    for file in pair.glob("*.*"):
        shutil.copy(file, folder)
    save_head(
        folder / HEAD,
        head,
        vocabularies.token_ids,
        LAYERS,
        160,
        vocabularies.lm_head,
        max_position=512,
    )
    tp = TensorParallel()
    where = Neighbours(num_slots=4, step_tokens=24, max_model_len=160)
    built = build_runner(load(folder, tp), tp, where, "eagle3", 3)
    with monkeypatch.context() as patch:
        made, _ = proposals(built, patch)
    target = AutoModelForCausalLM.from_pretrained(pair, dtype=torch.float32)
    right = 0
    for known, drafts in made:
        with torch.no_grad():
            right += int(target(torch.tensor([known])).logits[0, -1].argmax()) == drafts[0]
    return right / len(made)


def test_a_training_that_was_stopped_goes_on_as_if_it_had_not_been(
    pair: Path, conversations: Conversations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_CHECKPOINT_S", 0.0)
    plan = PLAN._replace(epochs=0.3)
    (tmp_path / "whole").mkdir()
    whole, _ = trained(pair, conversations, tmp_path / "whole", plan)

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(pair, conversations, tmp_path, plan, pause=stop)
    continued, _ = trained(pair, conversations, tmp_path, plan)
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(continued.state_dict()[name], weight, msg=name)


def test_only_the_likeliest_token_and_right_windows_count() -> None:
    """Of a head that drafts the true tokens but for one place: windows over it end before it."""
    length, wrong = 10, 5
    ids = list(range(3, 3 + length))
    observed = Observed(
        Written(ids, [True] * length), torch.zeros(length, 4), torch.zeros(length, 4)
    )
    table = torch.eye(16)
    vocabularies = Vocabularies.of(table, table, torch.arange(16), "cpu")

    class Oracle:
        def unroll(self, captured: Tensor, embedded: Tensor, steps: int) -> Any:
            told = torch.tensor([ids[2:]])
            told[0, wrong] = 0
            yield from [table[told]] * steps

    shares = accepted(Oracle(), [observed], vocabularies, 3, 100, "cpu")  # type: ignore[arg-type]
    windows = length - 2
    assert shares == pytest.approx([7 / windows, 5 / windows, 3 / windows])


def test_frequent_tokens_are_drafted(conversations: Conversations) -> None:
    ids = draft_vocabulary(conversations.train, 20, 160)
    assert ids.tolist() == sorted(set(ids.tolist()))
    said = [
        i
        for each in conversations.train
        for i, answered in zip(*each.written, strict=True)
        if answered
    ]
    counts = torch.bincount(torch.tensor(said), minlength=160)
    others = [i for i in range(160) if i not in ids]
    assert counts[ids].min() >= counts[others].max()


def test_the_command_takes_up_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_checkpoint(tmp_path / "model", layers=5, tie=True, tokenizer=True)
    words = [str(tmp_path / "model"), str(tmp_path / "head"), "--work", str(tmp_path / "work")]
    words += ["--slots", "8", "--answer-tokens", "30", "--epochs", "0.5", "--draft-vocab", "300"]
    main([*words, "--tokens", "3000", "--write-only"])
    assert "tokens written" in capsys.readouterr().out
    assert not (tmp_path / "head").exists()
    main([*words, "--tokens", "3000"])  # nothing more is written
    said = capsys.readouterr().out
    assert "written" not in said
    assert "losses" in said
    assert {path.name for path in (tmp_path / "head").iterdir()} == {
        "config.json", "model.safetensors", "README.md"
    }  # fmt: skip
    before = load_file(tmp_path / "head" / "model.safetensors")
    words[1] = str(tmp_path / "next")
    main([*words, "--work", str(tmp_path / "more"), "--tokens", "3000", "--write-only"])
    again = ["--start", str(tmp_path / "head"), "--learning-rate", "0"]
    main([*words, "--work", str(tmp_path / "more"), "--train-only", *again])
    after = load_file(tmp_path / "next" / "model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in before.keys() - {"d2t"})
    with pytest.raises(ValueError, match="--layers"):
        main([*words, "--layers", "1", "2"])
