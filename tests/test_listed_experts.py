"""`ListedExperts`: a mixture by the names of its fields, as drafts of `megapar new-family` have it."""

from dataclasses import replace
from typing import Any

import pytest
from megapar_models.families.mixtral import MixtralModel
from megapar_models.families.qwen3_moe import Qwen3MoeExperts
from megapar_models.listed_experts import ListedExperts

from megapar.base.errors import ConfigError

EXPERTS = ListedExperts(
    names={"experts": "num_experts", "of_token": "num_experts_per_tok", "width": "moe_intermediate_size"},
    always={"scoring_func": "sigmoid", "balance": "bias"},
    shared="shared",
    dense=("mlp_layer_types", "first_k_dense_replace"),
)
RAW: dict[str, Any] = {"experts": 6, "of_token": 2, "width": 20, "shared": 2, "num_hidden_layers": 3}
RAW |= {"mlp_layer_types": ["dense", "sparse", "sparse"], "first_k_dense_replace": 1, "intermediate_size": 76}


def model_of(raw: dict[str, Any]) -> MixtralModel:
    values, problems = EXPERTS.read(raw, "x")
    assert not problems
    return MixtralModel(moe=values["moe"], num_hidden_layers=3, intermediate_size=76)


def test_what_is_read_is_written() -> None:
    model = model_of(RAW)
    wanted = Qwen3MoeExperts(
        **{"num_experts": 6, "moe_intermediate_size": 20, "scoring_func": "sigmoid", "balance": "bias"},
        **{"shared_expert_intermediate_size": 40, "mlp_only_layers": (0,)},
    )
    assert model.moe == wanted
    fields: dict[str, Any] = {"model_type": "x", "num_hidden_layers": 3, "intermediate_size": 76}
    EXPERTS.write(model, fields)
    assert fields == {**RAW, "model_type": "x"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"experts": None}, "experts is missing"),
        ({"of_token": "two"}, "num_experts_per_tok='two' should be int"),
        ({"shared": 1.5}, "shared=1.5 should be a whole number"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types=['dense'] should list dense or sparse for each layer"),
        ({"mlp_layer_types": ["moe"] * 3}, "should list dense or sparse for each layer"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace=-1 should be a whole number from 0 on"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace=2 contradicts mlp_layer_types"),
    ],
)
def test_fields_that_say_no_mixture_are_refused(fields: dict[str, Any], said: str) -> None:
    problems = EXPERTS.read({**RAW, **fields}, "x")[1]
    assert any(said in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scoring_func": "softmax"}, "model.moe.scoring_func=softmax: sigmoid is the only value"),
        ({"norm_topk_prob": False}, "model.moe.norm_topk_prob=false: true is the only value"),
        ({"balance": "none"}, "model.moe.balance=none: its routers have a bias that selects experts"),
        ({"shared_expert_intermediate_size": 30}, "shared_expert_intermediate_size: should be a multiple of 20"),
        ({"mlp_only_layers": (1,)}, "model.moe.mlp_only_layers=1: this file can say of the first layers alone"),
    ],
)
def test_a_model_that_the_fields_cannot_hold_is_not_written(options: dict[str, Any], said: str) -> None:
    model = model_of(RAW)
    with pytest.raises(ConfigError) as refused:
        EXPERTS.write(replace(model, moe=replace(model.moe, **options)), {"model_type": "x"})
    assert said in str(refused.value)
