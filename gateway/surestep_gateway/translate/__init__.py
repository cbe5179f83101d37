"""Requests of OpenAI's Responses API and of Anthropic's Messages API, as requests of chats."""
