"""The parts of all models planned by the tests of one process: what one plan keeps must be right for the next."""

from megapar_models.build import StageBuilder
from megapar_tools.plan.parts import Parts

PARTS = Parts(StageBuilder())
