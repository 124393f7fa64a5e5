"""Optimizers beside AdamW (optimizer.name), and groups of parameters with factors of their own (optimizer.groups)."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_tools.verify import logical
from megapar_tools.verify.logical import held_gradients, held_weights
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError
from megapar.comm.axis import Axis
from megapar.config.groups import Group
from megapar.config.model_options import ModelConfig
from megapar.config.options import OPTIMIZER_NAMES, OptimizerConfig
from megapar.declare.params import cut, make_piece, shared_piece
from megapar.optimizer import owners, table
from megapar.optimizer.muon import Muon, orthogonalized
from megapar.step.state import TrainState
from megapar.step.step import train_step
from megapar.train.checkpoints import find, resume
from megapar.train.saver import Saver
from tests.support import program
from tests.support.cover import Case, Rule, Space, cover
from tests.support.distributed import run_ranks
from tests.support.grid import (
    GPT,
    LATENT,
    LLAMA,
    MIXTRAL,
    ONE_KV_HEAD,
    SAMPLES,
    SHARED,
    STRADDLING,
    Layout,
    alone,
    make_state,
    micro_batches,
    of,
)
from tests.support.sweeps import slow_but

STEPS = 10
GROUPS = ("*.mlp.*:lr=0.5,decay=0", "embedding.*:lr=0.25", "layers.1.*:decay=2")
FURTHER = {
    "lion": OptimizerConfig(name="lion", lr=2e-3, betas=(0.9, 0.99), weight_decay=0.3),
    "sgd": OptimizerConfig(name="sgd", lr=2e-2, momentum=0.8, nesterov=False, weight_decay=0.3),
    "muon": OptimizerConfig(name="muon", lr=2e-3, eps=1e-2, momentum=0.9, weight_decay=0.3),
    "heads": OptimizerConfig(name="muon", lr=2e-3, eps=1e-2, momentum=0.9, weight_decay=0.3, muon_per_head=True),
    "nesterov": OptimizerConfig(name="sgd", lr=2e-2, momentum=0.8, weight_decay=0.3),
}


def state_of(layout: Layout, options: OptimizerConfig) -> TrainState:
    """A state at step 0. What `options` say of the layout, `layout` says in its place."""
    # Two micro-batches of a replica say as much as many. Lion takes signs: a sum in another order may turn one of zero.
    if layout.micro_batch_size == 1 and options.name != "lion":
        layout = replace(layout, micro_batch_size=max(1, SAMPLES // layout.dp // 2))
    config = layout.config()
    ours = config.optimizer
    at = {"zero_stage": ours.zero_stage, "shard_ranks": ours.shard_ranks, "bucket_mb": ours.bucket_mb}
    return make_state(replace(config, optimizer=replace(options, schedule="constant", **at)))


def one_step(state: TrainState, number: int) -> float:
    # Not the first batches: a gradient of theirs is 2e-13, and Lion takes its sign, which is that of rounding.
    loss = train_step(state, micro_batches(state.config, state.ctx, 10 + number)).loss
    state.weights.wait()
    return loss


Parts = list[tuple[str, tuple[int, ...], Tensor, Tensor]]


def held_state(state: TrainState) -> Parts:
    """This rank's elements of the optimizers' state: name and shape of each tensor, places in it, and values."""
    parts = []
    for item in state.optimizer.slices():
        for piece, start, stop in item.spec.segments():
            first, last = max(start, item.start), min(stop, item.stop)
            if first < last:
                places = torch.arange(math.prod(piece.shape)).view(piece.shape)[piece.held.slices].reshape(-1)
                for declared in item.states:
                    values = item.tensors[declared.name][first - item.start : last - item.start].clone()
                    name = f"{declared.name}.{piece.name}"
                    parts.append((name, piece.shape, places[first - start : last - start], values))
    return parts


def whole_state(ranks: Sequence[Parts]) -> dict[str, Tensor]:
    """Each tensor of the state. Fails if copies of an element differ, or if an element has none."""
    found: dict[str, Tensor] = {}
    for name, shape, places, values in (part for rank in ranks for part in rank):
        flat = found.setdefault(name, torch.full((math.prod(shape),), float("nan")))
        assert torch.equal(torch.where(flat[places].isnan(), values, flat[places]), values), f"copies of {name} differ"
        flat[places] = values
    assert not any(flat.isnan().any() for flat in found.values()), "an element is nowhere"
    return found


def train(layout: Layout, options: OptimizerConfig, steps: int = STEPS) -> dict[str, Any]:
    """What a rank has to show: losses, and weights and momentum after the first step and the last."""
    state = state_of(layout, options)
    shown: dict[str, Any] = {"losses": []}
    for number in range(steps):
        shown["losses"].append(one_step(state, number))
        if number in (0, steps - 1):
            shown[number] = held_weights(state), held_state(state)
    return shown


@cache
def reference(layout: Layout, options: OptimizerConfig, steps: int) -> dict[str, Any]:
    return train(layout, options, steps)


def trains_as_one_process(layout: Layout, options: OptimizerConfig, steps: int = STEPS) -> None:
    """Losses to 1e-5, weights to 1e-5 and state to 1e-6 after one step and the last: those of one process."""
    ranks = run_ranks(layout.world, train, layout, options, steps)
    expected = reference(alone(layout), options, steps)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    for number in (0, steps - 1):
        weights = logical.assemble([rank[number][0] for rank in ranks])
        momentum = whole_state([rank[number][1] for rank in ranks])
        for found, wanted, within in (
            (weights, logical.assemble([expected[number][0]]), 1e-5),
            (momentum, whole_state([expected[number][1]]), 1e-6),
        ):
            assert found.keys() == wanted.keys()
            far = {name: (found[name] - wanted[name]).abs().max().item() for name in wanted}
            assert max(far.values()) < within, (number, max(far, key=far.__getitem__), max(far.values()))


# The formulas


def factors(groups: Sequence[str], name: str) -> tuple[float, float]:
    """Those of the learning rate and of the decay, by GROUPS."""
    layer = name.startswith("layers.1.")
    if not groups:
        return 1.0, 1.0
    if ".mlp." in name:
        return 0.5, 0.0
    if name.startswith("embedding."):
        return 0.25, 1.0
    return (1.0, 2.0) if layer else (1.0, 1.0)


def newton_schulz(n: Tensor) -> Tensor:
    x = n.T if n.shape[0] > n.shape[1] else n
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if n.shape[0] > n.shape[1] else x


def block_rows(name: str, per_head: bool) -> list[int]:
    """The rows of the blocks of a matrix, in turn. Heads of LLAMA have 10 rows, and those of LATENT several parts."""
    if not per_head:
        return []
    rows = {"q": [10], "k": [10], "v": [10], "q_b": [18], "kv_b": [12, 8]}
    return rows.get(name.split(".")[-2], [])


def by_blocks(n: Tensor, rows: Sequence[int], scale: str) -> Tensor:
    """The update of a matrix, block by block."""
    blocks = n.split(list(rows) * (len(n) // sum(rows))) if rows else [n]
    return torch.cat([newton_schulz(block) * SCALES[scale](*block.shape) for block in blocks])


SCALES = {
    "adam_rms": lambda m, n: 0.2 * max(m, n) ** 0.5,
    "spectral": lambda m, n: (m / n) ** 0.5,
    "keller": lambda m, n: max(1, m / n) ** 0.5,
}


class InDoubles:
    """The formulas in fp64, for one process: `update` takes the reduced, unclipped gradients of a step."""

    def __init__(self, options: OptimizerConfig, weights: Mapping[str, Tensor]):
        self.options = options
        self.weights = {name: w.double() for name, w in weights.items()}
        self.momentum = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.squares = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.steps = 0

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        o = self.options
        self.steps += 1
        norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))
        clip = min(1.0, o.clip_grad / (norm + 1e-6))
        for name, w in self.weights.items():
            g = gradients[name].double() * clip
            m = self.momentum[name]
            lr, decay = (x * y for x, y in zip((o.lr, o.weight_decay), factors(o.groups, name), strict=True))
            w *= 1 - lr * (decay if w.dim() == 2 else 0)
            if o.name == "lion":
                w -= lr * (o.betas[0] * m + (1 - o.betas[0]) * g).sign()
                m.mul_(o.betas[1]).add_((1 - o.betas[1]) * g)
            elif o.name == "muon" and (w.dim() == 1 or re.match("embedding|head|.*router", name)):
                s = self.squares[name].mul_(o.betas[1]).add_((1 - o.betas[1]) * g * g)
                m.mul_(o.betas[0]).add_((1 - o.betas[0]) * g)
                first, second = (1 - beta**self.steps for beta in o.betas)
                w -= lr * m / first / ((s / second).sqrt() + o.eps)
            else:
                m.mul_(o.momentum).add_(g)
                n = g + o.momentum * m if o.nesterov else m
                w -= lr * (by_blocks(n, block_rows(name, o.muon_per_head), o.muon_scale) if o.name == "muon" else n)


@pytest.mark.parametrize("groups", slow_but([0], [(GROUPS,), ((),)]), ids=["groups", ""])
@pytest.mark.parametrize("case", slow_but([0, 1, 3], [*FURTHER, "spectral", "keller"]))
def test_ten_steps_are_those_of_the_formulas(case: str, groups: tuple[str, ...]) -> None:
    """In fp64, from the same gradients. A small limit clips them (fault factors-applied-twice)."""
    of_scale = replace(FURTHER["muon"], muon_scale=case)
    follows_the_formulas(LLAMA, replace(FURTHER.get(case, of_scale), groups=groups, clip_grad=0.5))


def test_blocks_of_latent_attention_are_those_of_the_formulas() -> None:
    """The key and the value of a head are rows of one tensor, and two blocks. Fault fused-matrices-apart."""
    follows_the_formulas(LATENT, replace(FURTHER["heads"], clip_grad=0.5))


def follows_the_formulas(model: ModelConfig, options: OptimizerConfig) -> None:
    state = state_of(Layout(model, zero_stage=0), options)
    formulas = InDoubles(options, logical.assemble([held_weights(state)]))
    for number in range(STEPS):
        seen: list[Any] = []
        step = state.optimizer.step

        def note(*args: Any, seen: list[Any] = seen, step: Any = step, **named: Any) -> None:
            seen.append(held_gradients(state))  # before the update, which may change them
            step(*args, **named)

        state.optimizer.step = note  # type: ignore[method-assign]
        one_step(state, number)
        state.optimizer.step = step  # type: ignore[method-assign]
        formulas.update(logical.assemble(seen))
        for name, w in logical.assemble([held_weights(state)]).items():
            assert (w - formulas.weights[name]).abs().max() < 2e-6, (number, name)


# Layouts

LAYOUTS = [
    Layout(LLAMA, tp=2, dp=2),
    Layout(LLAMA, dp=3, zero_stage=3),
    # Both tensor ranks have the keys, and the embedding is tied. With this vocabulary no update of Lion is so near 0
    # that rounding decides its sign.
    Layout(replace(ONE_KV_HEAD, vocab_size=127), tp=2, dp=2, zero_stage=0),
    Layout(MIXTRAL, tp=2, dp=2, ep=2, etp=1, zero_stage=2),
    Layout(MIXTRAL, tp=2, dp=2, etp=2),
    Layout(LLAMA, pp=2, cp=2, zero_stage=2),
    Layout(STRADDLING, tp=4),
    Layout(LLAMA, tp=2, dp=2, order="dp-tp-cp-pp", zero_stage=3),
    Layout(LLAMA, dp=4, zero_stage=3, shard_ranks=2),
    Layout(LLAMA, tp=2, dp=2, shard_ranks=1),
    Layout(LLAMA, dp=2, zero_stage=0),
]


def name(layout: Layout) -> str:
    sizes = {key: getattr(layout, key) for key in ("tp", "pp", "dp", "cp", "ep", "etp") if getattr(layout, key) > 1}
    shards = f" shards{layout.shard_ranks}" if layout.shard_ranks else ""
    return " ".join(f"{key}{size}" for key, size in sizes.items()) + f" zero{layout.zero_stage}{shards}"


@pytest.mark.parametrize("layout", slow_but([3], LAYOUTS), ids=name)
def test_muon_trains_as_one_process(layout: Layout) -> None:
    """Faults orthogonal-shards, fused-matrices-apart, uneven-parts-of-matrices and experts-on-their-plane."""
    trains_as_one_process(layout, FURTHER["muon"])


BY_HEAD = [
    Layout(STRADDLING, tp=2, dp=2),  # 3 key/value heads, one of them on both ranks
    Layout(LATENT, tp=2, dp=2, zero_stage=3),
    Layout(LLAMA, tp=2, cp=2, zero_stage=2),
    Layout(MIXTRAL, tp=2, dp=2, ep=2, etp=1),
    Layout(ONE_KV_HEAD, tp=2, dp=2, zero_stage=0),
    Layout(LLAMA, dp=3, zero_stage=3),
]


@pytest.mark.parametrize("layout", slow_but([0], BY_HEAD), ids=name)
def test_heads_apart_train_as_one_process(layout: Layout) -> None:
    """Fault fused-matrices-apart: ZeRO cuts in the middle of heads, and key/value heads of two ranks count once."""
    trains_as_one_process(layout, FURTHER["heads"], 3)


@pytest.mark.parametrize("layout", slow_but([0], LAYOUTS[:6]), ids=name)
@pytest.mark.parametrize("optimizer", ["lion", "sgd"])
def test_a_layout_trains_as_one_process(layout: Layout, optimizer: str) -> None:
    trains_as_one_process(layout, FURTHER[optimizer], 3)


# The ranks of an axis of gradients hold unequal numbers of experts, so dense matrices lie at other places of their flat
# memory. The layouts of 2 to 4 ranks have sizes that divide no number of experts of the models.
RANKS = {
    "dp2 ep2": {"dp": 2, "ep": 2},
    "cp2 ep2": {"cp": 2, "ep": 2, "micro_batch_size": 6},
    "dp2 pp2 ep2": {"dp": 2, "pp": 2, "ep": 2},
    "dp3 ep3": {"dp": 3, "ep": 3, "micro_batch_size": 2},
    "dp4 ep4": {"dp": 4, "ep": 4, "micro_batch_size": 3},
    "dp4 ep2 shards2": {"dp": 4, "ep": 2, "shard_ranks": 2, "micro_batch_size": 3},
    "dp2 tp2 ep2 etp2": {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
    "dp2 tp2 ep4 etp1": {"dp": 2, "tp": 2, "ep": 4, "etp": 1},
}
UNEVEN = Space(
    {
        "ranks": tuple(RANKS),
        "optimizer": tuple(FURTHER),
        "model": ("5 experts", "1 expert", "latent, 7 experts"),
        "zero_stage": (0, 1, 2, 3),
    },
    [
        Rule(
            "without ZeRO there are no shards",
            ("ranks", "zero_stage"),
            lambda ranks, stage: "shards" not in ranks or stage > 0,
        )
    ],
)
OF_UNEVEN = {
    "5 experts": MIXTRAL,
    "1 expert": of(MIXTRAL, num_experts=1, num_experts_per_tok=1),
    "latent, 7 experts": of(LATENT, num_experts=7),
}
FIRST = {"ranks": "dp2 ep2", "optimizer": "muon", "model": "5 experts", "zero_stage": 3}
UNEVEN_CASES = [FIRST, *cover(UNEVEN, 0, lambda case: 1.0)]


@pytest.mark.parametrize("case", slow_but([0], UNEVEN_CASES), ids=lambda case: " ".join(map(str, case.values())))
def test_unequal_numbers_of_experts_train_as_one_process(case: Case) -> None:
    """Fault neighbor-layouts-taken-for-equal."""
    layout = Layout(OF_UNEVEN[case["model"]], zero_stage=case["zero_stage"], **RANKS[case["ranks"]])
    trains_as_one_process(layout, FURTHER[case["optimizer"]], 2)


def other_buckets(layout: Layout) -> str:
    """What the last rank says in its first step, if its buckets of dense matrices have another length than others'."""
    state = state_of(layout, FURTHER["muon"])
    for optimizer in state.optimizer.each:
        if isinstance(optimizer, Muon) and state.ctx.world.last:
            optimizer.parts = lambda axis_name: []  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as raised:
        one_step(state, 0)
    return str(raised.value)


