"""OpenAI's chats and completions: routes, bodies of answers, token counts."""
