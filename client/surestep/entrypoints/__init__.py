"""Module names under which vLLM's start scripts find their server."""