def test_ranks_with_other_matrices_are_told_before_any_is_updated() -> None:
    """Fault neighbor-layouts-taken-for-equal."""
    told = run_ranks(2, other_buckets, Layout(LLAMA, dp=2))
    assert len(set(told)) == 1, "every rank says the same"
    assert "rank 1 has other matrices" in told[0]


# Groups


def test_groups_are_read() -> None:
    assert Group.parse("*.experts.*:lr=0.5,decay=0") == Group("*.experts.*", 0.5, 0.0)
    assert Group.parse("embedding.weight:decay=2") == Group("embedding.weight", 1.0, 2.0)
    for wrong in ("*.mlp.*", "*.mlp.*:", "a:lr", "a:lr=x", "a:lr=-1", "a:rate=1", "a:lr=1,lr=2", ":lr=1", "a:lr=inf"):
        with pytest.raises(ValueError, match="write PATTERN:lr=FACTOR,decay=FACTOR"):
            Group.parse(wrong)


@pytest.mark.parametrize("optimizer", slow_but([0], ["adamw", "sgd"]))
def test_groups_in_a_layout_train_as_in_one_process(optimizer: str) -> None:
    groups = ("*.mlp.*:lr=0.5,decay=0", "layers.1.*:lr=0", "embedding.*:decay=2")
    options = replace(FURTHER["sgd"], name=optimizer, groups=groups, eps=1e-2)
    if optimizer == "adamw":
        options = replace(OptimizerConfig(), lr=2e-3, eps=1e-2, groups=groups)
    trains_as_one_process(Layout(LLAMA, tp=2, dp=2, zero_stage=2), options, 3)


