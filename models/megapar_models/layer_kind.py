"""What the layers of a model and its two ends are made of. A family says both (`Stage.layer_kind`, `ends_of`)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from megapar.config.model_options import ModelConfig, MoEConfig
from megapar.config.options import Config
from megapar.declare.batch import MicroBatch
from megapar.expert_parallel.route import RouterRule
from megapar.tensor_parallel.cross_entropy import PLAIN_LOGITS, LogitRule
from megapar_models.factory import Factory
from megapar_models.handed import Bundle, Handed
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary


@dataclass(frozen=True)
class Temperature:
    """A factor of queries that grows with the position: 1 + beta ln(1 + floor(position / original)).

    Positions count from the start of a document, whose first one is `first`. It is that of Ministral 3, after the
    rotation, and with `first` 1 that of Llama 4.
    """

    beta: float
    original: int
    first: int = 0

    def factors(self, batch: MicroBatch) -> Tensor:
        """The factor of each position, fp32 [s, 1]. It is [s, b] if samples have documents."""
        positions = batch.positions_s[:, None]
        if batch.starts is not None:
            positions = batch.document_positions_bs().t()
        return 1.0 + self.beta * torch.log1p(((positions + self.first) // self.original).to(torch.float32))


@dataclass(frozen=True)
class HeadSizes:
    """The heads of one layer's attention, and their widths.

    `head_dim` is the width of a query and of a key, `value_dim` that of a value. `kv_heads` must divide `query_heads`.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


class MixerRule(ABC):
    """A mixer with fields of its own, which makes its module. Subclasses are frozen dataclasses: kinds are compared."""

    OVER_CP: ClassVar[bool] = False
    """Whether tokens meet those of other context-parallel ranks. If not, parallel.cp above 1 is refused."""
    MEASURES_LOGITS: ClassVar[bool] = False
    """Whether the module measures its largest logits, as optimizer.qk_clip needs."""
    READS: ClassVar[frozenset[str]] = frozenset()
    """Fields of `LayerKind` that the module obeys, beside `READ_BY_LAYERS`. Another one with a value is refused."""

    @abstractmethod
    def make(self, number: int, kind: "LayerKind", model: ModelConfig, factory: Factory) -> nn.Module:
        """Make the mixer of layer `number`. It maps x_sbh and a ForwardContext to x_sbh.

        Its weights count as products for each token. What it multiplies besides, its modules declare by
        `flops_per_token(seq_length)` (`megapar_models.counts`).
        """

    def problems(self, config: Config) -> Iterator[str]:
        """Yield a line for each problem that the mixer has with the options, such as heads that tp does not divide."""
        yield from ()


