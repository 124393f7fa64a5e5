"""How many stages a pipeline schedule has on each rank: what parallel.vpp may be, and what 0 means."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VirtualStages:
    """The numbers of stages that a schedule can have on a rank."""

    only: int = 0
    """The only number that works; 0: every number does."""
    default: int = 1
    """The number that parallel.vpp 0 means if several work."""

    def meant_by(self, vpp: int) -> int:
        """The number that the option parallel.vpp asks for."""
        return vpp or self.only or self.default

    def nearest_to(self, vpp: int) -> int:
        """`vpp` if it works, otherwise the number that does."""
        return self.only or vpp


ANY = VirtualStages()
ONE = VirtualStages(only=1)
TWO = VirtualStages(only=2)
SEVERAL = VirtualStages(default=2)
"""Of a schedule that is another one if each rank has one stage, such as interleaved, which is 1f1b then."""