def test_a_factor_of_zero_leaves_weights_as_they_are() -> None:
    state = state_of(Layout(LLAMA), OptimizerConfig(groups=("layers.1.*:lr=0",)))
    before = logical.assemble([held_weights(state)])
    one_step(state, 0)
    after = logical.assemble([held_weights(state)])
    assert {name for name in before if torch.equal(before[name], after[name])} == {
        name for name in before if name.startswith("layers.1.")
    }


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ("*.mlps.*:lr=0.5", "optimizer.groups *.mlps.*: decides about no trained parameter; leave it out"),
        ("*.q.weight:lr=0.5", "matches a part of layers.0.attention.k.weight to layers.0.attention.v.weight, which is"),
        ("*.mlp.*:rate=0.5", "rate=0.5 is no factor; write PATTERN:lr=FACTOR,decay=FACTOR"),
    ],
)
def test_a_group_that_fits_nothing_is_refused(groups: str, said: str, tmp_path: Path) -> None:
    for dry in ((), ("--dry_run",)):
        ended = program.run("--optimizer.groups", groups, "norm.weight:lr=1", *dry, cwd=tmp_path)
        assert (ended.code, ended.err.count("\n")) == (ConfigError.exit_code, 1), ended.err
        assert said in ended.err


# Checkpoints


