"""A checkpoint whose answers are known: scripts as weights, served like any other model.

The next token is looked up by the last one (a bigram table in the output head), so that after the
token that the chat template ends with the answer is certain at any temperature: a tool call, JSON,
a report of what a tool said. Small talk has several words to choose from at each place. A few
layers with random weights disturb the table a little: log-probabilities depend on the whole prompt,
as anywhere. The layers are Llama's, or those of Qwen3.5: of every four the first three are recurrent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from support.checkpoints.hybrid import add_mtp
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PretrainedConfig,
    TokenizersBackend,
)
from transformers.models.qwen3_5 import Qwen3_5TextConfig

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
EOS_ID = 2
MAX_POSITION = 131_072
_WORDS = 1_500  # of a corpus
# By the token that the prompt ends with; whole texts are pieces in a row, each of them one token.
SCRIPTS = {
    "<|call|>": (
        '<tool_call>\n{"name": "get_weather", ',
        *('"arguments": {"city": ', '"Oslo", ', '"days": 2}}', "\n</tool_call>"),
    ),
    "<|report|>": ("It is ", "3 degrees ", "in Oslo."),
    "<|finish|>": (
        '<tool_call>\n{"name": "final_answer", ',
        *('"arguments": {"answer": ', '"3 degrees"}}\n', "</tool_call>\n"),
    ),
    "<|person|>": (
        '<tool_call>\n{"name": "Person", ',
        *('"arguments": {"name": "Ada", ', '"age": 36}}\n</tool_call>'),
    ),
    "<|json|>": ("```json\n", '{"name": ', '"Ada", ', '"age": ', "36}", "\n```"),
    "<|code|>": (
        *("Thought: I ask for ", "the weather.\n<code>\n"),
        *('final_answer(get_weather("Oslo", 2))', "\n</code>"),
    ),
}
# A grammar has what is certain spelled byte by byte, as no script is. A call goes on behind the last
# of these bytes, with what fits there.
FORCED = {" ": ('"Oslo", ', "2}}"), ">": (SPECIAL[EOS_ID],)}
TALK = "<|talk|>"
SENTENCE = (
    ("The", "Our", "One", "Each", "Some", "This"),
    (" quiet", " old", " small", " proud", " clever", " sleepy"),
    (" fox", " bird", " baker", " sailor", " child", " cat"),
    (" saw", " found", " followed", " painted", " forgot", " heard"),
    (" many", " two", " no", " seven", " few", " all"),
    (" rivers", " clouds", " letters", " bridges", " clocks", " songs"),
    (" today.", " again.", " slowly.", " outside.", " together.", " at night."),
)
STORY = "<|story|>"  # has no end
STORY_WORDS = (("and ", "or ", "so "), ("then ", "now "), ("it rained ", "it snowed ", "it blew "))

TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if tools %}tools: {{ tools | tojson }}
{% endif -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% set names = tools | map(attribute='function.name') | list if tools else [] -%}
{%- set text = messages | map(attribute='content') | select | join(' ') -%}
{%- set last = messages[-1].content or '' -%}
{%- set observed = messages[-1].role == 'tool' or 'Observation:' in last -%}
{%- if 'final_answer' in names and observed -%}<|finish|>
{%- elif observed -%}<|report|>
{%- elif 'Person' in names -%}<|person|>
{%- elif names -%}<|call|>
{%- elif '<code>' in text -%}<|code|>
{%- elif 'story' in last -%}<|story|>
{%- elif 'JSON' in text -%}<|json|>
{%- else -%}<|talk|>
{%- endif -%}
{%- endif -%}
"""
# Of the head: the first two beat all noise, the third most of it.
_SHARP, _SECOND, _LEANING = 2.0, 1.0, 0.4
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def text_of(script: str) -> str:
    """What the model answers when its prompt ends with `script`."""
    return "".join(SCRIPTS[script])


