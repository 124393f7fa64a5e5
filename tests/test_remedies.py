"""What a refusal says would work does work: read from the line, applied, and checked again until nothing is refused."""

import random
from typing import Any

import pytest

from tests.support.remedies import DEFAULTS, Change, Drawn, apply, contradictions, draw, remedies

REFUSED = 500


def test_remedies_lead_to_a_configuration_that_runs() -> None:
    """Fault remedies-in-a-circle: of 500 refused configurations at most 5% need a third round, and none a fourth. Lines
    do not contradict each other."""
    chance = random.Random(5)
    rounds: list[int] = []
    while len(rounds) < REFUSED:
        drawn = draw(chance)
        lines = drawn.problems()
        if not lines:
            continue
        history = []
        while lines and len(history) < 4:
            history += [lines]
            assert not contradictions(lines), lines
            drawn = apply(drawn, lines, chance)
            lines = drawn.problems()
        rounds.append(len(history))
        assert rounds[-1] < 4, history
    assert sum(number == 3 for number in rounds) <= 0.05 * REFUSED
    assert sum(number == 1 for number in rounds) > 0.5 * REFUSED


def configuration(world: int, **options: Any) -> Drawn:
    """Options by their names without section, each name in one section only."""
    paths = {path.rpartition(".")[2]: path for path in reversed(DEFAULTS)}
    return Drawn(DEFAULTS | {paths[name]: value for name, value in options.items()}, world)


@pytest.mark.parametrize(
    ("drawn", "expected"),
    [
        # v-min and zb-v have two stages on a rank, so another vpp would be no remedy.
        (configuration(6, num_hidden_layers=3, pp=3, schedule="v-min"), [{"parallel.pp": 1}, {"parallel.pp": 2}]),
        (configuration(24, num_hidden_layers=4, pp=8, schedule="zb-v"), [{"parallel.pp": n} for n in (1, 2, 3)]),
        (
            configuration(
                4, family="mixtral", num_experts=8, dp=4, etp=4, ep=1, global_batch_size=6, micro_batch_size=1
            ),
            [{"train.global_batch_size": 4}, {"train.global_batch_size": 8}, {"parallel.etp": 1}],
        ),
        (
            configuration(1, batch_ramp=(3, 3, 50), global_batch_size=12, micro_batch_size=2),
            [{"train.batch_ramp": (2, 2, 50)}],
        ),
    ],
    ids=["v-min", "zb-v", "etp", "ramp"],
)
def test_a_line_names_the_cause_and_every_value_of_it_works(drawn: Drawn, expected: list[Change]) -> None:
    (line,) = drawn.problems()
    assert remedies(line) == expected
    head = line.partition(": ")[0]
    for change in expected:
        assert all(f"{option}=" in head for option in change)
        assert not Drawn(drawn.values | change, drawn.world).problems()
