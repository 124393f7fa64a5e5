"""The grid of mixtures: every layout of experts trains as one process does. See tests/test_grid.py.

Fault slugs are in docs/faults.md.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megapar_models.build import build_stages, logical_tensors
from torch import Tensor

from megapar import context
from megapar.config import ModelConfig, MoEConfig
from megapar.expert_parallel import route
from megapar.params import spec_of
from megapar.train.grid import with_grid
from tests.support.grid import LLAMA, MODELS, SAMPLES, Layout, check_on_ranks, name

# Balance by the load of the step before, and a z-loss.
MIXTRAL = replace(
    LLAMA,
    family="mixtral",
    num_hidden_layers=2,
    attention_bias=False,
    qk_norm=False,
    moe=MoEConfig(
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        router_aux_loss_coef=0.05,
        router_z_loss_coef=0.01,
    ),
)


def of(model: ModelConfig, layers: int = 2, **options: Any) -> ModelConfig:
    return replace(model, num_hidden_layers=layers, moe=replace(model.moe, **options))


# Balance by sample, a gated shared expert.
SHARED = of(
    MIXTRAL,
    num_experts=8,
    num_experts_per_tok=3,
    balance="sequence",
    norm_topk_prob=False,
    shared_expert_intermediate_size=24,
    shared_expert_gate=True,
)
# As DeepSeek-V3 routes: sigmoids, groups, a bias and no loss.
SIGMOID = of(
    MIXTRAL,
    num_experts=8,
    scoring_func="sigmoid",
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    balance="bias",
    router_aux_loss_coef=0.001,
    router_bias_update_rate=0.02,
)
ONE = of(MIXTRAL, num_experts_per_tok=1, norm_topk_prob=False)
# Three layers, of which one is a plain MLP and a pipeline stage of its own.
DENSE_BETWEEN = of(MIXTRAL, layers=3, num_experts=8, mlp_only_layers=(1,))
DENSE_BETWEEN = replace(DENSE_BETWEEN, family="qwen3_moe", qk_norm=True)
NAMES = {MIXTRAL: "mixtral", SHARED: "shared", SIGMOID: "sigmoid", ONE: "one", DENSE_BETWEEN: "dense_between"}

GRID = [
    Layout(MIXTRAL, dp=2, ep=2, micro_batch_size=3),
    Layout(MIXTRAL, tp=2, ep=2, etp=1, micro_batch_size=3),
    Layout(MIXTRAL, tp=2, micro_batch_size=3),
    Layout(ONE, dp=2, ep=2, micro_batch_size=6, recompute="full"),
    Layout(SIGMOID, dp=2, ep=2, micro_batch_size=2, zero_stage=0),
    Layout(DENSE_BETWEEN, pp=3, micro_batch_size=4, partition=(1, 1, 1)),
    Layout(SHARED, dp=4, ep=4, micro_batch_size=3),
    Layout(SHARED, tp=2, dp=2, ep=2, sequence_parallel=True, micro_batch_size=3),
    Layout(SIGMOID, tp=2, dp=2, ep=4, etp=1, sequence_parallel=True, micro_batch_size=3, recompute="full"),
    Layout(MIXTRAL, dp=4, ep=2, etp=2, micro_batch_size=3),
    Layout(ONE, dp=4, ep=1, etp=4, micro_batch_size=3, recompute="selective"),
    Layout(SHARED, tp=4, ep=2, etp=2, micro_batch_size=4),
    Layout(MIXTRAL, dp=2, pp=2, ep=2, micro_batch_size=2, recompute="full"),
    Layout(SHARED, dp=2, pp=2, vpp=2, schedule="interleaved", ep=2, micro_batch_size=3, partition=(0, 1, 1, 0)),
    Layout(MIXTRAL, tp=2, dp=4, ep=8, etp=1, micro_batch_size=3),  # three ranks hold no expert
    Layout(MIXTRAL, dp=4, tp=2, ep=4, etp=2, sequence_parallel=True, micro_batch_size=3),
    Layout(SHARED, dp=4, tp=2, ep=2, etp=2, micro_batch_size=1, zero_stage=0),
    Layout(SIGMOID, dp=2, tp=2, pp=2, ep=2, etp=2, micro_batch_size=3),
    Layout(ONE, dp=4, pp=2, ep=4, micro_batch_size=3, order="pp-dp-cp-tp"),
    Layout(SHARED, cp=2, ep=2, micro_batch_size=6),
    Layout(MIXTRAL, cp=4, ep=4, cp_attention="ring", micro_batch_size=6, recompute="full"),
    Layout(SIGMOID, cp=2, ep=2, cp_attention="ulysses", micro_batch_size=6),
    Layout(SHARED, cp=2, dp=2, tp=2, ep=4, etp=2, sequence_parallel=True, micro_batch_size=3, packed=True),
    Layout(SHARED, cp=2, pp=2, dp=2, ep=2, micro_batch_size=2, partition=(1, 1)),
]


def name_of(layout: Layout) -> str:
    MODELS.update(NAMES)
    return name(layout)


@pytest.mark.gpus
@pytest.mark.parametrize("layout", GRID, ids=name_of)
def test_layout_of_experts_changes_nothing(layout: Layout) -> None:
    check_on_ranks(layout)


def all_to_expert_zero(logits_te: Tensor, rule: route.RouterRule, bias_e: Tensor | None = None) -> Tensor:
    return torch.arange(rule.top_k, device=logits_te.device).expand(logits_te.shape[0], -1)


FORCED = of(MIXTRAL, router_z_loss_coef=0.02)


@pytest.mark.gpus
@pytest.mark.parametrize(
    "layout",
    [
        Layout(FORCED, dp=4, ep=4, micro_batch_size=3),
        Layout(FORCED, tp=2, dp=2, ep=2, micro_batch_size=3, recompute="full"),
    ],
    ids=name_of,
)
def test_all_tokens_to_the_same_experts(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of five experts get every token, so that some ranks compute nothing. Nothing waits, and nothing is NaN."""
    monkeypatch.setattr(route, "select", all_to_expert_zero)
    check_on_ranks(layout)


