"""Rules of mixtures of experts: against plain PyTorch, and in layouts against one process."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from megapar_models import reference as plain
from megapar_models.convert.upcycle import mixture_of
from megapar_models.families.mixtral import MIXTRAL as MIXTRAL_FAMILY
from megapar_models.families.mixtral import MixtralStage
from megapar_models.layer_kind import LayerKind
from megapar_models.moe import router_rule
from megapar_models.reference import Tensors, linear
from megapar_models.registry import presets, validate
from torch import Tensor

from megapar.base.errors import ConfigError
from megapar.config.model_options import ModelConfig
from megapar.config.options import AdapterConfig, Config, TrainConfig
from megapar.expert_parallel.route import RouterRule, scores, select, weights
from tests.support import grid
from tests.support.options import load
from tests.support.rules import check_against_plain
from tests.support.sweeps import slow_but
from tests.support.width import LAYOUTS, trains_as_one_process

LIMIT, EPSILON = 0.4, 0.2


class RulesStage(MixtralStage):
    """A dense layer, then experts as in gpt-oss, in DeepSeek-V2 and in DeepSeek-V3, with a shared expert."""

    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        clamped = replace(kind, activation="clamped_swiglu", activation_limit=LIMIT)
        rule = replace(router_rule(model.moe), n_group=4, topk_group=2)
        sigmoid = replace(rule, scoring_func="sigmoid", norm_epsilon=EPSILON, routed_scaling_factor=2.5)
        kinds = [
            replace(clamped, mlp="dense", mixture=None, mlp_bias=True),
            replace(clamped, expert_bias=True, router_bias=True, router_dtype="model"),
            replace(kind, router=replace(rule, group_score="best", zero_other_groups=True, norm_topk_prob=False)),
            replace(kind, router=replace(sigmoid, group_score="best_2"), activation="gelu"),
        ]
        return kinds[number % 4]


FAMILY = replace(MIXTRAL_FAMILY, name="rules", stage=RulesStage)
MODEL = replace(
    grid.of(grid.MIXTRAL, 4, num_experts=8, num_experts_per_tok=3, shared_expert_intermediate_size=24),
    family="tests.test_rules_experts:FAMILY",
)
CASES = {
    "tp 2 cuts experts": {**LAYOUTS["tp 2"], "etp": 2},
    "pp 2 with vpp 2": LAYOUTS["pp 2 with vpp 2"],
    "cp 2 deals experts, ZeRO-3": {**LAYOUTS["cp 2 with ZeRO-3"], "ep": 2},
}


@pytest.mark.parametrize("sizes", slow_but([0], CASES.values()), ids=list(CASES))
def test_experts_by_rules_train_as_in_one_process(sizes: dict[str, object]) -> None:
    trains_as_one_process(MODEL, sizes)


def clamped_mlp(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    gate = torch.clamp(linear(tensors, f"{name}.gate", x), max=LIMIT)
    up = torch.clamp(linear(tensors, f"{name}.up", x), -LIMIT, LIMIT)
    return linear(tensors, f"{name}.down", (up + 1) * gate * torch.sigmoid(1.702 * gate))


def plain_mlp(tensors: Tensors, number: int, name: str, x: Tensor) -> Tensor:
    if number <= 1:
        return clamped_mlp(tensors, name, x)
    act = torch.nn.functional.silu if number == 2 else torch.nn.functional.gelu
    gate = act(linear(tensors, f"{name}.gate", x))
    return linear(tensors, f"{name}.down", gate * linear(tensors, f"{name}.up", x))


def plain_weights(number: int, logits_te: Tensor) -> Tensor:
    """The weight of each expert for each token, [t, e], 0 for those that are not chosen."""
    if number == 1:
        best = logits_te.topk(3).indices
        return torch.zeros_like(logits_te).scatter(1, best, logits_te.gather(1, best).softmax(-1))
    scores = logits_te.softmax(-1) if number == 2 else logits_te.sigmoid()
    groups = scores.unflatten(1, (4, 2))
    by_group = groups.amax(-1) if number == 2 else groups.sum(-1)
    chosen_groups = torch.zeros_like(by_group).scatter(1, by_group.topk(2).indices, 1.0)
    best = (groups * chosen_groups[..., None]).flatten(1).topk(3).indices
    chosen = scores.gather(1, best)
    if number == 3:
        chosen = 2.5 * chosen / (chosen.sum(-1, keepdim=True) + EPSILON)
    return torch.zeros_like(scores).scatter(1, best, chosen)


def test_experts_by_rules_compute_what_they_say() -> None:
    """The loss and every gradient."""

    def mixture(tensors: Tensors, number: int, x: Tensor) -> Tensor:
        name = f"layers.{number}.mlp"
        logits = x @ tensors[f"{name}.router.weight"].t()
        if number == 1:
            logits = logits + tensors[f"{name}.router.logit_bias"]
        weights_e = plain_weights(number, logits.flatten(0, 1)).view_as(logits).unbind(-1)
        y = plain_mlp(tensors, number, f"{name}.shared", x)
        for expert, weight in enumerate(weights_e):
            y = y + weight[..., None] * plain_mlp(tensors, number, f"{name}.experts.{expert}", x)
        return y

    def logits(model: ModelConfig, tensors: Tensors, tokens_bs: Tensor) -> Tensor:
        x = tensors["embedding.weight"][tokens_bs]
        for number in range(4):
            name = f"layers.{number}"
            normed = plain.rms_norm(model, tensors, f"{name}.attention_norm", x)
            x = x + plain.attention(model, tensors, f"{name}.attention", normed)
            normed = plain.rms_norm(model, tensors, f"{name}.mlp_norm", x)
            mlp = mixture(tensors, number, normed) if number else clamped_mlp(tensors, f"{name}.mlp", normed)
            x = x + mlp
        return plain.rms_norm(model, tensors, "norm", x) @ tensors["head.weight"].t()

    check_against_plain(MODEL, logits, length=48, samples=6)  # so that every expert has a token


def test_the_other_groups_at_zero_may_win_over_negative_scores() -> None:
    """As in DeepSeek-V2; with -inf they never do."""
    bias = torch.tensor([-9.0, -9.5, -10.0, -10.0])
    rule = RouterRule(top_k=1, scoring_func="sigmoid", n_group=2, topk_group=1, group_score="best")
    scores_te = scores(torch.tensor([[4.0, 3.0, 0.0, 0.0]]), rule)
    assert select(scores_te, rule, bias).item() == 0
    assert select(scores_te, replace(rule, zero_other_groups=True), bias).item() == 2


def test_weights_are_divided_by_their_sum_and_epsilon() -> None:
    rule = RouterRule(top_k=2, scoring_func="sigmoid")
    indices = torch.tensor([[0, 1]])
    assert weights(scores(torch.full((1, 2), -100.0), rule), indices, rule).isfinite().all()
    score = 1 / (1 + math.exp(1.0))
    found = weights(scores(torch.full((1, 2), -1.0), rule), indices, replace(rule, norm_epsilon=EPSILON))
    assert found[0, 0].item() == pytest.approx(score / (2 * score + EPSILON))


@pytest.mark.parametrize(
    ("preset", "options", "words"),
    [
        ("deepseek-v3", {"topk_group": 3}, ""),  # 8 experts of a token, from 3 groups
        ("deepseek-v3", {"n_group": 256, "topk_group": 16}, "best 2 experts, and there are fewer in a group"),
        ("deepseek-v2-lite", {"n_group": 64, "topk_group": 8}, ""),
        ("mixtral-8x7b", {"n_group": 4, "topk_group": 3}, "so topk_group must divide; use 3 or 6"),
    ],
)
def test_groups_have_the_experts_that_their_scores_add(preset: str, options: dict[str, int], words: str) -> None:
    flags = [text for name, value in options.items() for text in (f"--model.moe.{name}", str(value))]
    config = load(["--config", str(presets()[preset]), *flags]).config
    if not words:
        validate(config, 1)
        return
    with pytest.raises(ConfigError, match=words):
        validate(config, 1)


# One expert a token


def of_one_expert(**moe: Any) -> Config:
    """The options of a model whose router chooses one expert of a token."""
    return Config(model=grid.of(grid.MIXTRAL, num_experts_per_tok=1, **moe), train=TrainConfig(seq_length=24))


@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
def test_a_router_without_a_gradient_is_not_trained(scoring_func: str) -> None:
    """Fault weight-of-one-expert: its weight is 1 whatever the router says."""
    config = of_one_expert(scoring_func=scoring_func)
    with pytest.raises(ConfigError, match=r"use norm_topk_prob false \(--model\.moe\.no_norm_topk_prob\)") as refused:
        validate(config, 1)
    assert "\n" not in str(refused.value)
    validate(config, 1, trains=False)
    validate(of_one_expert(scoring_func=scoring_func, norm_topk_prob=False), 1)
    for patterns, trained in ((("*.attention.*", "norm.*"), False), (("layers.1.mlp.*",), True)):
        frozen = replace(config, train=replace(config.train, trainable=patterns))
        if trained:
            with pytest.raises(ConfigError, match="never learn"):
                validate(frozen, 1)
        else:
            validate(frozen, 1)
    validate(replace(config, adapter=AdapterConfig(rank=4)), 1)
    validate(of_one_expert(num_experts=1), 1)  # there is nothing to choose


def test_a_mixture_that_would_never_learn_is_not_made() -> None:
    """Fault weight-of-one-expert."""
    with pytest.raises(ConfigError, match="--experts_per_token 1: the weight of a single expert"):
        mixture_of(Config(model=grid.LLAMA), "mixtral", 4, 1, 1234)