def saved(layout: Layout, options: OptimizerConfig, run_dir: Path) -> tuple[Parts, Any]:
    """Save after two steps. Returns the state then, and the weights of a third step."""
    state = state_of(layout, options)
    for number in range(2):
        one_step(state, number)
    with Saver(state, run_dir) as saver:
        saver.save(state)
    kept = held_state(state)
    one_step(state, 2)
    return kept, held_weights(state)


def resumed(layout: Layout, options: OptimizerConfig, run_dir: Path) -> tuple[Parts, Any]:
    """As `saved`, of a state that resumes."""
    state = state_of(layout, options)
    resume(state, run_dir, find(state.config, run_dir, state.ctx))
    assert state.config.optimizer.momentum == options.momentum
    kept = held_state(state)
    one_step(state, 2)
    return kept, held_weights(state)


CHAIN = [
    Layout(LLAMA, tp=2, dp=2, zero_stage=2),
    Layout(LLAMA, dp=3, zero_stage=3),
    Layout(LLAMA, pp=2, zero_stage=0),
    Layout(LLAMA, tp=4),
]


@pytest.mark.parametrize(("source", "target"), slow_but([1], [(CHAIN[0], CHAIN[0]), *pairwise([*CHAIN, CHAIN[0]])]))
def test_momentum_is_resumed_bitwise_in_each_layout(source: Layout, target: Layout, tmp_path: Path) -> None:
    """Fault momentum-in-any-layout. In the same layout the next step is bitwise the same too."""
    before = run_ranks(source.world, saved, source, FURTHER["muon"], tmp_path)
    after = run_ranks(target.world, resumed, target, FURTHER["muon"], tmp_path)
    then, now = (whole_state([state for state, _ in ranks]) for ranks in (before, after))
    assert then.keys() == now.keys()
    assert all(torch.equal(then[name], now[name]) for name in then)
    then, now = (logical.assemble([weights for _, weights in ranks]) for ranks in (before, after))
    if source == target:
        assert all(torch.equal(then[name], now[name]) for name in then)
    assert max((then[name] - now[name]).abs().max() for name in then) < 1e-5