def make_scripted_checkpoint(
    folder: Path,
    scripts: Mapping[str, Sequence[str]] = SCRIPTS,
    template: str = TEMPLATE,
    corpus: Sequence[str] = (),
    family: str = "llama",
) -> Path:
    """Write weights and tokenizer in Hugging Face format; returns `folder`.

    Text is read byte by byte, or by the words of a `corpus`, which keep long prompts short.
    """
    tokenizer = _tokenizer(scripts, corpus)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    hidden = -(-len(vocab) // 32) * 32  # a direction for each token
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(FAMILIES[family](len(vocab), hidden))
    disturbance = (
        0.1 * (2 / model.config.num_hidden_layers) ** 0.5
    )  # as much by any number of layers
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.eye(len(vocab), hidden))
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                weight.mul_(disturbance)
            elif name.endswith("A_log"):  # slow decay, so that the state of long ago matters
                weight.uniform_(0.01, 0.5).log_()
        head = model.lm_head.weight.normal_(0.0, 0.1)
        for before, after, weight in _transitions(scripts):
            followers = [vocab[one] for text in after if (one := _spelled(text)) in vocab]
            for token in before:
                head[followers, vocab[_spelled(token)]] += weight
    model.save_pretrained(folder)
    if family == "hybrid":  # its MTP head drafts what follows by the same table
        sees = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
        add_mtp(folder, 0.1 * hidden**-0.5, reads=sees)
    TokenizersBackend(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[EOS_ID],
        pad_token=SPECIAL[0],
        model_max_length=MAX_POSITION,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    return folder


def _llama(vocab: int, hidden: int) -> PretrainedConfig:
    return LlamaConfig(num_hidden_layers=2, **_sizes(vocab, hidden))


def _hybrid(vocab: int, hidden: int) -> PretrainedConfig:
    return Qwen3_5TextConfig(
        num_hidden_layers=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        **_sizes(vocab, hidden),
    )


def _sizes(vocab: int, hidden: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 64,
        "max_position_embeddings": MAX_POSITION,
        "tie_word_embeddings": False,
        "initializer_range": hidden**-0.5,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
    }


FAMILIES: dict[str, Callable[[int, int], PretrainedConfig]] = {"llama": _llama, "hybrid": _hybrid}


def write_loglikelihoods(folder: Path, scored: Mapping[str, Sequence[str]], name: str) -> None:
    """What transformers says of continuations: to JSON, by prompt, in their order."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def loglikelihood(prompt: str, continuation: str) -> float:
        prompt_len = len(tokenizer(prompt).input_ids)
        ids = torch.tensor(tokenizer(prompt + continuation).input_ids)
        with torch.inference_mode():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
        return float(logprobs[:-1].gather(1, ids[1:, None])[prompt_len - 1 :].sum())

    found = {prompt: [loglikelihood(prompt, text) for text in scored[prompt]] for prompt in scored}
    (folder / name).write_text(json.dumps(found))


def _transitions(
    scripts: Mapping[str, Sequence[str]],
) -> Iterator[tuple[Sequence[str], Sequence[str], float]]:
    """Tokens, what may follow each of them, and how surely."""
    end = [SPECIAL[EOS_ID]]
    for script, pieces in scripts.items():
        chain = [[script], *([piece] for piece in pieces), end]
        yield from ((before, after, _SHARP) for before, after in pairwise(chain))
    yield from ((*pair, _SHARP) for pair in pairwise([[TALK], *SENTENCE, end]))
    yield from ((*pair, _SHARP) for pair in pairwise([[STORY], *STORY_WORDS, STORY_WORDS[0]]))
    # A string of JSON, where a grammar bars the end.
    yield SENTENCE[-1], ['"'], _SECOND
    # JSON without a fence, where a grammar bars the fence.
    yield ["<|json|>"], [SCRIPTS["<|json|>"][1]], _SECOND
    yield [SCRIPTS["<|json|>"][-2]], end, _SECOND
    yield from (([_spelled(byte)], after, _SHARP) for byte, after in FORCED.items())
    # Texts without template, and answers that have to go on after their end.
    yield end, SENTENCE[0], _SHARP
    yield sorted(pre_tokenizers.ByteLevel.alphabet()), SENTENCE[0], _LEANING


def _spelled(text: str) -> str:
    """As byte-level tokenizers spell it in their vocabulary."""
    if text.startswith("<|") or text in pre_tokenizers.ByteLevel.alphabet():
        return text
    return "".join(piece for piece, _ in _BYTES.pre_tokenize_str(text))


def _tokenizer(scripts: Mapping[str, Sequence[str]], corpus: Sequence[str]) -> Tokenizer:
    """No merge leads to the pieces of a script, which are only written."""
    markers = (*SPECIAL, *scripts, TALK, STORY)
    pieces = [piece for script in scripts.values() for piece in script]
    words = [word for place in (*SENTENCE, *STORY_WORDS) for word in place]
    written = [_spelled(text) for text in (*pieces, "2}}", *words)]
    assert len(set(written)) == len(written), "each token has one place in one script"
    read, merges = _read_words(corpus)
    spellings = dict.fromkeys((*markers, *read, *written))
    vocab = {spelling: id_ for id_, spelling in enumerate(spellings)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
    return tokenizer


def _read_words(corpus: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens that a text is read as, and how they are merged: bytes, and words of a corpus."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if not corpus:
        return alphabet, []
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=_WORDS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return sorted({*alphabet, *tokenizer.get_vocab()}), [tuple(pair) for pair in merges]
