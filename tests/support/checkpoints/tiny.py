"""Tiny random checkpoints in Hugging Face format, made by transformers itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, TokenizersBackend

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
EOS_TOKEN_ID = 2
MIN_TOKENIZER_VOCAB = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = (
    "the quick brown fox jumps over the lazy dog and the dog sleeps in the sun",
    "you are a helpful assistant that answers the question of the user in one sentence",
    "system user assistant tool what is the name of the capital and how many are there",
)


def make_tiny_checkpoint(
    path: Path,
    family: str = "llama",
    *,
    vocab: int = 384,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 96,
    max_position: int = 512,
    tie: bool = False,
    eos_token_ids: Sequence[int] = (EOS_TOKEN_ID,),
    tokenizer: bool = False,
    seed: int = 0,
    initializer_range: float = 0.2,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "50GB",
    fused: bool = False,
    **config: Any,
) -> Path:
    """Write config, weights, generation config and, if asked for, a tokenizer; returns `path`.

    The default range of the weights makes peaky logits, so that greedy text neither repeats one
    token nor hangs on rounding. Biases and norms are random too: at their usual 0 and 1 a loader
    that dropped them would pass. Experts are `fused` in two tensors, or published one by one. Further `config` fields go to transformers as they are.
    """
    parameters = AutoConfig.for_model(
        family,
        vocab_size=vocab,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=config.pop("head_dim", hidden // heads),
        intermediate_size=intermediate,
        max_position_embeddings=max_position,
        tie_word_embeddings=tie,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=list(eos_token_ids),
        pad_token_id=None,
        **config,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(parameters, dtype=torch.float32)
    usual = 0.0 if family.startswith("gemma") else 1.0  # of a norm's weights
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(usual if name.endswith("norm.weight") else 0.0, 0.2)
    how: dict[str, Any] = {"max_shard_size": max_shard_size, "save_original_format": not fused}
    model.to(dtype).save_pretrained(path, **how)
    if tokenizer:
        make_tiny_tokenizer(path, vocab, max_position)
    return path


def make_tiny_tokenizer(path: Path, vocab: int, max_length: int) -> TokenizersBackend:
    """Write a byte-level BPE tokenizer of at most `vocab` tokens with a ChatML template."""
    assert vocab >= MIN_TOKENIZER_VOCAB, f"{MIN_TOKENIZER_VOCAB} tokens are the least"
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS, trainer)
    tokenizer = TokenizersBackend(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=max_length,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(path)
    return tokenizer