@pytest.mark.parametrize(("then", "now"), [("adamw", "muon"), ("muon", "adamw")])
def test_the_state_of_another_optimizer_is_refused_with_its_names(then: str, now: str, tmp_path: Path) -> None:
    """What would be dropped, and what is missing. Weights alone can be taken over (checkpoint.init_from)."""
    layout = Layout(LLAMA)
    saved(layout, OptimizerConfig(name=then), tmp_path)
    with pytest.raises(CheckpointError) as refused:
        resumed(layout, OptimizerConfig(name=now), tmp_path)
    kept = {"adamw": "exp_avg, exp_avg_sq", "muon": "momentum"}
    said = f"by {now} ({kept[then]} would be dropped, and {kept[now]} would be missing)"
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


# Muon: what is a matrix, and who owns it


def updates(layout: Layout) -> dict[str, str]:
    """The optimizer of each tensor that this rank has, with Muon."""
    slots = state_of(layout, FURTHER["muon"]).weights.layout.slots
    return {piece.name: slot.update.optimizer for slot in slots for piece in slot.spec.pieces}


def test_who_updates_what_is_the_same_in_all_layouts() -> None:
    """Embedding, head, router, norms and biases are elements, though some have two dimensions (fault
    matrices-by-dimension)."""
    for layout in (Layout(GPT), Layout(MIXTRAL), Layout(SHARED), Layout(LLAMA)):
        alone = updates(layout)
        linear = r"layers\.\d+\.(attention|mlp|mlp\.shared|mlp\.experts\.\d+)\.(q|k|v|o|gate|up|down)\.weight"
        assert {name for name, by in alone.items() if by == "muon"} == {n for n in alone if re.fullmatch(linear, n)}
        assert {name for name in alone if re.search("embedding|head|router|norm|bias|shared_gate", name)}
    ranks = run_ranks(4, updates, Layout(MIXTRAL, tp=2, pp=2, ep=2, etp=1))
    assert {name: by for rank in ranks for name, by in rank.items()} == updates(Layout(MIXTRAL))


