"""GGUF files: their header, and the model folder whose weights they are."""

from .folder import ModelPath, is_gguf, model_folder
from .parts import whole_name

__all__ = ["ModelPath", "is_gguf", "model_folder", "whole_name"]
