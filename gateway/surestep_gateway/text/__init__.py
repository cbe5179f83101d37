"""Tokenizer and chat templates of a model, and the processes where large texts are prepared."""
