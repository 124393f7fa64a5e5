"""How many stages a pipeline schedule has on each rank: what parallel.vpp may be, and what 0 means."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VirtualStages:
    """The possible numbers of stages on a rank under a schedule."""

    only: int = 0
    """The only working number; 0: every number works."""
    default: int = 1
    """The meaning of parallel.vpp 0 if several numbers work."""

    def meant_by(self, vpp: int) -> int:
        """The number meant by the option parallel.vpp."""
        return vpp or self.only or self.default

    def nearest_to(self, vpp: int) -> int:
        """`vpp` if it works, otherwise the only number."""
        return self.only or vpp


ANY = VirtualStages()
ONE = VirtualStages(only=1)
TWO = VirtualStages(only=2)
SEVERAL = VirtualStages(default=2)
"""Of a schedule such as interleaved. With one stage on each rank it would be another one: interleaved would be 1f1b."""
