"""The grid of mixtures: every layout of experts trains as one process does. See tests/test_grid.py.

Fault slugs are in docs/faults.md.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megapar_models.build import build_stages
from megapar_models.counts import WholeModel
from megapar_models.stage import Stage
from torch import Tensor

from megapar.config.options import AdapterConfig
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from megapar.declare.params import spec_of
from megapar.expert_parallel import route
from megapar.launch.grid import grid_of
from tests.support import tiny_models
from tests.support.grid import DENSE_BETWEEN, MIXTRAL, ONE, SAMPLES, SHARED, SIGMOID, Layout, check_on_ranks, name, of
from tests.support.sweeps import slow_but

# One expert for all tokens.
SINGLE = of(ONE, 1, num_experts=1)
BIASES = tiny_models.small(
    "gpt_oss",
    48,
    2,
    76,
    num_key_value_heads=2,
    head_dim=10,
    initializer_range=0.1,
    sliding_window=7,
    moe=replace(MIXTRAL.moe, num_experts=3),
)
# Layouts that have what no pair of options has (tests/test_grid.py covers pairs), and many by hand.
FEW = [
    Layout(MIXTRAL, tp=2, dp=4, ep=8, etp=1, micro_batch_size=3),  # three ranks hold no expert
    Layout(DENSE_BETWEEN, pp=3, micro_batch_size=4, partition=(1, 1, 1)),
    Layout(SINGLE, tp=2, dp=2, ep=2, etp=2, micro_batch_size=6),  # two ranks have columns of no expert
]
GRID = [
    Layout(MIXTRAL, dp=2, ep=2, micro_batch_size=3),
    Layout(MIXTRAL, tp=2, ep=2, etp=1, micro_batch_size=3),
    Layout(MIXTRAL, tp=2, micro_batch_size=3),
    Layout(ONE, dp=2, ep=2, micro_batch_size=6, recompute="full"),
    Layout(SIGMOID, dp=2, ep=2, micro_batch_size=2, zero_stage=0),
    Layout(SHARED, dp=4, ep=4, micro_batch_size=3),
    Layout(SHARED, tp=2, dp=2, ep=2, sequence_parallel=True, micro_batch_size=3),
    Layout(SIGMOID, tp=2, dp=2, ep=4, etp=1, sequence_parallel=True, micro_batch_size=3, recompute="full"),
    Layout(MIXTRAL, dp=4, ep=2, etp=2, micro_batch_size=3),
    Layout(ONE, dp=4, ep=1, etp=4, micro_batch_size=3, recompute="selective"),
    Layout(SHARED, tp=4, ep=2, etp=2, micro_batch_size=4),
    Layout(MIXTRAL, dp=2, pp=2, ep=2, micro_batch_size=2, recompute="full"),
    Layout(SHARED, dp=2, pp=2, vpp=2, schedule="interleaved", ep=2, micro_batch_size=3, partition=(0, 1, 1, 0)),
    Layout(MIXTRAL, dp=4, tp=2, ep=4, etp=2, sequence_parallel=True, micro_batch_size=3),
    Layout(SHARED, dp=4, tp=2, ep=2, etp=2, micro_batch_size=1, zero_stage=0),
    Layout(SIGMOID, dp=2, tp=2, pp=2, ep=2, etp=2, micro_batch_size=3),
    Layout(ONE, dp=4, pp=2, ep=4, micro_batch_size=3, order="pp-dp-cp-tp"),
    Layout(SIGMOID, pp=2, dp=2, ep=2, vpp=2, schedule="zb-v", micro_batch_size=3, partition=(0, 1, 1, 0)),
    Layout(SHARED, cp=2, ep=2, micro_batch_size=6),
    Layout(MIXTRAL, cp=4, ep=4, cp_attention="ring", micro_batch_size=6, recompute="full"),
    Layout(SIGMOID, cp=2, ep=2, cp_attention="ulysses", micro_batch_size=6),
    Layout(SHARED, cp=2, dp=2, tp=2, ep=4, etp=2, sequence_parallel=True, micro_batch_size=3, packed=True),
    Layout(SHARED, cp=2, pp=2, dp=2, ep=2, micro_batch_size=2, partition=(1, 1)),
    Layout(BIASES, tp=2, dp=4, ep=4, etp=2, micro_batch_size=3),
    Layout(BIASES, tp=2, dp=4, ep=4, etp=2, micro_batch_size=3, zero_stage=3),
    Layout(BIASES, dp=4, ep=2, etp=2, micro_batch_size=3, adapter=AdapterConfig(rank=4)),
    Layout(of(MIXTRAL, num_experts=3), tp=2, dp=4, ep=4, etp=2, micro_batch_size=3, adapter=AdapterConfig(rank=4)),
]


@pytest.mark.gpus
@pytest.mark.parametrize("layout", [*FEW, *(pytest.param(layout, marks=pytest.mark.slow) for layout in GRID)], ids=name)
def test_layout_of_experts_changes_nothing(layout: Layout) -> None:
    """Faults moe-norm-leaves-out-experts, moe-gradients-doubled-without-replicas, moe-replicas-drift,
    no-expert-to-cut."""
    check_on_ranks(layout)


def all_to_expert_zero(scores_te: Tensor, rule: route.RouterRule, bias_e: Tensor | None = None) -> Tensor:
    return torch.arange(rule.top_k, device=scores_te.device).expand(scores_te.shape[0], -1)


FORCED = of(MIXTRAL, router_z_loss_coef=0.02)


@pytest.mark.gpus
@pytest.mark.parametrize(
    "layout",
    slow_but(
        [1],
        [
            Layout(FORCED, dp=4, ep=4, micro_batch_size=3),
            Layout(FORCED, tp=2, dp=2, ep=2, micro_batch_size=3, recompute="full"),
        ],
    ),
    ids=name,
)
def test_all_tokens_to_the_same_experts(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of five experts get every token, so some ranks compute nothing. Nothing waits, and nothing is NaN."""
    monkeypatch.setattr(route, "select", all_to_expert_zero)
    check_on_ranks(layout)