@pytest.mark.parametrize(("ep", "etp"), [(4, 1), (2, 2), (1, 4), (8, 1), (4, 2)])
def test_no_rank_holds_all_experts(ep: int, etp: int) -> None:
    """Experts are divided by ep and etp to the element, and so are their gradients and optimizer state."""
    layout = Layout(SHARED, tp=2, dp=4, ep=ep, etp=etp, micro_batch_size=3)
    config = layout.config()
    whole = sum(
        torch.Size(piece.shape).numel() for name, piece in logical_tensors(config.model).items() if ".experts." in name
    )
    plan = with_grid(context.planned, config)
    for rank in range(8):
        ctx = plan(rank, device=torch.device("meta"))
        held = [
            param.numel()
            for stage in build_stages(config, ctx).values()
            for param in stage.parameters()
            if ".experts." in spec_of(param).name
        ]
        assert sum(held) == whole / (ep * etp)


@st.composite
def random_layouts(draw: st.DrawFn) -> Layout:
    """A layout of 2 to 8 ranks. Replicas that share experts have equal numbers of micro-batches."""
    sizes = [
        (1, 1, 4, 1),
        (2, 1, 2, 1),
        (2, 2, 1, 1),
        (1, 2, 2, 1),
        (4, 1, 1, 1),
        (2, 1, 4, 1),
        (2, 2, 2, 1),
        (1, 2, 2, 2),
    ]
    tp, cp, dp, pp = draw(st.sampled_from(sizes))
    ranks = tp * cp * dp
    ep = draw(st.sampled_from([n for n in (1, 2, 4, 8) if ranks % n == 0]))
    etp = draw(st.sampled_from([n for n in (1, 2, 4) if ranks % (ep * n) == 0]))
    return Layout(
        draw(st.sampled_from([MIXTRAL, SHARED, SIGMOID, ONE])),
        tp=tp,
        cp=cp,
        dp=dp,
        pp=pp,
        ep=ep,
        etp=etp,
        cp_attention=draw(st.sampled_from(["gather", "ring", "ulysses"])) if cp > 1 else "gather",
        sequence_parallel=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        zero_stage=draw(st.sampled_from([0, 1])),
        micro_batch_size=draw(st.sampled_from([size for size in (1, 2, 3) if SAMPLES % (size * dp) == 0])),
        packed=draw(st.booleans()),
    )


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(layout=random_layouts())
def test_many_random_layouts_of_experts_change_nothing(layout: Layout) -> None:
    check_on_ranks(layout)
