"""The model at Hugging Face, with its commit, that weights began as: the field `origin` of a manifest's trainer.

Conversion of a model by name writes it. Runs from these weights, and what is made of their checkpoints, keep it.
"""

from collections.abc import Mapping
from typing import Any

ORIGIN = "origin"
_KEYS = ("repo", "commit")


def origin_of(trainer: Mapping[str, Any]) -> dict[str, str]:
    """Return `repo` and `commit` in the trainer's section of a manifest, {} if it names none."""
    found = trainer.get(ORIGIN)
    if not isinstance(found, dict) or not all(isinstance(found.get(key), str) for key in _KEYS):
        return {}
    return {key: found[key] for key in _KEYS}


def in_words(origin: Mapping[str, str]) -> str:
    """Return the name that stands for the weights for ever, such as ORG/MODEL@COMMIT; "" if there is none."""
    text = "@".join(origin[key] for key in _KEYS if origin)
    return "".join(c if c.isprintable() else "?" for c in text)