def matrices_of(hidden: int, keys: int, width: int, layers: int) -> dict[str, tuple[int, int]]:
    shapes = {"q": (hidden, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, hidden)}
    shapes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in shapes.items()}


@pytest.mark.parametrize("ranks", [8, 12, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("sizes", [(4096, 4096, 11008, 32), (4096, 1024, 14336, 32)], ids=["llama 2", "llama 3"])
def test_the_work_of_owners_of_a_7b_model_is_even(sizes: tuple[int, int, int, int], ranks: int) -> None:
    """Fault uneven-owners: the most within 10% of the mean."""
    shapes = matrices_of(*sizes)
    found = owners.owners(shapes, ranks)
    loads = [sum(owners.cost(shapes[name]) for name, owner in found.items() if owner == rank) for rank in range(ranks)]
    assert max(loads) <= 1.10 * sum(loads) / ranks
    assert found == owners.owners(dict(reversed(shapes.items())), ranks), "the order of ranks decides"


def members_of(shapes: Sequence[tuple[int, int]], tp: int, shards: int, copies: int) -> list[owners.PlaneMember]:
    """The ranks of a plane with these matrices in one bucket: cut by rows, by columns, or held by all, in turn."""
    length = -(-sum(map(math.prod, shapes)) // shards) * shards + shards  # with padding
    found = []
    for rank in range(tp):
        axis = Axis("tp", tp, rank)
        parts = []
        start = 0
        for number, shape in enumerate(shapes):
            if number % 3 == 2:
                piece = shared_piece(f"m{number}", shape, axis)
            else:
                piece = make_piece(f"m{number}", shape, {number % 3: cut(shape[number % 3], axis)})
            parts.append(owners.MatrixPart.of(piece, start, length))
            start += piece.held.numel
        found += [owners.PlaneMember(parts, i % shards, shards, i // shards) for i in range(shards * copies)]
    return found


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("shards", [1, 3, 4])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_each_element_reaches_its_owner_once_and_all_holders_come_back(tp: int, shards: int, copies: int) -> None:
    """Faults uneven-parts-of-matrices and fused-matrices-apart. Some ranks have parts of nothing."""
    shapes = [(rows, 3) for rows in range(1, 8)] + [(5, columns) for columns in range(1, 8)] + [(18, 40)]
    members = members_of(shapes, tp, shards, copies)
    routes = [owners.Routes(members, position) for position in range(len(members))]
    for here, mine in enumerate(routes):
        for there, theirs in enumerate(routes):
            assert mine.out[there] == theirs.gathered[here]
            assert mine.returned[there] == theirs.back[here]
        seen = {name: torch.zeros(shape) for name, shape in mine.shapes.items()}
        for fragment in (one for of_rank in mine.gathered for one in of_rank):
            whole = seen[fragment.part.name]
            places = torch.arange(whole.numel()).view(whole.shape)[fragment.part.held.slices].reshape(-1)
            whole.view(-1)[places[fragment.start : fragment.stop]] += 1
        assert all(bool((count == 1).all()) for count in seen.values())
        for part in members[here].parts:
            start, stop = members[here].slice(part)
            back = [one for of_rank in mine.back for one in of_rank if one.part == part]
            assert [(one.start, one.stop) for one in back] == [(start, stop)] * (start < stop)


@pytest.mark.parametrize("shape", [(64, 64), (48, 160), (160, 48), (7, 3), (1, 1), (1, 40), (40, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_end_near_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalized(x.to(dtype)).double()
    values = torch.linalg.svdvals(found)
    # A value far below the others needs more rounds than there are. Of random square matrices some are so small.
    grown = values if shape != (64, 64) else values[:, : -shape[0] // 8]
    assert grown.min() > 0.3
    assert values.max() < 1.3
    u, _, vt = torch.linalg.svd(x.double(), full_matrices=False)
    inside = u.mT @ found @ vt.mT
    off = inside - torch.diag_embed(inside.diagonal(dim1=1, dim2=2))
    assert off.abs().max() < (1e-4 if dtype == torch.float32 else 5e-2), "other singular vectors"


def test_16_bit_weights_are_the_rounded_main_weights() -> None:
    config = Layout(LLAMA).config("bf16")
    state = make_state(replace(config, optimizer=replace(config.optimizer, name="muon", lr=1e-2)))
    before = logical.assemble([held_weights(state)])
    one_step(state, 0)
    after = logical.assemble([held_weights(state)])
    matrices = [name for name, by in updates(Layout(LLAMA)).items() if by == "muon"]
    assert all((after[name] != before[name]).any() for name in matrices)
    for item in state.optimizer.slices():
        assert torch.equal(item.param.view(-1)[item.start : item.stop], item.main.bfloat16()), item.spec.name


def test_zeros_stay_zeros() -> None:
    """Zero gradients, and rows that are zero (fault orthogonal-zeros)."""
    assert not orthogonalized(torch.zeros(2, 5, 8)).any()
    x = torch.randn(1, 6, 9, generator=torch.Generator().manual_seed(0))
    x[:, 4:] = 0
    found = orthogonalized(x)
    torch.testing.assert_close(found[:, :4], orthogonalized(x[:, :4]))
    assert not found[:, 4:].any()


def test_names_are_those_of_the_table() -> None:
    assert tuple(table.OPTIMIZERS) == OPTIMIZER_NAMES
