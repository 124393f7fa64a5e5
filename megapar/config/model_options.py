"""The options of a model: those of every family. A family may have more, as the fields of a subclass in its module."""

from dataclasses import dataclass, field
from typing import Literal

# Metadata of an option of `model`: what its value decides. Without them it decides the weights (compatible.py).
OF_FUNCTION = {"decides": "function"}
OF_TRAINING = {"decides": "training"}


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts (arXiv 2401.04088, 2412.19437), in Hugging Face's names where it has them."""

    num_experts: int = 0
    """Experts of a layer; 0: a model without experts. Need not be a multiple of parallel.ep."""
    num_experts_per_tok: int = field(default=2, metadata=OF_FUNCTION)
    """Experts that each token is sent to."""
    moe_intermediate_size: int = 0
    """Width of an expert; 0 means model.intermediate_size. Must be a multiple of parallel.etp."""
    scoring_func: Literal["softmax", "sigmoid"] = field(default="softmax", metadata=OF_FUNCTION)
    """Turns the router's logits into scores: softmax over all experts, or the sigmoid of each by itself."""
    norm_topk_prob: bool = field(default=True, metadata=OF_FUNCTION)
    """Divide the scores of a token's experts by their sum, so that its weights add up to 1. With one expert a token its
    weight would always be 1, and its router would never learn: to train it, leave this off."""
    routed_scaling_factor: float = field(default=1.0, metadata=OF_FUNCTION)
    """The weights of a token's experts are multiplied by it."""
    n_group: int = field(default=1, metadata=OF_FUNCTION)
    """Experts are divided into so many groups of consecutive experts. A token's experts come from its topk_group best
    groups; 1: all experts are one group."""
    topk_group: int = field(default=1, metadata=OF_FUNCTION)
    """Number of groups that a token's experts may come from."""
    shared_expert_intermediate_size: int = 0
    """Width of the shared expert, which every token passes through beside its chosen ones; 0: there is none."""
    shared_expert_gate: bool = False
    """Multiply the shared expert's output by the sigmoid of a learned projection of the token."""
    balance: Literal["none", "sequence", "global", "bias", "bias+sequence", "micro_batch"] = "global"
    """What evens out the load of experts. sequence: a loss by the load of each sample. global: a loss by the load of
    all tokens of the step before. bias: no loss; a bias is added to scores when experts are chosen. bias+sequence: the
    bias and a loss by the scores of each sample, as DeepSeek-V3. none: nothing. micro_batch is refused, because its
    loss would depend on the layout."""
    router_aux_loss_coef: float = field(default=0.001, metadata=OF_TRAINING)
    """Weight of the loss of model.moe.balance sequence, global or bias+sequence."""
    router_bias_update_rate: float = field(default=0.001, metadata=OF_TRAINING)
    """With model.moe.balance bias or bias+sequence: how far the bias of an expert moves in a step (arXiv
    2408.15664); 0: it stays as it is."""
    router_z_loss_coef: float = field(default=0.0, metadata=OF_TRAINING)
    """Weight of log(sum exp(router logits))^2 in the loss. It keeps the router's logits small (ST-MoE, arXiv
    2202.08906, uses 1e-3)."""

    @property
    def has_selection_bias(self) -> bool:
        """Whether routers have a bias that selects experts."""
        return self.balance in ("bias", "bias+sequence")


