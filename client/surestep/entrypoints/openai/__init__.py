"""vLLM's module names of its OpenAI server."""