class StreamRule(ABC):
    """What branches read and write in the place of one sum (`megapar_models.streams`). Subclasses are frozen."""

    @property
    def streams(self) -> int:
        """How many times as wide as token embeddings the hidden states between layers are."""
        return 1

    def begin(self, x_sbh: Tensor) -> Tensor:
        """Return the input of the first layer from the token embeddings."""
        return x_sbh

    def blocks_before(self, number: int) -> tuple[str, ...]:
        """Return the names of what layers before the layer `number` hand on to all later ones and to the end."""
        return ()

    @abstractmethod
    def make_layer(self, number: int, kind: "LayerKind", model: ModelConfig, factory: Factory) -> nn.Module:
        """Make the layer `number`. It maps the hidden states between layers, and a ForwardContext, to such states."""

    @abstractmethod
    def make_end(self, model: ModelConfig, factory: Factory) -> nn.Module:
        """Make what maps the output of the last layer, and a ForwardContext, to what the last norm reads, [s, b, h]."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """The parts of a layer, and how they are put together (`megapar_models.layer.Layer`)."""

    mixer: "str | MixerRule" = "attention"
    """What mixes tokens: attention of heads, a rule with fields of its own, or MODULE:NAME of a class of your own.
    "none": the layer is its MLP alone.

    Such a class is made as CLASS(number, kind, model, factory). Rules and classes declare what `MixerRule` has, and a
    class of an MLP its `READS`.
    """
    mlp: str = "dense"
    """What works on each token: a name in `megapar_models.layer.MLPS`, or MODULE:NAME of a class of your own. "both":
    an MLP with experts beside it. "none": the layer is its mixer alone."""
    norm: NormRule
    norms: Literal["before", "after", "both", "stream"] = "before"
    """Norms of a branch's input, of its output before it is added to the residual stream, or of both.

    "stream": of the residual stream itself, behind each branch (arXiv 1706.03762). `Layer` does not have it.
    """
    mlp_norms: Literal["", "before", "after", "both"] = ""
    """Norms of the MLP, where they are placed in another way than those of the mixer. Empty: as `norms`."""
    parallel: Literal["no", "one_norm", "two_norms"] = "no"
    """Whether attention and MLP read the same residual stream: through one norm, or through a norm each."""
    residual_multiplier: float = 1.0
    """The factor of both branches before they are added to the residual stream."""
    stream: StreamRule | None = None
    """What replaces the one residual stream, the same rule in all layers: `HyperConnections(...)`, or attention
    residuals by `AttentionResiduals.in_layer`, which also declares the sums that layers read and write
    (`megapar_models.streams`). None: a branch reads the residual stream and is added to it."""

    head_sizes: HeadSizes | None = None
    """The heads of mixer "attention", or of a class of your own that asks `heads_of`. None: those of the model."""
    mlp_width: int = 0
    """The width of mlp "dense" and "plain", or of a class of your own that asks `width_of_mlp`. 0: the model's."""
    sizes_from: str = "model.family"
    """The options, with blanks between them, that give a layer sizes other than the model's: messages name them."""

    rotary: Rotary | None = None
    """The rotary table of queries and keys. None: the layer sees no positions (NoPE).

    If its width is below that of a head, only the first dimensions of a head are rotated.
    """
    window: int = 0
    """Attention reads this many keys, the token's own among them. 0: all keys up to its own."""
    chunk: int = 0
    """Documents are cut into chunks of so many tokens from their start, and attention reads the keys of the token's own
    chunk. 0: there are none."""
    qkv_bias: bool = False
    qkv_clip: float = 0.0
    """Queries, keys and values are clipped to [-qkv_clip, qkv_clip] before norms and rotation. 0: they are not."""
    out_bias: bool = False
    qk_norm: bool = False
    """A norm of queries and keys."""
    qk_norm_over: Literal["head", "each_head", "width"] = "head"
    """A norm over each head, with one weight [d] for all heads or with a weight for each, or over all heads together.

    Over all heads and for each head the weights are [heads * d].
    """
    qk_norm_rule: NormRule | None = None
    """How queries and keys are normalized. None: as `norm` says."""
    qk_norm_after_rotary: bool = False
    attention_scale: float | None = None
    """The factor of scores. None: 1 / sqrt(width of a head)."""
    score_cap: float = 0.0
    """Scores x become cap * tanh(x / cap), before the mask. 0: they stay as they are."""
    slopes: tuple[float, ...] = ()
    """ALiBi (arXiv 2108.12409): how fast the scores of each head fall with the distance of query and key. (): not.

    Distances count from the query, so documents and ranks of context parallelism have the same.
    """
    sinks: bool = False
    """The softmax of each head has a further score, a weight of its own without a value (gpt-oss)."""
    value_factor: float = 1.0
    """The factor of values (MiMo-V2)."""
    output_gate: bool = False
    """The output of each head is multiplied by sigmoid of a projection of the token, as wide as the output."""
    head_gate: bool = False
    """The output of each head is multiplied by sigmoid of a projection of the token to one number a head (LFM3)."""
    gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"
    """What becomes of the projection to gates. Softplus is computed in fp32 at least (Laguna)."""
    temperature: Temperature | None = None
    """A factor of queries by position."""
    attention_dropout: float = 0.0
    """Dropout on attention probabilities."""

    activation: str = ""
    """The activation of the MLP or of the experts: a name in `megapar_models.mlp`. Empty: model.hidden_act."""
    activation_limit: float = 0.0
    """The bound of activation clamped_swiglu, and of swiglu_step, for which 0 is none."""
    mlp_bias: bool = False
    """Biases of all matrices of the MLP."""
    mixture: MoEConfig | None = None
    """The experts of mlp "mixture" or "both"."""
    router: RouterRule | None = None
    """How experts are chosen. None: as `mixture` says (`megapar_models.moe.router_rule`)."""
    router_bias: bool = False
    """A trained bias of the router's logits."""
    router_dtype: Literal["fp32", "model"] = "fp32"
    """The dtype of the router's product."""
    expert_scale: bool = False
    """Whether the router has a trained factor [experts] of each expert's routing weights (Gemma 4)."""
    expert_bias: bool = False
    """Biases of all matrices of the experts."""
    plain_experts: bool = False
    """Whether experts and shared expert have no gate, as mlp "plain"."""
    averages_shared: bool = False
    """The outputs of a token's experts and of the shared expert are averaged, not added (Cohere)."""
    weighted_inputs: bool = False
    """The weights of a token's experts multiply what they read, and not what they give (Llama 4)."""
    shared_activation_limit: float | None = None
    """The bound of the shared expert's activation. None: as `activation_limit`."""
    expert_latent: int = 0
    """The width that experts read and write, between two projections of their own. 0: that of the model."""
    sub_norms: bool = False
    """Norms of what the last matrix of attention and of the MLP reads, over its whole width (Sub-LN, arXiv 2210.06423).

    For mixer "attention" and mlp "dense". tp ranks sum the squares of their parts.
    """
    reads: tuple[str, ...] = ()
    """Names of tensors that this layer reads from earlier layers or from the embedding (`ForwardContext.handed`)."""
    writes: tuple[Handed, ...] = ()
    """Tensors that this layer hands on to later layers, with shape and dtype (`megapar_models.handed.Handed`)."""
    shared_keys: str = ""
    """The group of layers that share keys and values, after norm and rotation (KV sharing). With names of
    `keys_of(group)` in `writes` a layer hands its keys and values on; with these names in `reads` it has no k and v
    projection of its own, and attends to the ones handed on. Empty: the layer shares none."""
    keys_as_values: bool = False
    """Whether the key projection, before norm and rotation, is also the values: there is no v projection (Gemma 4)."""
    value_norm: NormRule | None = None
    """An RMS norm of the values of each head, without a trained weight (Gemma 4). None: there is none."""

    def __post_init__(self) -> None:
        _check(self)

    def heads_of(self, model: ModelConfig) -> HeadSizes:
        """The heads of the layer's attention: its own, or those of the model."""
        if self.head_sizes is not None:
            return self.head_sizes
        return HeadSizes(model.num_attention_heads, model.num_key_value_heads, model.head_dim, model.head_dim)

    def width_of_mlp(self, model: ModelConfig) -> int:
        """The width of the layer's MLP: its own, or that of the model."""
        return self.mlp_width or model.intermediate_size


