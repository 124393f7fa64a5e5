"""PEFT's `target_parameters`: one pair of factors for a stack of matrices, such as those of all experts of a layer.

transformers 5 keeps gate_up_proj [experts, 2 width, hidden] and down_proj [experts, hidden, width] in a module
`mlp.experts`. For a stack of E matrices [out, in] PEFT has A [E R, in], with the R rows of an expert together, and B
[out, R E], whose columns are the first of each expert, then the second of each, and so on. The names of gate_up_proj's
factors have `base_layer.` in them if down_proj has an adapter too.

Ours have a pair for gate and one for up, so R is 2 r: A has the rows of both, and B has them on the diagonal, and zeros
beside. PEFT trains what is written as zeros too. A gate_up_proj with R = r is read as a gate and an up with equal A.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError
from megapar.config.model_options import ModelConfig
from megapar.declare.params import Sizes
from megapar_models.convert.config_json import names_of

GATE_UP = "mlp.experts.gate_up_proj"
PARAMETERS = {GATE_UP: ("gate", "up"), "mlp.experts.down_proj": ("down",)}
EXPERT_MODULES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_FACTOR = re.compile(r"(layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)\.lora_[ab]")


@dataclass(frozen=True)
class Stack:
    """The factors `kind`, lora_a or lora_b, of the matrices `words` of all experts of a layer.

    `module` is where PEFT has them, `layer` where we do, such as layers.3.mlp.experts. The rank of a pair is `rank`,
    that of the stack R is `joint`.
    """

    module: str
    layer: str
    words: tuple[str, ...]
    num_experts: int
    kind: str
    rank: int
    joint: int

    def ours(self, expert: int) -> list[str]:
        """The names of an expert's factors, one for each of the words."""
        return [f"{self.layer}.{expert}.{word}.{self.kind}" for word in self.words]

    def shape(self, shapes: Mapping[str, Sizes]) -> Sizes:
        """The shape of PEFT's tensor, from those of ours."""
        rows, columns = shapes[self.ours(0)[0]]
        if self.kind == "lora_a":
            return (self.num_experts * self.joint, columns)
        return (len(self.words) * rows, self.joint * self.num_experts)

    def join(self, tensor: Callable[[str], Tensor]) -> Tensor:
        """PEFT's tensor, of ours. `tensor` gives one by its name."""
        factors = [[tensor(name) for name in self.ours(expert)] for expert in range(self.num_experts)]
        if self.kind == "lora_a":
            return torch.cat([torch.cat(of_expert) for of_expert in factors])
        return torch.stack([torch.block_diag(*of_expert) for of_expert in factors], dim=-1).flatten(1)

    def cut(self, values: Tensor, expert: int, word: str) -> Tensor:
        """One of ours. Raises CheckpointError if the factors of gate and up are mixed in a stack of rank 2 r."""
        number = self.words.index(word)
        own = slice(number * self.rank, (number + 1) * self.rank) if self.joint > self.rank else slice(None)
        if self.kind == "lora_a":
            return values.view(self.num_experts, self.joint, -1)[expert, own]
        rows = values.view(-1, self.joint, self.num_experts)[..., expert].chunk(len(self.words))[number]
        if rows.count_nonzero() != rows[:, own].count_nonzero():
            raise CheckpointError(
                f"{self.module}: its gate and up share all {self.joint} rows of A: an adapter of rank {self.joint}, to "
                f"be given rank {self.joint} for every matrix"
            )
        return rows[:, own]


def of_expert(name: str) -> str:
    """The word gate, up or down of an expert's factor, or "" for another name."""
    match = _FACTOR.fullmatch(name)
    return match[3] if match else ""


def stacks(model: ModelConfig, factors: Iterable[str], rank: int, joint: int = 0) -> dict[str, Stack]:
    """The stacks of those of our `factors` that are of experts, by PEFT's name without prefix.

    `joint` is R of gate_up_proj if it is given, otherwise 2 r. Raises ConfigError if transformers has no such stack.
    """
    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for name in factors:
        if match := _FACTOR.fullmatch(name):
            found[match[1]][match[3]].add(int(match[2]))
    result = {}
    for layer, words in found.items():
        theirs = names_of(model).modules.get("layers.*.mlp.experts.*.gate", "")
        if ".experts.*." not in theirs:
            raise ConfigError(f"{layer}: transformers keeps these experts in another form; merge the adapters instead")
        if ("gate" in words) != ("up" in words):
            raise ConfigError(f"{layer}: PEFT has one adapter for gate and up, and only one of them has one")
        module = theirs.partition("layers.*")[0] + layer
        for group in PARAMETERS.values():
            if group[0] not in words:
                continue
            inner = ".base_layer" if group[0] == "gate" and "down" in words else ""
            for kind, theirs_kind in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
                stack = Stack(
                    f"{module}{inner}",
                    layer,
                    group,
                    len(words[group[0]]),
                    kind,
                    rank,
                    (joint or 2 * rank) if len(group) == 2 else rank,
                )
                result[f"{module}{inner}.{theirs_kind}.weight"] = stack
    return result
