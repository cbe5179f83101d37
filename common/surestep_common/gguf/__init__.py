"""GGUF files: their header, and the model folder whose weights they are."""

from .folder import ModelPath, is_gguf, model_folder, weights_of
from .parts import whole_name

__all__ = ["ModelPath", "is_gguf", "model_folder", "weights_of", "whole_name"]
