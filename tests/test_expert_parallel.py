"""Expert parallelism on real ranks: dispatch and experts in every split against one process."""

import gc
import itertools
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megapar_kernels.activations import swiglu
from megapar_kernels.bounded_swiglu import clamped_swiglu
from megapar_kernels.grouped import RowGroups
from megapar_tools.verify import logical
from torch import Tensor

from megapar.activations import recompute
from megapar.base.grid import Grid, expert_rank_groups
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.load import fill
from megapar.checkpoint.save import publish, share, write_part
from megapar.config.options import OptimizerConfig
from megapar.declare import context
from megapar.declare.context import ParallelContext, single
from megapar.declare.optimizer_state import StateSlice
from megapar.declare.params import Init, selected, spec_of
from megapar.declare.random import initialize
from megapar.declare.sharding import Sharding
from megapar.expert_parallel import balance, dispatch, route
from megapar.expert_parallel.balance import Float32Products
from megapar.expert_parallel.experts import Experts
from megapar.expert_parallel.route import RouterRule
from megapar.expert_parallel.row_counts import experts_of
from megapar.linear.low_rank import LoraRule
from megapar.linear.torch_products import TorchProducts
from tests.support.distributed import run_ranks
from tests.support.flat import flatten
from tests.support.kernel_checks import DEVICE, needs_triton
from tests.support.mixture_runs import (
    CASES,
    SPLITS_OF_4,
    SPLITS_OF_8,
    check_against_one_process,
    check_runs,
    make_context,
    reference,
    train,
    world_of,
)
from tests.support.mixtures import HIDDEN, Case, Mixture, plain_mixture, small_mixture
from tests.support.sweeps import slow_but


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# Mixtures on ranks


