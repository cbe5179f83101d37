"""The text side of a model: tokenizer, special tokens, chat template."""
