"""OpenAI's Responses API, and the responses that outlive their requests."""