def _check(kind: LayerKind) -> None:
    """Raise ValueError for fields that exclude each other."""
    if "none" in (kind.mixer, kind.mlp) and (kind.mixer == kind.mlp or kind.parallel != "no"):
        raise ValueError("LayerKind.mixer, mlp: a layer has one of them, and parallel branches are two")
    if kind.stream is not None and kind.parallel != "no":
        raise ValueError("LayerKind.stream, parallel: a branch reads what the one before it wrote; use parallel no")
    if kind.weighted_inputs and kind.expert_bias:
        raise ValueError("LayerKind.weighted_inputs, expert_bias: a bias is no part of what experts read")
    if kind.slopes and kind.score_cap:
        raise ValueError("LayerKind.slopes, score_cap: no model says which of them comes first")
    if kind.value_norm is not None and kind.value_norm.weighted:
        raise ValueError("LayerKind.value_norm: must have no weight; use NormRule(..., weighted=False)")
    if kind.keys_as_values and kind.head_sizes and kind.head_sizes.head_dim != kind.head_sizes.value_dim:
        raise ValueError("LayerKind.keys_as_values, head_sizes: values are keys; make value_dim equal to head_dim")
    if kind.sub_norms and (kind.mixer != "attention" or kind.mlp != "dense"):
        raise ValueError("LayerKind.sub_norms: mixer attention and mlp dense have them")


def keys_of(group: str) -> tuple[str, str]:
    """Return the names under which the keys and values of a group of layers are handed on."""
    return f"keys.{group}", f"values.{group}"


READ_BY_LAYERS = frozenset(
    {
        *("mixer", "mlp", "norm", "norms", "mlp_norms", "parallel", "residual_multiplier", "sizes_from"),
        *("stream", "reads", "writes"),
    }
)
"""Fields of `LayerKind` that every mixer and MLP may have beside it. Classes name the others in their `READS`."""
OF_ATTENTION = frozenset(
    {
        *("head_sizes", "rotary", "window", "chunk", "qkv_bias", "qkv_clip", "out_bias"),
        *("qk_norm", "qk_norm_over", "qk_norm_rule", "qk_norm_after_rotary"),
        *("attention_scale", "score_cap", "slopes", "sinks", "value_factor", "temperature", "attention_dropout"),
        *("output_gate", "head_gate", "gate_activation", "sub_norms"),
        *("shared_keys", "keys_as_values", "value_norm"),
    }
)
"""Those that `megapar_models.attention.Attention` reads."""


@dataclass(frozen=True, kw_only=True)
class Ends:
    """What stands before the first layer and behind the last."""

    embedding_norm: NormRule | None = None
    """A norm of token embeddings."""
    embedding_multiplier: float = 1.0
    """The factor of token embeddings, rounded to their dtype (Gemma)."""
    head_bias: bool = False
    """A bias of the logits, `head.bias`."""
    logits: LogitRule = PLAIN_LOGITS
    """What becomes of the products of the head."""
    width: int = 0
    """The width of embeddings and of the head's input, between two projections. 0: that of the layers (OPT 350M)."""
    norm: bool = True
    """A norm before the head."""
    writes: tuple[Handed, ...] = ()
    """The tensors that the embedding hands on to layers beside the hidden states (`Stage.begin`)."""
    reads: tuple[str, ...] = ()
    """The tensors of layers that are read behind the last one (`Stage.end`)."""


def bundle_of(kinds: Sequence[LayerKind], ends: Ends) -> Bundle:
    """Return what layers of these kinds, in order, and the ends of their model hand on beside the hidden states."""
    stream = kinds[0].stream if kinds else None
    blocks = () if stream is None else stream.blocks_before(len(kinds))
    reads, writes = [kind.reads for kind in kinds], [kind.writes for kind in kinds]
    return Bundle(reads, writes, ends.writes, (*ends.reads, *blocks))
