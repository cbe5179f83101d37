"""A small byte-level BPE tokenizer with a chat template, as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, UNK = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL = (UNK, BOS, EOS)  # ids 0, 1, 2
EOS_ID = 2
VOCAB_SIZE = 400

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# What templates of the Qwen3 family do: list the tools, begin the reasoning or leave it out, and
# go through the arguments of earlier calls.
THINKING_TEMPLATE = (
    "{% if tools %}{{ 'tools ' + tools | map(attribute='function.name') | join(',') + '\\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}"
    "{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls %}{{ '[' + call.function.name }}"
    "{% for key, value in call.function.arguments | items %}{{ ' ' + key + '=' + value | tojson }}"
    "{% endfor %}{{ ']' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)

# What DeepSeek's templates do: calls are put together from texts, where there is no content.
JOINING_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is none %}{% for call in message['tool_calls'] %}"
    "{{ '[' + call['function']['name'] + ' ' + call['function']['arguments'] + ']' }}"
    "{% endfor %}{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>' }}{% endif %}"
)

_CORPUS = (
    "the quick brown fox jumps over the lazy dog and the dog sleeps on the warm stone",
    "speculation never changes a token, whatever the draft says and however long it is",
    "user assistant system hello world stop here one two three four five six seven eight",
    "Grüße, привет, 你好, こんにちは, naïve café",
) * 8


def build(*markers: str) -> Tokenizer:
    """The same tokenizer every time; `markers` become further special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True) for token in (*SPECIAL, *markers)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def save(folder: Path, *markers: str, template: str = CHAT_TEMPLATE) -> Path:
    """Write tokenizer.json and tokenizer_config.json; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    build(*markers).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": UNK,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return folder
