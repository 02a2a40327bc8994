"""The adapter for OpenAI clients: models, chat completions and completions."""

from cookbook.serve.adapters.openai.adapter import OPENAI

__all__ = ["OPENAI"]
