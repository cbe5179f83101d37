"""GGUF files: their header, and the model folder whose weights they are."""

from .folder import is_gguf, model_folder

__all__ = ["is_gguf", "model_folder"]