LAGGED = of(MIXTRAL, router_aux_loss_coef=0.5, router_z_loss_coef=0.1)
BY_SAMPLE = of(SHARED, router_aux_loss_coef=0.5, router_z_loss_coef=0.1)
# As DeepSeek-V3 trains: a bias that moves, and a loss by the scores of each sample.
BESIDE_BIAS = of(SIGMOID, balance="bias+sequence", router_aux_loss_coef=0.5)


def no_language_loss(stage: Stage, x_sbh: Tensor, batch: MicroBatch) -> Tensor:
    return 0.0 * language_loss(stage, x_sbh, batch)


language_loss = Stage.loss


@pytest.mark.gpus
@pytest.mark.parametrize(
    "layout",
    slow_but(
        [0, 3],
        [
            Layout(LAGGED, dp=2, ep=2, micro_batch_size=3, recompute="full"),
            Layout(BY_SAMPLE, tp=2, dp=2, ep=2, sequence_parallel=True, micro_batch_size=3),
            Layout(BY_SAMPLE, cp=2, pp=2, ep=2, micro_batch_size=2, partition=(1, 1)),
            Layout(BESIDE_BIAS, cp=2, pp=2, ep=2, micro_batch_size=2, partition=(1, 1)),
            Layout(BESIDE_BIAS, tp=2, cp=2, ep=2, micro_batch_size=3, recompute="full"),
            Layout(BESIDE_BIAS, tp=2, dp=2, ep=2, etp=2, sequence_parallel=True, micro_batch_size=3, zero_stage=1),
        ],
    ),
    ids=name,
)
def test_losses_of_routers_alone_train_as_in_one_process(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault moe-balance-loss-scaled: with the language loss turned off, every gradient comes from routers."""
    monkeypatch.setattr(Stage, "loss", no_language_loss)
    check_on_ranks(layout)


@pytest.mark.parametrize(("ep", "etp"), [(4, 1), (2, 2), (1, 4), (8, 1), (4, 2)])
def test_no_rank_holds_all_experts(ep: int, etp: int) -> None:
    """Experts are divided by ep and etp to the element, and so are their gradients and optimizer state."""
    layout = Layout(SHARED, tp=2, dp=4, ep=ep, etp=etp, micro_batch_size=3)
    config = layout.config()
    tensors = WholeModel(config.model).tensors()
    whole = sum(torch.Size(piece.shape).numel() for name, piece in tensors.items() if ".experts." in name)
    for rank in range(8):
        ctx = context.planned(grid_of(config), rank, device=torch.device("meta"))
        held = [
            param.numel()
            for stage in build_stages(config, ctx).values()
            for param in stage.parameters()
            if ".experts." in spec_of(param).name
        ]
        assert sum(held) == whole / (ep * etp)


@st.composite
def random_layouts(draw: st.DrawFn) -> Layout:
    """A layout of 2 to 8 ranks. Replicas with shared experts have equal numbers of micro-batches."""
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
    model = draw(st.sampled_from([MIXTRAL, SHARED, SIGMOID, ONE, SINGLE, BIASES]))
    # Windows need whole samples.
    forms = ["ulysses"] if model is BIASES else ["gather", "ring", "ulysses"]
    return Layout(
        model,
        tp=tp,
        cp=cp,
        dp=dp,
        pp=pp,
        ep=ep,
        etp=etp,
        cp_attention=draw(st.sampled_from(forms)) if cp > 1 else "gather",
        sequence_parallel=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        zero_stage=draw(st.sampled_from([0, 1, 2, 3])),
        micro_batch_size=draw(st.sampled_from([size for size in (1, 2, 3) if SAMPLES % (size * dp) == 0])),
        packed=draw(st.booleans()),
    )


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(layout=random_layouts())
def test_many_random_layouts_of_experts_change_nothing(layout: Layout) -> None:
    check_on_ranks(layout)
