"""Which matrices of a model are multiplied in FP8 (`train.fp8`): by their sizes, their cuts, and the user's choice.

Layers declare what may be in FP8: linear layers and experts that a family's factory makes, by their names. Routers, the
head, embeddings, norms and adapters never are. A matrix must be cut into blocks of 128 x 128, on every rank and between
the matrices of one product, such as q, k and v. The answer is the same on every rank. It depends on tp and etp: with
`train.fp8_skip` two layouts can be given the same matrices.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from megapar_kernels.quantize import GROUP

from megapar.base.errors import ConfigError
from megapar.linear.fp8_products import Fp8Products
from megapar.linear.fp8_watch import ProductWatch


@dataclass(frozen=True)
class Fp8Matrices:
    """Says which matrices of a model with `num_layers` layers `products` multiply.

    `skip` are those of `train.fp8_skip`: numbers of layers, of which negative ones count from the last, and patterns of
    names such as *.mlp.down.
    """

    products: Fp8Products
    skip: tuple[str, ...]
    num_layers: int
    kept_back: dict[str, str] = field(default_factory=dict, compare=False)
    """For each matrix asked for why it is not in FP8. Empty: it is."""
    watches: bool = False
    """Whether products count what they lose (log.fp8_every)."""
    watched: list[str] = field(default_factory=list, compare=False)
    """The names of the products that count."""

    def take(self, names: Sequence[str], units: Mapping[str, int]) -> bool:
        """Return whether the matrices `names`, which are one product, are multiplied in FP8, and note why not.

        `units` has by what, such as "inputs", a number that divides its cuts on all ranks. It is 0 for what several
        ranks have: each would convert its own part of a gradient, and codes of parts are not those of their sum.
        """
        skipped = [name for name in names if any(self._is_meant(name, item) for item in self.skip)]
        unfit = [f"{what} cut by {unit:,}, no multiple of {GROUP}" for what, unit in units.items() if unit % GROUP]
        unfit += [f"ranks of tp share {what}" for what, unit in units.items() if not unit]
        reason = ""
        if skipped:
            reason = "train.fp8_skip" if len(skipped) == len(names) else f"one product with {skipped[0]}"
        elif unfit:
            reason = unfit[0]
        self.kept_back.update(dict.fromkeys(names, reason))
        return not reason

    def products_for(self, names: Sequence[str]) -> Fp8Products:
        """Return what multiplies the matrices `names`, which are one product. It may be watched."""
        if not self.watches:
            return self.products
        watch = ProductWatch(names)
        self.watched.append(watch.name)
        return replace(self.products, watch=watch)

    def check(self) -> None:
        """Raise ConfigError if an item of `skip` means none of the matrices asked for, or if none of them is in FP8."""
        for item in self.skip:
            if not any(self._is_meant(name, item) for name in self.kept_back):
                words = sorted({name.rpartition(".")[2] for name in self.kept_back})
                error = ConfigError(
                    f"train.fp8_skip {item}: means no matrix of the model; layers are 0 to {self.num_layers - 1}, or "
                    f"-1 for the last, and matrices are called {', '.join(words)}, such as *.{words[0]}"
                )
                error.everywhere = True
                raise error
        if all(self.kept_back.values()):
            error = ConfigError(f"train.fp8=blocks: {self.in_words()}; use fp8 none, or a smaller tp")
            error.everywhere = True
            raise error

    def _is_meant(self, name: str, item: str) -> bool:
        if re.fullmatch(r"-?[0-9]+", item):
            layer = int(item)
            if -self.num_layers <= layer < 0:
                layer += self.num_layers
            return name.startswith(f"layers.{layer}.")
        return fnmatchcase(name, item)

    def by_format(self) -> dict[str, Any]:
        """The names of the matrices in FP8, and of the others with the reason, as a run records them."""
        names = [name for name, reason in self.kept_back.items() if not reason]
        others = {name: reason for name, reason in self.kept_back.items() if reason}
        return {"matrices in fp8": names, "matrices not in fp8": others}

    def by_layer(self) -> list[set[tuple[str, bool]]]:
        """For each layer its matrices, by their names in it, and whether each is in FP8."""
        layers: list[set[tuple[str, bool]]] = [set() for _ in range(self.num_layers)]
        for name, reason in self.kept_back.items():
            _, layer, inside = name.split(".", 2)
            layers[int(layer)].add((inside, not reason))
        return layers

    def in_words(self) -> str:
        """How many matrices are in FP8, and which are not, with the reason, in one line."""
        layers_of: dict[tuple[str, str], list[int]] = {}
        for name, reason in self.kept_back.items():
            if reason:
                _, layer, inside = name.split(".", 2)
                layers_of.setdefault((inside, reason), []).append(int(layer))
        names_of: dict[tuple[tuple[int, ...], str], list[str]] = {}
        for (inside, reason), layers in layers_of.items():
            names_of.setdefault((tuple(layers), reason), []).append(inside)
        total = len(self.kept_back)
        line = f"{total - sum(map(len, layers_of.values()))} of {total} matrices of layers in FP8"
        texts = [f"{', '.join(names)} of {_listed(layers)} ({reason})" for (layers, reason), names in names_of.items()]
        return f"{line}; not {'; '.join(texts)}" if texts else line


def _listed(layers: Sequence[int]) -> str:
    """Layers in words: the single ones, or the first and the last with their number."""
    if len(layers) <= 3:
        return f"layer{'s' if len(layers) > 1 else ''} {' '.join(map(str, layers))}"
    return f"{len(layers)} layers, {layers[0]} to {layers[-1]}"
