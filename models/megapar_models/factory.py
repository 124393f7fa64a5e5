"""Makes the modules of a model by name: linear layers, experts, norms, the embedding and the core of attention.

The layers of all families are made of these. A run may add modules by name here, before a parameter is declared. So an
adapter also gets everything derived from declarations: initial weights, optimizer state, checkpoints, counts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Any, Literal

import torch
from megapar_kernels.backend import Kernels
from torch import Tensor, nn

from megapar.base.errors import ConfigError
from megapar.comm.axis import Axis
from megapar.config.model_options import ModelConfig
from megapar.config.options import AdapterConfig
from megapar.context_parallel.attention import CoreAttention
from megapar.declare.largest_logits import LargestLogits, ScaledRows
from megapar.declare.params import Init, Sizes, cut_unit
from megapar.declare.random import Tokens
from megapar.declare.sharding import Sharding
from megapar.expert_parallel.experts import Experts
from megapar.linear.low_rank import LoraRule
from megapar.linear.products import MatrixProducts
from megapar.linear.torch_products import TORCH_PRODUCTS
from megapar.tensor_parallel.layers import (
    ColumnParallelLinear,
    Columns,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocabulary_parameter,
)
from megapar.tensor_parallel.lora import Lora, lora_of_columns
from megapar_models.fp8_matrices import Fp8Matrices
from megapar_models.heads import Heads
from megapar_models.norms import LayerNorm, NormRule, RMSNorm


@dataclass(frozen=True)
class Matrix:
    """A matrix [out_features, in_features] of a layer, such as layers.3.attention.q.

    If tp cuts it by its outputs, `columns` has those of this rank. If tp cuts it by its inputs, `columns` is None.
    """

    name: str
    in_features: int
    out_features: int
    columns: Columns | None = None


Beside = Callable[["Factory", Matrix], nn.Module]
"""Makes a module beside a matrix. It gets the input of the matrix's layer, and its output is added to the matrix's."""


@dataclass(frozen=True)
class Factory:
    """The only place where modules are made, and what they have in common on this rank.

    `init` is the initialization of matrices, and `output_init` is for the two that add to the residual stream.
    `cp_attention` is the option parallel.cp_attention. `beside` makes modules beside matrices, such as adapters. Its
    keys are patterns of a shell for the matrix's name, such as `*.attention.q`; the first match counts. `adapter` are
    the options of low-rank adapters.

    A family may have a factory of its own (`Family.factory`).
    """

    sharding: Sharding
    init: Init
    output_init: Init
    kernels: Kernels = field(default_factory=Kernels)
    products: MatrixProducts = TORCH_PRODUCTS
    cp_attention: Literal["gather", "ring", "ulysses"] = "gather"
    beside: Mapping[str, Beside] = field(default_factory=dict)
    matched: set[str] = field(default_factory=set, compare=False)
    """The patterns of `beside` that have matched a matrix so far."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    adaptable: set[str] = field(default_factory=set, compare=False)
    """The matrices seen so far that an adapter may be added to."""
    measures_logits: bool = False
    """Whether attention notes its largest logits (optimizer.qk_clip)."""
    checked: set[tuple[Any, ...]] = field(default_factory=set, compare=False)  # by `first_use`
    number_format: MatrixProducts | None = None
    """The products of kernels.products, for the matrices that they serve."""
    fp8: Fp8Matrices | None = None
    """Which matrices of layers are multiplied in FP8, if any are (train.fp8)."""

    def products_of_matrices(self, names: Sequence[str], units: Mapping[str, int]) -> MatrixProducts:
        """Return how the matrices `names`, one product, are multiplied. `units` are those of `Fp8Matrices.take`."""
        if self.fp8 is not None and self.fp8.take(names, units):
            return self.fp8.products_for(names)
        return self.products_of(names[0])

    def products_of(self, name: str) -> MatrixProducts:
        """Return how the products of the module `name`, such as head, are computed: never in FP8."""
        if self.number_format is not None and self.number_format.serves(name):
            return self.number_format
        return self.products

    def column_parallel(
        self, in_features: int, columns: Sequence[Columns], *, bias: bool = False, init: Init | None = None
    ) -> ColumnParallelLinear:
        """One layer of several matrices with the same input. `init` is `self.init` if it is not given."""
        products = self.products_of_matrices([c.name for c in columns], _units_of(in_features, columns))
        lora = None
        adapted = [self.is_adapted(c.name) for c in columns]
        if any(adapted):
            lora = lora_of_columns(self._lora_rule(), in_features, columns, adapted, self.sharding)
        return _with_beside(self, in_features, columns, init=init or self.init, bias=bias, products=products, lora=lora)

    def row_parallel(
        self, name: str, in_features: int, out_features: int, *, bias: bool = False, init: Init | None = None
    ) -> RowParallelLinear:
        """`init` is `self.output_init` if it is not given."""
        init = init or self.output_init
        units = {"inputs": cut_unit(in_features, self.sharding.tp.size), "outputs": out_features}
        products, lora = self.products_of_matrices([name], units), None
        if self.is_adapted(name):
            lora = Lora.of_rows(self._lora_rule(), name, (out_features, in_features), self.sharding)
        beside = _beside(self, Matrix(name, in_features, out_features))
        kind = RowParallelLinear if beside is None else _RowsBeside
        sizes = name, in_features, out_features
        layer = kind(*sizes, self.sharding, init=init, bias=bias, products=products, lora=lora)
        if beside is not None:
            layer.beside = beside
        return layer

    def lora_of_whole(self, name: str, shape: Sizes) -> Lora | None:
        """The adapter of a matrix of `shape` that is whole on every tp rank, or None if it has none."""
        if not self.is_adapted(name):
            return None
        return Lora.of_whole(self._lora_rule(), name, shape, self.sharding)

    def is_adapted(self, name: str) -> bool:
        """Return whether the matrix `name` has an adapter, and note that it may have one."""
        self.adaptable.add(name)
        return self.adapter.rank > 0 and self.adapter.is_target(name)

    def _lora_rule(self) -> LoraRule:
        adapter = self.adapter
        return LoraRule(adapter.rank, adapter.scale, adapter.dropout, self.kernels.dropout, adapter.dora)

    def experts(
        self,
        name: str,
        num_experts: int,
        hidden_size: int,
        width: int,
        *,
        activation: Callable[[Tensor, Tensor], Tensor],
        token_share: Fraction,
        bias: bool = False,
        inner: tuple[str, ...] = ("gate", "up"),
    ) -> Experts:
        """Make the experts of a layer. Raises ValueError if `beside` names a matrix of theirs: their rows are grouped.

        Raises ConfigError for an adapter of some of the experts, with dropout, or with magnitudes.
        """
        adapted = _adapted_experts(self, name, num_experts, (*inner, "down"))
        products, of_down = _products_of_experts(self, name, hidden_size, width, inner)
        return Experts(
            *(name, num_experts, hidden_size, width, self.sharding),
            activation=activation,
            init=self.init,
            output_init=self.output_init,
            token_share=token_share,
            products=products,
            products_of_down=of_down,
            bias=bias,
            inner=inner,
            lora=self._lora_rule() if adapted else None,
            adapted=adapted,
        )

    def norm(self, name: str, size: int, rule: NormRule) -> RMSNorm | LayerNorm:
        """A norm over the last dimension, of `size` elements."""
        kinds: dict[str, type[RMSNorm | LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}
        return kinds[rule.kind](name, size, rule, self.sharding, self.kernels.norm)

    def embedding(
        self, name: str, rows: int, width: int, *, tied_over: Axis | None, weight: nn.Parameter | None = None
    ) -> VocabParallelEmbedding:
        """`tied_over` is the axis of the pipeline ranks with copies. `weight` is the matrix if there is one."""
        of = (name, rows, width, self.sharding)
        return VocabParallelEmbedding(*of, init=self.init, tied_over=tied_over, weight=weight)

    def vocabulary(self, name: str, vocab_size: int, hidden_size: int, *, tied_over: Axis | None) -> nn.Parameter:
        """The matrix of the head, [rows of this rank, h]. `tied_over` is as in `embedding`."""
        return vocabulary_parameter(name, vocab_size, hidden_size, self.sharding, init=self.init, tied_over=tied_over)

    def core_attention(self, kv_heads: Sequence[int], key_width: int, value_width: int, **rules: Any) -> CoreAttention:
        """softmax(q k^T / sqrt(key_width)) v. `kv_heads` has the local k/v head of each query head.

        `rules` are window, chunk, rule of scores and slopes of `CoreAttention`.
        """
        sharding = self.sharding
        of = (sharding.cp, self.cp_attention, kv_heads, self.kernels, sharding.device, key_width, value_width)
        return CoreAttention(*of, **rules)

    def largest_logits(
        self, layer: int, total: int, heads: range, groups: int, scaled: Sequence[ScaledRows]
    ) -> LargestLogits | None:
        """What notes the largest logits of a layer (`LargestLogits`), if the run asks for it."""
        if not self.measures_logits:
            return None
        return LargestLogits(layer, total, heads, groups, scaled, self.sharding.device)


def _products_of_experts(
    factory: Factory, name: str, hidden_size: int, width: int, inner: Sequence[str]
) -> tuple[MatrixProducts, ...]:
    """Return how the `inner` matrices, and down, of the experts `name` are multiplied: in one number format."""
    gate_up, down = [f"{name}.{matrix}" for matrix in inner], [f"{name}.down"]
    units = {"width": cut_unit(width, factory.sharding.etp.size), "hidden size": hidden_size}
    if factory.fp8 is not None and factory.fp8.take([*gate_up, *down], units):
        return factory.fp8.products_for(gate_up), factory.fp8.products_for(down)
    return factory.products_of(name), factory.products_of(name)


def _units_of(in_features: int, columns: Sequence[Columns]) -> dict[str, int]:
    """What `Fp8Matrices.take` must know of the cuts of the matrices of a column-parallel layer."""
    outputs = {f"outputs of {c.name.rpartition('.')[2]}": 0 if c.shared else c.unit for c in columns}
    return {"inputs": in_features, **outputs}


def _beside(factory: Factory, matrix: Matrix) -> nn.Module | None:
    """Make what stands beside `matrix`, by the first pattern of `Factory.beside` that its name matches."""
    for pattern, make in factory.beside.items():
        if fnmatchcase(matrix.name, pattern):
            factory.matched.add(pattern)
            # A pattern such as *.attention.* matches the matrices of the adapter too: those have none beside them.
            return make(replace(factory, beside={}, adapter=AdapterConfig(), adaptable=set(), fp8=None), matrix)
    return None


def _adapted_experts(factory: Factory, name: str, num_experts: int, matrices: Sequence[str]) -> list[str]:
    """Return which of the matrices have adapters, in all experts of a layer. Raises as `Factory.experts` does."""
    adapted = []
    for matrix in matrices:
        # Ranks have other experts, so all of a layer have an adapter or none.
        if len(of_experts := {factory.is_adapted(f"{name}.{number}.{matrix}") for number in range(num_experts)}) > 1:
            text = f"matches {matrix} of some experts of {name}: name all of them or none"
            raise ConfigError(f"adapter.targets {' '.join(factory.adapter.targets)}: {text}")
        adapted += [matrix] * of_experts.pop()
        if factory.adapter.dropout and matrix in adapted:
            # Rows reach an expert without their samples and positions. PEFT takes none there either.
            text = f"{name} have adapters, which take no dropout; use 0.0, or adapter.targets without experts"
            raise ConfigError(f"adapter.dropout={factory.adapter.dropout}: {text}")
        if factory.adapter.dora and matrix in adapted:
            text = f"{name} have adapters, which have no magnitudes; leave it out, or name targets without experts"
            raise ConfigError(f"adapter.dora: {text}")
        for pattern in factory.beside:
            if fnmatchcase(f"{name}.0.{matrix}", pattern):
                raise ValueError(f"Factory.beside {pattern}: matches {name}.0.{matrix}; an expert takes none")
    return adapted


def _with_beside(
    factory: Factory, in_features: int, columns: Sequence[Columns], **options: Any
) -> ColumnParallelLinear:
    """Make a column-parallel layer, with modules beside those of its matrices that patterns of `beside` match."""
    matrices = [Matrix(c.name, in_features, c.size, c) for c in columns]
    found = {str(index): _beside(factory, matrix) for index, matrix in enumerate(matrices)}
    beside = {index: module for index, module in found.items() if module is not None}
    kind = _ColumnsBeside if beside else ColumnParallelLinear
    layer = kind(in_features, columns, factory.sharding, **options)
    if isinstance(layer, _ColumnsBeside):
        layer.widths, layer.beside = [c.stop - c.start for c in columns], nn.ModuleDict(beside)
    return layer


class _ColumnsBeside(ColumnParallelLinear):
    """A column-parallel layer with modules beside some of its matrices, by the index of the matrix."""

    widths: list[int]  # columns of each matrix on this rank
    beside: nn.ModuleDict

    def forward(self, x_sbi: Tensor, tokens: Tokens | None = None) -> Tensor:
        return self._with_beside(super().forward(x_sbi, tokens), x_sbi)

    def product(self, x_sbi: Tensor, tokens: Tokens | None = None) -> Tensor:
        return self._with_beside(super().product(x_sbi, tokens), x_sbi)

    def _with_beside(self, y_sbo: Tensor, x_sbi: Tensor) -> Tensor:
        parts = list(y_sbo.split(self.widths, dim=-1))
        for index, module in self.beside.items():
            parts[int(index)] = parts[int(index)] + module(x_sbi)
        return torch.cat(parts, dim=-1)


class _RowsBeside(RowParallelLinear):
    """A row-parallel layer with a module beside its matrix."""

    beside: nn.Module

    def forward(self, x_sbi: Tensor, tokens: Tokens | None = None) -> Tensor:
        y_sbo: Tensor = super().forward(x_sbi, tokens) + self.beside(x_sbi)
        return y_sbo


def key_columns(name: str, heads: Heads, total: int, width: int) -> Columns:
    """Return this rank's rows of a matrix with `width` rows for each of `total` key/value heads."""
    return Columns(
        name,
        size=total * width,
        start=heads.kv_start * width,
        stop=heads.kv_stop * width,
        own_start=heads.kv_own_start * width,
        own_stop=heads.kv_stop * width,
        shared=heads.shared,
        blocks=(width,),
        unit=heads.kv_unit * width,
    )


def initializations(model: ModelConfig) -> tuple[Init, Init]:
    """Initializations of matrices, and of the two that add to the residual stream: GPT-2 scales them by the depth."""
    std = model.initializer_range
    return Init("normal", std), Init("normal", std / math.sqrt(2 * model.num_hidden_layers))
