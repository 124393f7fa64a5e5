"""The groups of parameters with another learning rate or weight decay (optimizer.groups)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Group:
    """The factors for the parameters with a name that matches `pattern`, such as layers.*.mlp.*."""

    pattern: str
    lr: float = 1.0
    decay: float = 1.0

    @classmethod
    def parse(cls, text: str) -> "Group":
        """The group that PATTERN:lr=FACTOR,decay=FACTOR names. One of both factors may be left out.

        Raises ValueError, with what is wrong and what would work.
        """
        pattern, _, listed = text.rpartition(":")
        factors: dict[str, float] = {}
        for part in listed.split(","):
            name, _, number = part.partition("=")
            try:
                factor = float(number)
            except ValueError:
                factor = math.nan
            if name not in ("lr", "decay") or name in factors or not 0 <= factor < math.inf:
                raise ValueError(
                    f"{text}: {part or 'nothing'} is no factor; write PATTERN:lr=FACTOR,decay=FACTOR, such as "
                    "*.experts.*:lr=0.5,decay=0"
                )
            factors[name] = factor
        if not pattern:
            raise ValueError(f"{text}: has no pattern; write PATTERN:lr=FACTOR,decay=FACTOR")
        return cls(pattern, **factors)


def group_of(groups: Sequence[Group], names: Sequence[str]) -> Group | None:
    """The first group with a pattern that matches all `names`, those of one parameter. None if there is no such group.

    Raises ValueError if a pattern before matches some of them alone: they have one state, and are updated together.
    """
    for group in groups:
        matched = [fnmatchcase(name, group.pattern) for name in names]
        if all(matched):
            return group
        if any(matched):
            raise ValueError(
                f"{group.pattern}: matches a part of {names[0]} to {names[-1]}, which is one parameter: name all of "
                "its parts or none"
            )
    return None