@dataclass(frozen=True)
class ModelConfig:
    """The transformer, in Hugging Face's config.json names: the options of every family."""

    family: str = "llama"
    """llama (also Mistral, Qwen): RMSNorm, RoPE, SwiGLU. mixtral, qwen3_moe, gpt_oss, deepseek, glm4_moe: with experts.
    gpt (GPT-2): LayerNorm, learned positions, GELU, biases. MODULE:NAME is a family of your own: NAME in the Python
    module MODULE, a megapar_models.family.Family."""
    hidden_size: int = 256
    """Width of the residual stream."""
    num_hidden_layers: int = 4
    """Number of transformer layers over all pipeline stages."""
    num_attention_heads: int = 4
    """Query heads; a multiple of parallel.tp."""
    num_key_value_heads: int = 0
    """Key and value heads, each shared by a group of query heads; 0 means num_attention_heads. May be fewer than
    parallel.tp."""
    head_dim: int = 0
    """Width of a head; 0 means hidden_size / num_attention_heads."""
    intermediate_size: int = 0
    """Width of the MLP; 0 means 4 * hidden_size. Must be a multiple of parallel.tp."""
    vocab_size: int = 0
    """Number of token ids; 0 means the tokenizer's. In memory it is padded to a multiple of 128, which changes no
    result."""
    # A limit of train.seq_length. A family of learned positions declares that it is a size (`sizes_of_weights`).
    max_position_embeddings: int = field(default=2048, metadata=OF_TRAINING)
    """Longest sequence; for gpt also the rows of the position table."""
    hidden_act: Literal["auto", "silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "xielu"] = "auto"
    """Activation of the MLP. In llama it is that of the gate. auto: silu for llama, gelu_pytorch_tanh for gpt."""
    rms_norm_eps: float = field(default=1e-5, metadata=OF_FUNCTION)
    """Added to the mean square (llama) or the variance (gpt, Hugging Face's layer_norm_epsilon) in norms."""
    tie_word_embeddings: bool = False
    """Input embedding and output head are one matrix."""
    head: Literal["vocabulary", "score"] = "vocabulary"
    """What is computed of each token at the end. vocabulary: the logits of the next one. score: one number, as a reward
    model does (docs/preferences.md)."""
    initializer_range: float = field(default=0.02, metadata=OF_TRAINING)
    """Standard deviation of initial weights; output projections start at it divided by sqrt(2 * num_hidden_layers)."""
    num_nextn_predict_layers: int = 0
    """Layers of multi-token prediction behind the last one (arXiv 2412.19437, section 2.2). Each predicts a token
    further ahead, and learns by a loss of its own. 0: none. docs/multi-token.md has the families."""
    mtp_loss_weight: float = field(default=0.1, metadata=OF_TRAINING)
    """Weight of the mean of the losses mtp_1, mtp_2, ... DeepSeek-V3 has 0.3 for most of its tokens, and then 0.1."""
    mtp_detach: bool = field(default=False, metadata=OF_TRAINING)
    """Whether the losses of multi-token prediction give no gradient to the head, and to the embedding only the gradient
    that comes through the layers of the model."""

    @property
    def experts(self) -> MoEConfig | None:
        """The options of the layers with experts. None: the family has no such layers."""
        return None

    @property
    def head_rows(self) -> int:
        """Rows of the head's matrix, without padding."""
        return self.vocab_size if self.head == "vocabulary" else 1

    @property
    def key_width(self) -> int:
        """The width of a head's query and key. Narrower values are padded to it on a GPU."""
        return self.head_dim

    @property
    def value_width(self) -> int:
        """The width of a head's value."""
        return self.head_dim

    @property
    def embeds_on_last_stage(self) -> bool:
        """Whether the last stage embeds tokens too, as multi-token prediction does."""
        return self.num_nextn_predict_layers > 0

    @property
    def all_layers(self) -> int:
        """The number of layers with those of multi-token prediction, whose numbers follow on the others'."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @property
    def optimizers_of_layers(self) -> tuple[str, ...]:
        """The optimizers that layers name for parameters of their own (`Sharding.optimizer`).

        Only those that join the parts of matrices must be here (`megapar.optimizer.base.Optimizer.JOINS_MATRICES`).
        """
        return ()

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 in a model without them."""
        if self.experts is None:
            return 0
        return self.experts.num_experts


@dataclass(frozen=True)
class MixtureModel(ModelConfig):
    """The options of a family with experts."""

    moe: MoEConfig = field(default_factory=MoEConfig)
    """Mixture of experts."""

    @property
    def experts(self) -> MoEConfig | None:
        return self.moe


@dataclass(frozen=True)
class MaybeMixtureModel(MixtureModel):
    """The options of a family whose models may have experts: those with model.moe.num_experts above 0."""

    @property
    def experts(self) -> MoEConfig | None:
        return self.moe if self.moe.num_experts else None
