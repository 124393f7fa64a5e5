"""Messages, a call and a tool for tests of conversations."""

from typing import Any

CALL = {"type": "function", "id": "abcdef123", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
_CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "a city"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": _CITY}}


def asked(text: str) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": text}


def answer(text: str, **further: Any) -> dict[str, Any]:
    """A message of the assistant."""
    return {"role": "assistant", "content": text, **further}
