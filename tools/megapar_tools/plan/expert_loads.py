"""Loads of experts for a simulation: a stated imbalance, or what a run has logged (`megapar.base.expert_load`)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.base.errors import ConfigError, DataError
from megapar.base.expert_load import spread
from megapar.base.grid import Grid, expert_rank_groups
from megapar.config.options import Config
from megapar.observe.expert_rows import file_of


@dataclass(frozen=True)
class ImbalancedLoad:
    """The experts of one position of ep get `factor` times their even share. The other experts share the rest evenly.

    Every rank makes as many choices as this one, and chooses alike.
    """

    factor: float
    ep_rank: int

    def chosen(self, layer: int, choices: int, num_experts: int, ep_size: int, etp_size: int) -> Tensor:
        start = self.ep_rank * num_experts // ep_size
        stop = (self.ep_rank + 1) * num_experts // ep_size
        experts = stop - start
        favored = round(self.factor * choices * experts / num_experts)
        if experts == num_experts:
            favored = choices  # there is no other expert
        others = spread(choices - favored, num_experts - experts)
        counts_e = torch.cat([others[:start], spread(favored, experts), others[start:]])
        return counts_e.expand(etp_size, ep_size, num_experts)


def imbalanced(factor: float, config: Config, ep_rank: int) -> ImbalancedLoad:
    """The load for `--imbalance`. Raises ConfigError if the experts of `ep_rank` cannot have so many rows."""
    moe = config.model.experts
    if moe is None or not moe.num_experts:
        raise ConfigError(f"--imbalance {factor:g}: model.family={config.model.family} has no experts; leave it out")
    ep = config.parallel.ep
    experts = (ep_rank + 1) * moe.num_experts // ep - ep_rank * moe.num_experts // ep
    # A token chooses an expert once at most, and makes num_experts_per_tok choices.
    largest = moe.num_experts / max(moe.num_experts_per_tok, experts)
    if not 0 < factor <= largest:
        raise ConfigError(
            f"--imbalance {factor:g}: the {experts} of {moe.num_experts} experts of this rank can have at most "
            f"{largest:g} times their even share; give a number above 0 and up to {largest:g}"
        )
    return ImbalancedLoad(factor, ep_rank)


class Logged(NamedTuple):
    """What one rank has logged (`megapar.observe.expert_rows`): by layer int64 [forward passes, experts].

    A rank without layers of experts, or without a micro-batch, writes no file.
    """

    path: Path
    layers: Mapping[int, Tensor]


class LoggedLoad:
    """The choices that the ranks of a run have logged, one forward pass after the other.

    `choices_qp` has for each position of etp and ep what its rank logged. `own` are the positions of this rank on etp
    and on ep. `folder` is named in errors.
    """

    def __init__(self, folder: Path, choices_qp: Sequence[Sequence[Logged]], positions: tuple[int, int]):
        self._folder = folder
        self._choices_qp = choices_qp
        self._own = positions
        self._passes: dict[int, int] = {}  # by layer, those that have been asked for

    def chosen(self, layer: int, choices: int, num_experts: int, ep_size: int, etp_size: int) -> Tensor:
        number = self._passes.get(layer, 0)
        self._passes[layer] = number + 1
        found = [[self._one(rank, layer, number, num_experts) for rank in ranks] for ranks in self._choices_qp]
        counts_qpe = torch.stack([torch.stack(ranks) for ranks in found])
        if counts_qpe[self._own].sum() != choices:
            raise DataError(
                f"{self._folder}: a micro-batch has {int(counts_qpe[self._own].sum())} choices in layer {layer}, and "
                f"{choices} in this layout; simulate the layout that the run had"
            )
        return counts_qpe

    def _one(self, logged: Logged, layer: int, number: int, num_experts: int) -> Tensor:
        """The counts of one rank in one pass."""
        if not logged.layers:
            raise DataError(
                f"{logged.path}: is not there, and in this layout that rank has experts in layer {layer} and a "
                "micro-batch for them; a run of this layout with --train.memory_report writes it"
            )
        counts = logged.layers.get(layer)
        if counts is None or number >= len(counts) or counts.shape[1] != num_experts:
            raise DataError(
                f"{logged.path}: has no micro-batch {number} in layer {layer}, or not with {num_experts} experts; "
                "simulate the layout that the run had"
            )
        return counts[number]


def logged(folder: Path, grid: Grid, rank: int) -> LoggedLoad:
    """The load that a run with train.memory_report has logged in `folder`.

    A rank without layers of experts, or without a micro-batch, has no file, and nobody asks for its rows. Raises
    DataError if the folder has no file, or if one is damaged.
    """
    if not any(folder.glob("rank_*.json")):
        raise DataError(f"{folder}: has no rows of experts; a run with --train.memory_report writes them")
    groups = expert_rank_groups(grid.sizes, grid.expert_sizes, ["etp", "ep"], grid.order)
    ranks = next(ranks for ranks in groups if rank in ranks)
    etp = grid.etp
    choices = [[_read(file_of(folder, other)) for other in ranks[q::etp]] for q in range(etp)]
    ep_rank, etp_rank = divmod(ranks.index(rank), etp)
    return LoggedLoad(folder, choices, (etp_rank, ep_rank))


def _read(path: Path) -> Logged:
    """What one rank has logged: nothing if it has no file."""
    try:
        layers = json.loads(path.read_text())["layers"]
        return Logged(path, {int(layer): torch.tensor(rows, dtype=torch.int64) for layer, rows in layers.items()})
    except FileNotFoundError:
        return Logged(path, {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: no rows of experts can be read there ({error}); a run with --train.memory_report writes them"
        ) from error
