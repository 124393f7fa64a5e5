"""Faults to plant in the running code of a layout, each as somebody has written it or could have.

A comparison would prove nothing if it saw none of them. Each fault replaces a function of this project in the processes
of the ranks, and nowhere else: the reference and the comparison stay as they are.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from megapar_models.families.deepseek import DeepseekExperts, DeepseekModel
from megapar_models.families.gpt import GPTModel
from megapar_models.families.gpt_oss import GptOssModel
from megapar_models.families.llama import LlamaModel
from megapar_models.families.mixtral import MixtralModel

from megapar.base.errors import ConfigError
from megapar.base.grid import TIED_AXIS
from megapar.config.model_options import ModelConfig, MoEConfig
from tests.support import plants_of_layers as layers
from tests.support import plants_of_ranks as ranks
from tests.support.plants_of_ranks import Patch, Wrap

# The models that planted faults bring where that of the configuration would not show them.
_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 76,
    "vocab_size": 131,
}
_DENSE = LlamaModel(**_SIZES, family="llama", num_hidden_layers=4, qk_norm=True)
_EXPERTS = MoEConfig(num_experts=5, moe_intermediate_size=40, router_aux_loss_coef=0.05, router_z_loss_coef=0.01)
_LATENT = DeepseekModel(
    **{**_SIZES, "num_key_value_heads": 0, "head_dim": 6},
    family="deepseek",
    num_hidden_layers=2,
    q_lora_rank=20,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    v_head_dim=8,
    moe=DeepseekExperts(num_experts=5, moe_intermediate_size=24, first_k_dense_replace=1),
)
MODELS = {
    "dense": _DENSE,
    "six-layers": replace(_DENSE, num_hidden_layers=6),
    "straddling": replace(_DENSE, num_attention_heads=6, num_key_value_heads=3),
    "tied": replace(_DENSE, tie_word_embeddings=True),
    "experts": MixtralModel(**_SIZES, family="mixtral", num_hidden_layers=2, moe=_EXPERTS),
    "windows": GptOssModel(**_SIZES, family="gpt_oss", num_hidden_layers=2, sliding_window=7, moe=_EXPERTS),
    "latent": _LATENT,
    "multi-token": replace(_LATENT, num_nextn_predict_layers=1),
    "dropout": GPTModel(
        family="gpt",
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=131,
        max_position_embeddings=64,
        attention_dropout=0.1,
        hidden_dropout=0.1,
    ),
}


@dataclass(frozen=True)
class Plant:
    """A fault by name. `sentence` says what somebody has done wrong.

    It shows in `layouts`. A model shows it if it `serves`; otherwise the program takes its model `model`. `options` are
    further options, by dotted path.
    """

    name: str
    sentence: str
    layouts: tuple[str, ...]
    patch: Callable[[Patch, int], None]
    model: str = "dense"
    serves: Callable[[ModelConfig], bool] = lambda model: True
    options: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def planted(self, rank: int) -> Iterator[None]:
        """A context with the fault in the code of this process. `rank` is the number of this rank."""
        with ExitStack() as stack:

            def patch(owner: Any, name: str, wrap: Wrap) -> None:
                original = getattr(owner, name)
                setattr(owner, name, wrap(original))
                stack.callback(setattr, owner, name, original)

            self.patch(patch, rank)
            yield


def find(name: str) -> Plant:
    """Return the fault called `name`. Raises ConfigError for an unknown name."""
    for plant in PLANTS:
        if plant.name == name:
            return plant
    near = get_close_matches(name, [plant.name for plant in PLANTS], n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else "--plant list prints their names"
    raise ConfigError(f"--plant {name}: no such fault; {hint}")


def _has_experts(model: ModelConfig) -> bool:
    return model.num_experts > 1


def _is_tied(model: ModelConfig) -> bool:
    return model.tie_word_embeddings


def _has_key_value_heads(model: ModelConfig) -> bool:
    return model.num_key_value_heads != 1


def _has_six_layers(model: ModelConfig) -> bool:
    return model.num_hidden_layers >= 6


def _has_attention_dropout(model: ModelConfig) -> bool:
    return bool(getattr(model, "attention_dropout", 0.0))  # an option of some families


def _has_window(model: ModelConfig) -> bool:
    return bool(getattr(model, "sliding_window", 0))


def _predicts_further(model: ModelConfig) -> bool:
    return model.num_nextn_predict_layers > 0


def _has_latents(model: ModelConfig) -> bool:
    return bool(getattr(model, "kv_lora_rank", 0))


def _never(model: ModelConfig) -> bool:
    return False


PLANTS = (
    # Name, what somebody has done wrong, layouts, the fault, and what model it needs.
    Plant("tp-row-sum-missing", "no sum over tp after a row-parallel layer", ("tp2",), ranks.no_row_sum),
    Plant(
        "tp-input-gradient-sum-missing", "no sum over tp of an input's gradient", ("tp2",), ranks.no_input_gradient_sum
    ),
    Plant(
        "sp-norm-gradient-sum-missing", "gradients of norms not summed over tp", ("tp2,sp",), ranks.no_sum_over("tp")
    ),
    Plant(
        "kv-head-sum-missing",
        "gradients of heads that two ranks hold not summed",
        ("tp2",),
        ranks.no_head_sum,
        "straddling",
        _never,
    ),
    Plant("weights-by-rank", "initial weights drawn with the rank's number", ("tp2",), ranks.seed_by_rank),
    Plant(
        "dropout-mask-by-rank",
        "each rank numbers its heads from 0",
        ("tp2",),
        ranks.heads_from_zero,
        "dropout",
        _has_attention_dropout,
    ),
    Plant("dp-gradient-averaged", "gradients divided by dp once more", ("dp2,zero1",), ranks.averaged),
    Plant("dp-bucket-not-reduced", "the last bucket is never reduced", ("dp2,zero1",), ranks.last_bucket_kept),
    Plant("loss-divisor-local", "each replica divides by its own tokens", ("dp2",), ranks.local_divisor),
    Plant("replicas-read-the-same", "all replicas train on the same samples", ("dp2",), ranks.same_samples),
    Plant("main-gradient-in-bf16", "micro-batches added in bf16", ("dp2,zero1",), ranks.rounded_sums),
    Plant("zero1-weights-stale", "updated weights not gathered", ("dp2,zero1",), ranks.weights_not_gathered),
    Plant("zero2-unit-added-twice", "the first sum of a unit added twice", ("dp2,zero2",), ranks.first_sum_twice),
    Plant(
        "zero3-weights-stale", "gathers send weights of before the update", ("dp2,zero3",), ranks.weights_before_update
    ),
    Plant(
        "zero3-weights-released-early",
        "memory of weights freed while they are in use",
        ("dp2,zero3",),
        ranks.weights_freed,
    ),
    Plant(
        "shard-copies-not-summed", "groups of shard_ranks not summed", ("dp2,zero1,shard1",), ranks.copies_not_summed
    ),
    Plant(
        "tied-embedding-sum-missing",
        "gradients of both ends not summed",
        ("pp2",),
        ranks.no_sum_over(TIED_AXIS),
        "tied",
        _is_tied,
    ),
    Plant("micro-batch-dropped", "the last micro-batch is never run", ("pp2",), ranks.one_less),
    Plant(
        "documents-lost-in-middle",
        "stages in the middle do not know where documents begin",
        ("pp3",),
        ranks.documents_lost,
        options={"data.documents": "apart"},
    ),
    Plant("micro-batch-counted-twice", "the first micro-batch is run again", ("pp2",), ranks.one_twice),
    Plant("weight-gradient-skipped", "W leaves out its first matrix", ("pp2,zb-h1",), ranks.first_weight_gradient_lost),
    Plant(
        "vpp-chunks-swapped",
        "stages of a rank in another order",
        ("pp2,vpp3",),
        ranks.chunks_swapped,
        "six-layers",
        _has_six_layers,
    ),
    Plant("cp-positions-local", "positions counted from 0 on each rank", ("cp2",), layers.positions_from_zero),
    Plant(
        "mtp-targets-rolled",
        "tokens further ahead rolled over the end of a rank's positions",
        ("cp2,gather",),
        layers.later_tokens_rolled,
        "multi-token",
        _predicts_further,
    ),
    Plant("cp-mask-contiguous", "mask of a rank with one run of positions", ("cp2,gather",), layers.contiguous_chunks),
    Plant("cp-key-gradients-local", "keys' gradients not summed over cp", ("cp2,gather",), layers.key_gradients_kept),
    Plant("ring-direction-wrong", "keys taken for those of the next rank", ("cp3,ring",), layers.other_direction),
    Plant(
        "ulysses-kv-order",
        "key/value heads sent in reverse",
        ("cp2,ulysses",),
        layers.heads_reversed,
        "dense",
        _has_key_value_heads,
    ),
    Plant(
        "window-forgotten",
        "layers with a window read all keys if there are cp ranks",
        ("cp2,ulysses",),
        layers.window_forgotten,
        "windows",
        _has_window,
    ),
    Plant(
        "window-one-key-longer",
        "a window ends one key too late",
        ("dp2",),
        layers.window_longer,
        "windows",
        _has_window,
    ),
    Plant(
        "sinks-of-first-heads",
        "each cp rank takes the sinks of the first heads for its own",
        ("cp2,ulysses",),
        layers.sinks_of_first_heads,
        "windows",
        _never,
    ),
    Plant(
        "latent-key-gradient-local",
        "the gradient of the key that heads share not summed over tp",
        ("tp2",),
        layers.copies_summed_nowhere,
        "latent",
        _has_latents,
    ),
    Plant(
        "expert-rows-not-sorted",
        "arrived rows not sorted by expert",
        ("dp2,ep2",),
        layers.not_sorted,
        "experts",
        _has_experts,
    ),
    Plant(
        "expert-slices-not-summed",
        "results of an expert not summed over etp",
        ("tp2,etp2",),
        layers.slices_not_summed,
        "experts",
        _has_experts,
    ),
    Plant(
        "combine-weights-not-normed",
        "scores of experts not divided by their sum",
        ("dp2,ep2",),
        layers.norm_of_weights_forgotten,
        "experts",
        _never,
    ),
    Plant(
        "expert-gradient-scaled",
        "gradients of experts multiplied by ep",
        ("dp2,ep2,zero1",),
        layers.experts_scaled,
        "experts",
        _has_experts,
    ),
    Plant(
        "selection-bias-by-next-counts",
        "selection biases moved by the counts of the next expert",
        ("dp2,ep2",),
        layers.biases_by_next_counts,
        "experts",
        _never,
        {"model.moe.balance": "bias", "model.moe.router_aux_loss_coef": 0.001},
    ),
    Plant("clip-norm-counts-copies", "copies of tp ranks counted twice", ("tp2",), layers.copies_counted),
    Plant("norms-decayed", "weight decay of norms and biases", ("dp2,zero1",), layers.all_decayed),
    Plant("adam-step-off-by-one", "bias correction of the next step", ("dp2,zero1",), layers.one_step_later),
    Plant(
        "average-of-one-rank",
        "optimizer.ema moved on the first rank alone",
        ("dp2,zero1",),
        layers.average_of_one_rank,
        options={"optimizer.ema": 0.9},
    ),
    Plant(
        "frozen-parameter-trained",
        "train.trainable without effect",
        ("dp2",),
        layers.nothing_frozen,
        serves=_never,
        options={"train.trainable": ("layers.*",)},
    ),
    Plant(
        "whole-factor-not-summed",
        "gradients of adapters' whole factors not summed over tp",
        ("tp2",),
        ranks.no_sum_over("tp"),
        serves=_never,
        options={"adapter.rank": 4},
    ),
)
