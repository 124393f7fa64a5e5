"""Initial weights, dropout masks and recomputation: no layout changes a bit of them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
import torch
from megapar_kernels.dropout import RowDropout, keep_mask
from megapar_models.attention import Attention
from megapar_models.build import build_stages
from megapar_models.families import gpt
from megapar_tools.verify import logical
from torch import Tensor

from megapar.base.grid import Grid
from megapar.config.model_options import ModelConfig
from megapar.config.options import Config
from megapar.context_parallel.dropout import AttentionDropout
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from megapar.declare.params import Box, Init, ParamSpec, Piece, Sizes, parameter
from megapar.declare.random import fill, initial_values, initialize, row_keys
from tests.support import tiny_models
from tests.support.distributed import ON_GPUS, rank_device, run_ranks
from tests.support.flat import flatten
from tests.support.sweeps import slow_but

# Three key/value heads on four ranks: groups of query heads straddle ranks.
STRADDLING = tiny_models.model(
    "llama", num_attention_heads=12, num_key_value_heads=3, attention_bias=True, qk_norm=True
)
TIED_GPT = tiny_models.model("gpt", tie_word_embeddings=True)
DROPPING = replace(TIED_GPT, hidden_dropout=0.5, attention_dropout=0.5)


# Initial weights


def initial(model: ModelConfig, tp: int, seed: int = 7) -> list[logical.Held]:
    ctx = context.create(Grid(tp=tp))
    stages = build_stages(tiny_models.config(model, tp), ctx).values()
    initialize(stages, seed)
    return logical.held(stages, ctx)


def initial_of_both(tp: int) -> list[list[logical.Held]]:
    return [initial(model, tp) for model in (STRADDLING, TIED_GPT)]


def whole(piece: Piece) -> Box:
    return Box((0,) * len(piece.shape), piece.shape)


@pytest.mark.parametrize("tp", [2, 4])
def test_initial_weights_are_bitwise_the_same_for_every_tp(tp: int) -> None:
    """Fault initial-weights-same. `held` also asserts zeros in padding rows."""
    ranks = run_ranks(tp, initial_of_both, tp)
    for number, model in enumerate((STRADDLING, TIED_GPT)):
        parts = [rank[number] for rank in ranks]
        found, expected = logical.assemble(parts), logical.assemble([initial(model, 1)])
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        for copies in zip(*parts, strict=True):
            split = [part.values for part in copies if part.piece.held == part.piece.owned != whole(part.piece)]
            for a, b in combinations(split, 2):
                same = a.shape == b.shape and torch.equal(a, b)
                assert not same or not a.any(), f"{copies[0].piece.name}: two ranks hold the same numbers"


@pytest.mark.parametrize("model", [STRADDLING, TIED_GPT], ids=["llama", "gpt"])
def test_initial_weights_follow_the_law_of_their_kind(model: ModelConfig) -> None:
    """Projections into the residual stream are smaller by sqrt(2 layers), norms are one, biases zero (fault
    initial-weights-same)."""
    model = replace(model, initializer_range=0.3, hidden_size=96, num_hidden_layers=3)
    for name, tensor in logical.assemble([initial(model, 1)]).items():
        if name.endswith("bias"):
            assert not tensor.any(), name
        elif name.endswith("norm.weight"):
            assert (tensor == 1).all(), name
        else:
            std = 0.3 / math.sqrt(6) if name.endswith(("o.weight", "down.weight")) else 0.3
            n = tensor.numel()
            assert abs(tensor.mean()) < 5 * std / math.sqrt(n), name
            assert tensor.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * n)), name
            assert (tensor.abs() < std).double().mean().item() == pytest.approx(0.6827, abs=5 * 0.47 / math.sqrt(n)), (
                name
            )


def part_of(shape: Sizes, offset: Sizes, size: Sizes) -> Piece:
    return Piece("layers.0.mlp.up.weight", shape, Box(offset, size), Box(offset, size))


@pytest.mark.parametrize(
    ("shape", "offset", "size"),
    [
        ((600, 2500), (0, 0), (600, 2500)),
        ((600, 2500), (7, 250), (593, 1500)),
        ((600, 2500), (15, 1023), (2, 2)),
        ((600, 2500), (592, 2047), (8, 453)),
        ((40, 7, 300), (3, 2, 0), (30, 4, 300)),
        ((40, 7, 3, 100), (3, 2, 1, 40), (30, 4, 2, 60)),
        ((5000,), (17,), (3000,)),
        ((600, 2500), (5, 6), (0, 0)),
    ],
)
@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_a_part_is_that_of_the_whole(
    shape: Sizes, offset: Sizes, size: Sizes, kind: Literal["normal", "uniform"]
) -> None:
    init = Init(kind, 0.5)
    piece = part_of(shape, offset, size)
    expected = initial_values(part_of(shape, (0,) * len(shape), shape), init, 7)[piece.held.slices]
    assert torch.equal(initial_values(piece, init, 7), expected)


def test_a_rank_draws_the_tiles_that_it_holds_alone() -> None:
    """With tp 8, of a matrix that is cut by its columns; with ZeRO-3, of the rows that a shard touches."""
    drawn: list[int] = []

    class Counting(np.random.Generator):
        def standard_normal(self, *words: Any, out: Any, **named: Any) -> Any:
            drawn.append(out.size)
            return super().standard_normal(*words, out=out, **named)

    with mock.patch("megapar.declare.random.np.random.Generator", Counting):
        initial_values(part_of((40, 8192), (0, 3072), (40, 1024)), Init("normal", 1.0), 7)
        assert sum(drawn) == 40 * 1024
        drawn.clear()
        initial_values(part_of((4096, 256), (0, 0), (4096, 256)), Init("normal", 1.0), 7, rows=slice(30, 35))
        assert sum(drawn) == 2 * 16 * 256


@pytest.mark.parametrize("held", [((0, 0), (600, 1000)), ((7, 250), (593, 500))])
def test_threads_and_kept_elements_change_no_bit(held: tuple[Sizes, Sizes]) -> None:
    """A rank draws the rows of its own shard alone, in all threads; the others are zero."""
    piece = part_of((600, 1000), *held)
    init = Init("normal", 0.02)
    whole = initial_values(piece, init, 7)
    with mock.patch.multiple("megapar.declare.random", _NUMBERS_PER_THREAD=10_000, _NUMBERS_WHILE_LOCKED=100):
        assert torch.equal(initial_values(piece, init, 7, threads=3), whole)
        assert torch.equal(initial_values(piece, init, 7, rows=slice(5, 17), threads=3), whole[5:17])
    spec = ParamSpec((piece,), init, decay=True, grad_axis=context.single().grad)
    param = parameter(spec, (held[1][0] + 2, held[1][1]), dtype=torch.float32, device="cpu")
    width = held[1][1]
    fill(param, slice(3 * width + 5, 9 * width), seed=7)
    expected = torch.zeros_like(param)
    expected[3:9] = whole[3:9]
    assert torch.equal(param, expected)
    fill(param, slice(0), seed=7)
    assert not param.any(), "a rank whose shard has no element draws none"


def test_no_two_rows_start_alike() -> None:
    """Neither within a tensor, nor in two tensors, nor under two seeds."""
    tensors = [logical.assemble([initial(TIED_GPT, 1, seed)]) for seed in (7, 8)]
    rows = [
        row[:48] for seed in tensors for tensor in seed.values() if tensor.dim() == 2 for row in tensor if row.any()
    ]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)


# Dropout masks


def mixed(x: int) -> int:
    """MurmurHash3's finaliser in Python's unbounded integers."""
    x = ((x ^ x >> 16) * 0x85EBCA6B) % 2**32
    x = ((x ^ x >> 13) * 0xC2B2AE35) % 2**32
    return x ^ x >> 16


def test_masks_are_what_32_bit_arithmetic_gives() -> None:
    """A kernel may compute them in uint32; sample ids have 64 bits."""
    seed, use, p = 123456789, 11, 0.3
    samples, positions = [0, 5, 2**32 - 1, 2**40 + 3], [0, 1, 131071]
    keys = row_keys(seed, use, torch.tensor(samples)[:, None], torch.tensor(positions))
    mask = keep_mask(keys, 37, p)
    for i, sample in enumerate(samples):
        for j, position in enumerate(positions):
            key = mixed((seed * 0x9E3779B1 + use) % 2**32)
            for x in (sample, position):
                key = mixed(mixed((key + x) % 2**32) ^ x >> 32)
            expected = [mixed((key + c * 0x9E3779B1) % 2**32) >= int(p * 2**32) for c in range(37)]
            assert mask[i, j].tolist() == expected


def mask_on(device: torch.device) -> Tensor:
    samples = torch.tensor([[0], [2**32 - 1], [2**40 + 3]], device=device)
    return keep_mask(row_keys(3, 5, samples, torch.arange(512, device=device)), 1024, 0.1)


def mask_on_rank() -> Tensor:
    return mask_on(rank_device(0))


@pytest.mark.gpus
@pytest.mark.skipif(not ON_GPUS, reason="not run: needs a GPU, see tests/run.sh --gpus")
def test_masks_on_a_gpu_are_those_on_a_cpu() -> None:
    assert torch.equal(run_ranks(1, mask_on_rank)[0], mask_on(torch.device("cpu")))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_mask_rate_and_independence(p: float) -> None:
    """Rows different in any one coordinate, neighboring rows and neighboring columns agree as often as chance."""

    def mask(seed: int = 1, use: int = 3, sample: int = 0, head: int = 2) -> Tensor:
        keys = row_keys(seed, use, torch.tensor([[sample]]), torch.tensor([[head]]), torch.arange(256)[None])
        return keep_mask(keys[0], 256, p)

    base = mask()
    n = 256 * 256
    assert base.double().mean().item() == pytest.approx(1 - p, abs=5 * math.sqrt(p * (1 - p) / n))
    chance = p * p + (1 - p) * (1 - p)
    others = [
        mask(seed=2),
        mask(use=4),
        mask(sample=1),
        mask(sample=2**32),
        mask(head=3),
        base.roll(1, 0),
        base.roll(1, 1),
    ]
    for other in others:
        agreement = (base == other).double().mean().item()
        assert agreement == pytest.approx(chance, abs=6 * math.sqrt(chance * (1 - chance) / n))


@contextmanager
def recorded_masks() -> Iterator[dict[str, Tensor]]:
    """The masks of a forward pass by the place of their use."""
    masks: dict[str, Tensor] = {}
    hidden_keys, attention_dropout = gpt.hidden_keys, AttentionDropout.of

    def record_hidden(info: Any, use: int, sharding: Any) -> Tensor:
        keys = hidden_keys(info, use, sharding)
        masks[f"hidden {use}"] = keep_mask(keys, DROPPING.hidden_size, DROPPING.hidden_dropout)
        return keys

    def record_attention(self: AttentionDropout, *rows: Any) -> RowDropout:
        dropped = attention_dropout(self, *rows)
        masks[f"attention {self.use}"] = dropped.keep()
        return dropped

    record = mock.patch.object(AttentionDropout, "of", record_attention)
    with mock.patch.object(gpt, "hidden_keys", record_hidden), record:
        yield masks


def masks_of(config: Config, batch: MicroBatch) -> dict[str, Tensor]:
    stage = tiny_models.build(config, context.create(Grid(tp=config.parallel.tp)))
    with recorded_masks() as masks, torch.no_grad():
        stage(None, batch)
    return masks


def masks_with_and_without_sequence_parallel(tp: int) -> list[dict[str, Tensor]]:
    batch = tiny_models.batch(DROPPING)
    return [masks_of(tiny_models.config(DROPPING, tp, sp), batch) for sp in (False, True)]


@pytest.mark.parametrize("tp", [2, 4])
def test_dropout_masks_are_bitwise_the_same_for_every_tp(tp: int) -> None:
    """Fault dropout-masks-of-whole-model: of heads each rank has its own, of hidden states the whole, or its slice
    (sequence parallel)."""
    ranks = run_ranks(tp, masks_with_and_without_sequence_parallel, tp)
    expected = masks_of(tiny_models.config(DROPPING), tiny_models.batch(DROPPING))
    assert len(expected) == 1 + 3 * DROPPING.num_hidden_layers
    for sequence_parallel in (False, True):
        for name, mask in expected.items():
            parts = [rank[sequence_parallel][name] for rank in ranks]
            if name.startswith("attention"):
                assert torch.equal(torch.cat(parts, dim=1), mask), name
            elif sequence_parallel:
                assert torch.equal(torch.cat(parts, dim=0), mask), name
            else:
                assert all(torch.equal(part, mask) for part in parts), name


def test_dropout_masks_differ_by_sample_layer_and_use_but_not_by_micro_batch() -> None:
    """Fault dropout-masks-of-whole-model."""
    config = tiny_models.config(DROPPING)
    batch = tiny_models.batch(DROPPING, samples=3)
    masks = masks_of(config, batch)
    by_sample = {
        (name, sample): mask[:, sample] if name.startswith("hidden") else mask[sample]
        for name, mask in masks.items()
        for sample in range(3)
    }
    for (a, mask_a), (b, mask_b) in combinations(by_sample.items(), 2):
        if mask_a.shape == mask_b.shape:
            assert (mask_a == mask_b).double().mean().item() == pytest.approx(0.5, abs=0.06), (a, b)
    last = MicroBatch.of_samples(
        *(x[2:] for x in (batch.tokens_bs, batch.targets_bs, batch.weights_bs, batch.sample_ids_b))
    )
    for name, mask in masks_of(config, last).items():
        assert torch.equal(mask.squeeze(1 if name.startswith("hidden") else 0), by_sample[name, 2])


def test_evaluation_drops_nothing() -> None:
    batch = tiny_models.batch(DROPPING)
    stage = tiny_models.build(tiny_models.config(DROPPING), context.single())
    plain = tiny_models.build(tiny_models.config(TIED_GPT), context.single())
    assert not torch.equal(stage(None, batch), plain(None, batch))
    assert torch.equal(stage.eval()(None, batch), plain(None, batch))


# Recomputation

RECOMPUTES = [("none", ()), ("selective", ()), ("full", ()), ("full", ("::2",))]


def recompute_everywhere(tp: int, precision: str) -> list[tuple[list[Tensor], Tensor, int, int]]:
    """For each of RECOMPUTES: losses of two micro-batches, the flat gradient, and how often a layer and how often a
    core of attention ran."""
    model = replace(TIED_GPT, num_hidden_layers=4, hidden_dropout=0.1, attention_dropout=0.1)
    ctx = context.create(Grid(tp=tp))
    results = []
    for mode, layers in RECOMPUTES:
        config = tiny_models.config(model, tp, tp > 1, precision=precision, recompute=mode, recompute_layers=layers)
        stage = tiny_models.build(config, ctx)
        buffer = flatten([stage], ctx, zero_stage=0, bucket_mb=1.0, overlap=True)
        layer, core = gpt.GPTLayer.forward, Attention._core
        with (
            mock.patch.object(gpt.GPTLayer, "forward", autospec=True, side_effect=layer) as layers,
            mock.patch.object(Attention, "_core", autospec=True, side_effect=core) as cores,
        ):
            losses = [stage(None, tiny_models.batch(model, seed)) for seed in (0, 1)]
            for loss in losses:
                loss.backward()
            buffer.gradients.finish()
        results.append(([x.detach() for x in losses], buffer.grads, layers.call_count, cores.call_count))
    return results


@pytest.mark.parametrize("precision", slow_but([1], ["fp32", "bf16"]))
def test_recomputation_changes_no_bit(precision: str) -> None:
    """Fault recomputation-same-masks, on one rank and on two with sequence parallelism: masks are drawn again as they
    were, and weight gradients are added to the same fp32 buffer in the same order."""
    one_rank = recompute_everywhere(1, precision)
    for results in [one_rank, *run_ranks(2, recompute_everywhere, 2, precision)]:
        losses, gradients, *_ = results[0]
        assert gradients.any()
        for other_losses, other_gradients, *_ in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(losses, other_losses, strict=True))
            assert torch.equal(gradients, other_gradients)
        # Four layers and two micro-batches: 8 runs, and as many again of what is recomputed.
        assert [(layers, cores) for *_, layers, cores in results] == [(8, 8), (8, 16), (16, 16), (12, 12)]