def test_one_process_is_the_reference() -> None:
    for case in CASES:
        found = train(case, single(), micro_batches=2)
        check_against_one_process([found], case, "single")
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("part", slow_but([0], range(4)))
def test_every_split_of_four_ranks_equals_one_process(part: int) -> None:
    """Faults moe-expert-gradient-scaled, moe-router-gradient-partial, moe-empty-expert-uninitialized and
    moe-rank-without-tokens-hangs: outputs and every gradient, expert by expert."""
    every = [(i, j) for i in range(len(SPLITS_OF_4)) for j in range(len(CASES))]
    # In a part each split has a quarter of the cases, and each case a quarter of the splits.
    check_runs([(SPLITS_OF_4[i], CASES[j]) for i, j in every if (i + j + i // 4) % 4 == part])


def zero(case: Case) -> list[float]:
    """With ZeRO: the number of collectives over replicas of experts, the squared norm of this rank's gradients, and
    what a step of AdamW makes of its weights."""
    ctx = make_context({"dp": 4, "ep": 2, "etp": 1})
    mixture = small_mixture(case, ctx=ctx)
    flat = flatten([mixture], ctx, zero_stage=1, bucket_mb=0.001)
    flat.start_step()
    flat.gradients.begin()
    (mixture(case.inputs(ctx.world.rank)) * case.coefficients(ctx.world.rank)).sum().backward()
    flat.gradients.finish()
    counted = sum(flat.grads[start:stop].double().square().sum().item() for start, stop in flat.layout.norm_ranges())
    flat.optimizers(OptimizerConfig(zero_stage=1)).step(lr=0.1)
    calls = sum(ctx.expert_grad.traffic.calls.values())
    return [calls, counted, *(param.detach().double().square().sum().item() for param in mixture.parameters())]


def test_zero_over_replicas_of_experts_and_ranks_without_one() -> None:
    """Each gradient counts once in the norm, and replicas stay equal. In the first case ranks 0 and 2 hold no expert,
    and send each other no empty messages."""
    for case in (Case(num_experts=1, rule=RouterRule(top_k=1, norm_topk_prob=False)), Case()):
        ranks = run_ranks(4, zero, case)
        gradients = reference(case, 4, micro_batches=1)["weights"].values()
        expected = sum(gradient.square().sum().item() for gradient in gradients)
        assert sum(rank[1] for rank in ranks) == pytest.approx(expected, rel=1e-5)
        assert ranks[0][2:] == ranks[2][2:]
        assert ranks[1][2:] == ranks[3][2:]
        assert [rank[0] > 0 for rank in ranks] == [case.num_experts > 1, True] * 2


@pytest.mark.slow
def test_splits_of_eight_ranks_equal_one_process() -> None:
    """Ranks without an expert among them: 5 experts on 8 ranks."""
    check_runs([(split, case) for split in SPLITS_OF_8 for case in (CASES[0], CASES[2], CASES[4])])


def test_hosts_that_share_no_memory_agree() -> None:
    splits = [{"dp": 4, "ep": 4, "etp": 1}, {"dp": 4, "ep": 2, "etp": 2}]
    check_runs([(split, case) for split in splits for case in CASES[:2]], use_shared_memory=False)


@needs_triton
def test_rows_moved_by_kernels() -> None:
    """Interpreted: copies, permutations and sums of rows, and their gradients, in splits over ep and etp."""
    cases = [replace(case, impl="triton") for case in (CASES[0], CASES[1], CASES[4], CASES[7])]
    check_runs([(split, case) for split in (SPLITS_OF_4[2], SPLITS_OF_4[4]) for case in cases])


def ends_of_groups(splits: list[dict[str, int]], cases: list[Case]) -> list[tuple[list[int], list[int]]]:
    """Where each expert's rows end, on the device and by the numbers on the host."""
    found = []
    for split, case in itertools.product(splits, cases):
        mixture = small_mixture(case, ctx=make_context(split))
        for chunk in mixture.plan(mixture.route(case.inputs(dist.get_rank())).indices).chunks:
            assert chunk.groups.ends.dtype == torch.int32
            found.append((chunk.groups.ends.tolist(), list(itertools.accumulate(chunk.groups.sizes))))
    return found


def test_ends_of_groups_are_sums_of_their_sizes() -> None:
    splits = [SPLITS_OF_4[2], SPLITS_OF_4[3], SPLITS_OF_4[4]]
    for rank in run_ranks(4, ends_of_groups, splits, [CASES[0], CASES[1], CASES[4]]):
        for on_device, on_host in rank:
            assert on_device == on_host
            assert len(on_host) in (1, 2, 3, 5)


# Dispatch and experts by themselves


def directional_derivative(split: dict[str, int], case: Case) -> tuple[float, float]:
    """Of the sum of all ranks' losses, in one random direction of tokens, weights and experts: (exact, by differences).

    fp64, so differences are exact to about 1e-9.
    """
    ctx = make_context(split)
    mixture = small_mixture(case, torch.float64, ctx)
    rank = ctx.world.rank
    x = case.inputs(rank, dtype=torch.float64)
    routing = small_mixture(case).route(x.float())
    plan = mixture.plan(routing.indices)
    leaves = [x, routing.weights.detach().double(), *(param.detach() for param in mixture.experts.parameters())]
    # Replicas of an expert move alike, and ranks of etp move parts of their own.
    seed = ctx.ep.rank + 10 * ctx.etp.rank
    directions = [draw(*leaf.shape, seed=rank + 50, dtype=torch.float64) for leaf in leaves[:2]]
    directions += [draw(*leaf.shape, seed=seed, dtype=torch.float64) for leaf in leaves[2:]]

    def loss(values: list[Tensor]) -> Tensor:
        tokens, weights, gate_up, down = values
        parameters = {"gate_up": gate_up, "down": down}
        experts = partial(torch.func.functional_call, mixture.experts, parameters)
        returning = dispatch.compute(lambda *args: experts(args), dispatch.send(tokens, weights, plan), plan)
        out = dispatch.combine(returning, plan)
        return (out * case.coefficients(rank, dtype=torch.float64)).sum()

    moving = [leaf.requires_grad_() for leaf in leaves]
    gradients = torch.autograd.grad(loss(moving), moving, materialize_grads=True)
    exact = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    with torch.no_grad():
        step = 1e-5
        ahead = loss([leaf + step * d for leaf, d in zip(leaves, directions, strict=True)])
        behind = loss([leaf - step * d for leaf, d in zip(leaves, directions, strict=True)])
    return float(exact), float((ahead - behind) / (2 * step))


def derivatives(splits: list[dict[str, int]], case: Case) -> list[tuple[float, float]]:
    return [directional_derivative(split, case) for split in splits]


def test_derivatives_over_ranks_agree_with_differences() -> None:
    splits = [SPLITS_OF_4[2], SPLITS_OF_4[3], SPLITS_OF_4[4]]
    ranks = run_ranks(4, derivatives, splits, Case(tokens=(3, 0, 5, 2)))
    for number, split in enumerate(splits):
        exact = sum(rank[number][0] for rank in ranks)
        by_differences = sum(rank[number][1] for rank in ranks)
        assert exact == pytest.approx(by_differences, rel=1e-7), split


def test_gradcheck_of_a_round_trip() -> None:
    case = Case(num_experts=3, tokens=(4,), width=2)
    mixture = small_mixture(case, torch.float64)
    x = case.inputs(0, dtype=torch.float64)
    routing = small_mixture(case).route(x.float())
    plan = mixture.plan(routing.indices)
    weights = routing.weights.detach().double()
    assert torch.autograd.gradcheck(
        partial(mixture.mix, plan=plan), (x.requires_grad_(), weights.requires_grad_()), fast_mode=False
    )
    # Rows that go out and come back are the token, as often as it chose an expert.
    returning = dispatch.compute(lambda rows, *_: rows, dispatch.send(x, weights, plan), plan)
    torch.testing.assert_close(dispatch.combine(returning, plan), 2 * x)


def test_an_expanded_gradient() -> None:
    """Fault moe-expanded-gradient: the gradient of out.sum() has strides of 0."""
    gradients = []
    for weights in (None, torch.ones(9, 8)):
        sharding = Sharding.of(single(), torch.float32)
        init = Init("normal", 0.5)
        experts = Experts("experts", 3, 8, 8, sharding, activation=swiglu, init=init, output_init=init)
        initialize([experts], seed=1)
        rows = draw(9, 8).requires_grad_()
        out = experts(rows, torch.ones(9, 1), RowGroups.of([4, 0, 5]))
        (out.sum() if weights is None else (out * weights).sum()).backward()
        gradients.append([rows.grad, experts.gate_up.grad, experts.down.grad])
    for found, expected in zip(*gradients, strict=True):
        assert torch.equal(found, expected)


def test_a_weight_multiplies_all_of_a_result() -> None:
    """Biases and adapters among it, and recomputed. Each gradient is that of a product behind the experts."""
    init = Init("normal", 0.5)
    sharding = Sharding.of(single(), torch.float64)
    experts = Experts(
        *("experts", 3, 8, 6, sharding),
        activation=partial(clamped_swiglu, limit=0.8),
        init=init,
        output_init=init,
        bias=True,
        lora=LoraRule(2, 2.0),
        adapted=("gate", "up", "down"),
    )
    initialize([experts], seed=1)
    for number, param in enumerate(experts.parameters()):
        param.data.copy_(draw(*param.shape, seed=number, dtype=torch.float64))
    groups = RowGroups.of([4, 0, 3])
    rows, weights, upstream = (draw(7, width, seed=width, dtype=torch.float64) for width in (8, 1, 8))
    leaves = [rows.requires_grad_(), weights.requires_grad_(), *experts.parameters()]
    found = []
    recomputed = recompute.run(True, experts, rows, weights, groups)
    for y in (recomputed, experts(rows, torch.ones_like(weights), groups) * weights):
        found.append([y, *torch.autograd.grad(y, leaves, upstream)])
    assert len(leaves) == 12
    for ours, expected in zip(*found, strict=True):
        assert expected.any()
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_experts_without_rows_keep_what_earlier_micro_batches_added() -> None:
    """Fault moe-empty-expert-uninitialized: a stale gradient becomes zero, and one of this step stays."""
    case = Case(num_experts=3)
    mixture = small_mixture(case)
    flat = flatten([mixture], single(), zero_stage=0, bucket_mb=1)
    flat.start_step()
    main_grad = mixture.experts.down.main_grad.tensor.view(3, HIDDEN, case.width)  # type: ignore[attr-defined]
    experts = partial(mixture.experts, draw(4, HIDDEN), torch.ones(4, 1))
    experts(RowGroups.of([0, 4, 0])).sum().backward()
    assert not main_grad[[0, 2]].any()
    first = main_grad[1].clone()
    assert first.any()
    experts(RowGroups.of([4, 0, 0])).sum().backward()
    assert torch.equal(main_grad[1], first)
    assert main_grad[0].any()
    flat.start_step()
    experts(RowGroups.of([0, 0, 4])).sum().backward()
    assert not main_grad[:2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[4, 0, 5], [0, 0, 9], [0, 0, 0]], ids=str)
def test_products_of_groups_are_those_of_their_rows(rows: list[int], dtype: torch.dtype) -> None:
    x = draw(sum(rows), 16, dtype=dtype)
    grad = draw(sum(rows), 24, seed=1, dtype=dtype)
    weights = draw(3, 24, 16, seed=2, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    products = TorchProducts()
    y = products.grouped_forward(x, weights, RowGroups.of(rows))
    grad_x = products.grouped_input_gradient(grad, weights, RowGroups.of(rows))
    expected = [a @ w.t() for a, w in zip(x.double().split(rows), weights.double(), strict=True)]
    torch.testing.assert_close(y.double(), torch.cat(expected), rtol=tolerance, atol=tolerance)
    expected = [g @ w for g, w in zip(grad.double().split(rows), weights.double(), strict=True)]
    torch.testing.assert_close(grad_x.double(), torch.cat(expected), rtol=tolerance, atol=tolerance)


def traffic(split: dict[str, int], case: Case) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """By axis: (bytes counted in a forward and a backward pass, bytes by the numbers of tokens), by operation."""
    ctx = make_context(split)
    alone = small_mixture(case)
    world = range(ctx.world.size)
    chosen = [route.counts(alone.route(case.inputs(rank)).indices, case.num_experts) for rank in world]
    expert_sizes = {"etp": split["etp"], "ep": split["ep"], "expert_grad": len(world) // (split["etp"] * split["ep"])}
    groups = expert_rank_groups({"tp": 1, "cp": 1, "dp": len(world), "pp": 1}, expert_sizes, ["ep"])
    mine = experts_of(case.num_experts, ctx.ep)

    def brought_by(rank: int) -> int:
        """Rows received over ep by `rank`, a rank with parts of the same experts as this one."""
        (group,) = [group for group in groups if rank in group]
        return sum(int(chosen[source][mine.start : mine.stop].sum()) for source in group)

    own = int(chosen[ctx.world.rank].sum())
    own_to_self = int(chosen[ctx.world.rank][mine.start : mine.stop].sum())
    brought = [brought_by(rank) for rank in ctx.etp.ranks] if ctx.etp.size > 1 else [brought_by(ctx.world.rank)]
    here = brought[ctx.etp.rank]
    row = 4 * HIDDEN
    # There and back, each with its backward, which sends what the forward pass received. Weights travel there alone.
    over_ep = {"all_to_all": (2 * row + 4) * ((own - own_to_self) + (here - own_to_self))}
    over_etp = {"all_to_all": (2 * row + 4) * (here * (ctx.etp.size - 1) + sum(brought) - here)}
    if len(mine):
        over_etp["all_gather"] = 8 * len(mine) * ctx.ep.size * (ctx.etp.size - 1)
    over_ep["all_gather"] = 8 * case.num_experts * (ctx.ep.size - 1)
    small_mixture(case, ctx=ctx)(case.inputs(ctx.world.rank).requires_grad_()).sum().backward()
    expected = {"ep": over_ep, "etp": over_etp}
    return {axis.name: (dict(axis.traffic.sent), expected[axis.name]) for axis in (ctx.ep, ctx.etp) if axis.size > 1}


def traffics(splits: list[dict[str, int]], case: Case) -> list[dict[str, tuple[dict[str, int], dict[str, int]]]]:
    return [traffic(split, case) for split in splits]


def test_bytes_follow_from_the_numbers_of_tokens() -> None:
    splits = [SPLITS_OF_4[number] for number in (1, 2, 3, 4, 5)]
    for case in (CASES[0], CASES[4], Case(num_experts=3, tokens=(2, 0, 5, 3))):
        for rank in run_ranks(4, traffics, splits, case):
            for split, axes in zip(splits, rank, strict=True):
                assert axes
                for name, (found, expected) in axes.items():
                    assert found == expected, f"{split} {name}"


def in_flight(arriving: dispatch.Arriving) -> list[bool]:
    return [bool(part.pending._works) for part in [*arriving.rows, arriving.weights]]


def overlap(case: Case) -> list[bool]:
    """Whether the rows of all chunks, then their gradients, were on their way while the work in between ran."""
    ctx = make_context({"dp": 2, "ep": 2})
    mixture = small_mixture(case, ctx=ctx)
    x = case.inputs(ctx.world.rank).requires_grad_()
    routing = mixture.route(x)
    plan = mixture.plan(routing.indices)
    arriving = dispatch.send(x, routing.weights, plan)
    between = x * 2
    seen = [all(in_flight(arriving))]
    between.register_hook(lambda grad: seen.append(all(in_flight(arriving))))
    returning = dispatch.compute(mixture.experts, arriving, plan)
    assert not any(in_flight(arriving))
    out = dispatch.combine(returning, plan)
    (out + between).sum().backward()
    seen.append(not any(in_flight(arriving)))
    return seen


def test_work_runs_while_rows_travel_in_forward_and_in_backward() -> None:
    for chunks in (1, 2):
        assert run_ranks(2, overlap, Case(chunks=chunks)) == [[True, True, True]] * 2


# Recomputation


def recomputed(split: dict[str, int], case: Case) -> bool:
    """Whether recomputing nothing, the layer, and the experts alone gives the same bits. The router is left out of the
    third, so its numbers of rows are not sent again."""
    ctx = make_context(split)
    found = []
    for what in ("nothing", "layer", "experts"):
        mixture = small_mixture(case, ctx=ctx)
        x = case.inputs(ctx.world.rank).requires_grad_()
        before = ctx.ep.traffic.calls.get("all_gather", 0)
        if what == "experts":
            routing = mixture.route(x)
            out = recompute.run(True, mixture.mix, x, routing.weights, mixture.plan(routing.indices))
        else:
            out = recompute.run(what == "layer", mixture, x)
        (out * case.coefficients(ctx.world.rank)).sum().backward()
        calls = ctx.ep.traffic.calls["all_gather"] - before
        assert calls == (2 if what == "layer" else 1)
        found.append([out, x.grad, *(param.grad for param in mixture.parameters())])
    return all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def recomputations(splits: list[dict[str, int]], cases: list[Case]) -> list[bool]:
    return [recomputed(split, case) for split in splits for case in cases]


def test_recomputation_changes_no_bit() -> None:
    """Fault moe-selection-recomputed: with equal logits too."""
    splits = [SPLITS_OF_4[2], SPLITS_OF_4[4]]
    assert run_ranks(4, recomputations, splits, [CASES[0], CASES[1], CASES[6]]) == [[True] * 6] * 4


def test_a_recomputed_pass_keeps_the_experts_of_the_first() -> None:
    """Fault moe-selection-recomputed: its router would choose others."""
    mixture = small_mixture(Case(num_experts=8))
    x = Case().inputs(0).requires_grad_()
    chosen: list[Tensor] = []

    def layer(x: Tensor) -> Tensor:
        routing = mixture.route(x, chosen[0] if chosen else None)
        chosen.append(routing.indices)
        return mixture.mix(x, routing.weights, mixture.plan(routing.indices))

    out = recompute.run(True, layer, x)
    mixture.router.weight.data.neg_()  # stands for rounding that differs
    out.sum().backward()
    assert len(chosen) == 2
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(mixture.route(x).indices, chosen[0])


# Parameters


def planned(rank: int, split: dict[str, int]) -> ParallelContext:
    return context.planned(Grid(**split), rank, device=torch.device("cpu"))


LAYOUTS = [
    {"dp": 1, "ep": 1, "etp": 1},
    *SPLITS_OF_4,
    *SPLITS_OF_8,
]


@pytest.mark.parametrize("num_experts", [5, 8])
def test_ranks_hold_each_expert_once(num_experts: int) -> None:
    case = Case(num_experts=num_experts)
    total = num_experts * 3 * HIDDEN * case.width
    for split in LAYOUTS:
        held = []
        for rank in range(world_of(split)):
            mixture = Mixture(case, planned(rank, split))
            held.append(sum(param.numel() for param in mixture.experts.parameters()))
        copies = world_of(split) // (split["ep"] * split["etp"])
        assert sum(held) == copies * total
        most = -(-num_experts // split["ep"])
        assert max(held) == most * total // num_experts // split["etp"]


def test_initial_weights_are_the_same_in_every_layout() -> None:
    found = []
    for split in LAYOUTS:
        parts = []
        for rank in range(world_of(split)):
            ctx = planned(rank, split)
            mixture = Mixture(Case(), ctx)
            initialize([mixture], seed=3)
            parts.append(logical.held([mixture], ctx))
        found.append(logical.assemble(parts))
    for tensors in found[1:]:
        assert tensors.keys() == found[0].keys()
        assert all(torch.equal(tensor, found[0][name]) for name, tensor in tensors.items())


def rank_slices(split: dict[str, int], rank: int, zero_stage: int) -> list[StateSlice]:
    ctx = planned(rank, split)
    flat = flatten([Mixture(Case(), ctx)], ctx, zero_stage=zero_stage, bucket_mb=0.001, overlap=False)
    return list(flat.optimizers(OptimizerConfig(zero_stage=zero_stage)).slices())  # type: ignore[arg-type]


def test_a_checkpoint_of_any_split_loads_into_any_other(tmp_path: Path) -> None:
    """Experts are logical tensors with global numbers. Ranks without an expert write none."""
    whole = {name: tensor.float() for name, tensor in Case().weights().items()}

    def expected(item: StateSlice) -> Tensor:
        parts = [whole[piece.name][piece.held.slices].flatten() for piece in item.spec.pieces]
        return torch.cat(parts)[item.start : item.stop]

    for number, (source, target) in enumerate(zip(LAYOUTS, [*LAYOUTS[1:], LAYOUTS[0]], strict=True)):
        zero_stage = number % 2
        folder = tmp_path / str(number) / ".tmp-step_00000003-test"
        folder.mkdir(parents=True)
        parts = []
        for rank in range(world_of(source)):
            slices = rank_slices(source, rank, zero_stage)
            for item in slices:
                item.main.copy_(expected(item))
            parts.append(write_part(folder, rank, slices if zero_stage else share(slices)))
        facts = {"step": 3, "consumed_samples": 24, "layout": {}, "model_config": {}, "trainer": {}, "data": {}}
        publish(folder, folder.parent, facts, parts)
        path = folder.parent / "step_00000003"
        manifest = read_manifest(path)
        assert {name for name in manifest.tensors if name.startswith("main.")} == {f"main.{name}" for name in whole}
        for rank in range(world_of(target)):
            slices = rank_slices(target, rank, 1 - zero_stage)
            for item in slices:
                item.main.fill_(torch.nan)
            fill(path, manifest, slices)
            assert all(torch.equal(item.main, expected(item)) for item in slices), f"{source} {target} {rank}"


def frozen(case: Case) -> list[bool]:
    """What needs a gradient on this rank, if only the router, then only the experts are trained."""
    ctx = make_context({"dp": 4, "ep": 4})
    needs = []
    for pattern in ("*.router.*", "*.experts.*"):
        mixture = small_mixture(case, ctx=ctx)
        for param in mixture.parameters():
            param.requires_grad_(selected(spec_of(param), [pattern]))
        out = mixture(case.inputs(ctx.world.rank))
        out.sum().backward()
        needs.append(out.requires_grad)
        needs.append(any(bool(param.grad.any()) for param in mixture.parameters() if param.grad is not None))
    return needs


def test_ranks_without_an_expert_agree_on_what_needs_a_gradient() -> None:
    """Fault moe-rank-without-tokens-hangs: only the experts are trained, and one of four ranks has none."""
    ranks = run_ranks(4, frozen, Case(num_experts=3))
    assert [rank[:3] for rank in ranks] == [[True, True, True]] * 4
    assert [rank[3] for rank in ranks] == [False, True, True, True]


def test_a_dry_run_counts_rows_that_spread_evenly() -> None:
    case = Case(num_experts=5, tokens=(10,))
    for split, rows in (({"dp": 4, "ep": 4, "etp": 1}, [16, 16, 16, 32]), ({"dp": 4, "ep": 2, "etp": 2}, [32] * 2)):
        for rank, expected in enumerate(rows):
            ctx = context.planned(Grid(**split), rank, device=torch.device("meta"))
            mixture = Mixture(case, ctx)
            x = torch.empty(10, HIDDEN, device="meta", requires_grad=True)
            routing = mixture.route(x)
            assert mixture.plan(routing.indices).rows == expected
            assert mixture(x).shape == x.shape


def test_experts_in_16_bits_sum_gradients_in_fp32() -> None:
    case = Case(tokens=(400,))
    mixture = small_mixture(case, torch.bfloat16)
    flat = flatten([mixture], single(), zero_stage=0, bucket_mb=1)
    flat.start_step()
    weights = {name: tensor.bfloat16().double().requires_grad_() for name, tensor in case.weights().items()}
    out = mixture(case.inputs(0).bfloat16())
    expected = plain_mixture(case.inputs(0).bfloat16().double(), weights, case)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    expected.sum().backward()
    assert (out - expected).norm() < 0.01 * expected.norm()
    for name, gradient in logical.assemble([logical.held([mixture], single(), logical.main_gradients)]).items():
        assert gradient.dtype == torch.float32
        assert (gradient - weights[name].grad).norm() < 0.02 * weights[name].grad.norm(), name


def test_the_rows_of_a_chunk_are_freed_with_it() -> None:
    """Without a garbage collection: tensors of a GPU would stay until the next one."""
    plan = dispatch.plan_dispatch(torch.tensor([[0, 1], [1, 2]]), 3, single().ep, single().etp)
    seen = weakref.ref(plan.whole)
    assert plan.whole.groups.sizes == [1, 2, 1]
    gc.disable()
    try:
        del plan
        assert seen() is None
    finally:
        gc.enable()


# The product of a router


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_logits_of_a_router_are_not_rounded_to_the_dtype_of_its_input(dtype: torch.dtype, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((7, 3, 96), (10, 96), (10,)))
    y = Float32Products().forward(x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE) if with_bias else None).cpu()
    expected = x.double() @ weight.double().t() + (bias.double() if with_bias else 0)
    assert y.dtype == torch.float32
    assert (y - expected).norm() < 2e-6 * expected.norm()
    on_meta = Float32Products().forward(*(tensor.to("meta") for tensor in (x, weight, bias)))
    assert (on_meta.dtype, on_meta.shape) == (torch.float32, y.shape)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gradients_of_a_router_take_the_gradient_of_logits_in_fp32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU multiplies it: with bf16 in two halves. The gradient of x is rounded once, to its dtype."""
    monkeypatch.setattr(balance, "_by_halves", lambda other: other.dtype == torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((21, 96), (10, 96)))
    grad = torch.randn(21, 10, generator=generator)
    products = Float32Products()
    grad_x = products.input_gradient(grad.to(DEVICE), weight.to(DEVICE)).cpu()
    expected = grad.double() @ weight.double()
    assert grad_x.dtype == dtype
    limits = {torch.bfloat16: 2.5e-3, torch.float16: 3e-4, torch.float32: 1e-6}
    assert (grad_x - expected).norm() < limits[dtype] * expected.norm()
    total = torch.full((10, 96), torch.nan).to(DEVICE)
    expected = grad.double().t() @ x.double()
    for overwrite in (True, False):
        products.add_weight_gradient(total, grad.to(DEVICE), x.to(DEVICE), overwrite=overwrite)
        assert (total.cpu() - expected).norm() < 5e-6 * expected.norm()
        expected = 2 * expected
