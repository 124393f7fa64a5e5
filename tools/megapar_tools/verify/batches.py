"""Global batches of random tokens, made to show mistakes of a layout. Equal losses of all tokens would hide them."""

from dataclasses import replace

import torch
from torch import Tensor

from megapar.config.options import Config
from megapar.context_parallel import deal
from megapar.data import order
from megapar.declare.batch import MicroBatch, Targets
from megapar.declare.context import ParallelContext


def micro_batches(
    config: Config, ctx: ParallelContext, step: int, num_targets: int, *, packed: bool = False, pairs: bool = False
) -> list[MicroBatch]:
    """This rank's micro-batches of step `step`, on its device. The global batch is the same in every layout.

    Every token has a weight of its own in the loss, from 0.1 to 1.1. One sample is masked whole. `packed` samples are
    four documents each. With `pairs` they are two documents and padding, with `references_bd`. A rank gets its part of
    their positions. `num_targets` is how many tokens ahead the model's losses reach.
    """
    samples = config.train.global_batch_size
    length = config.train.seq_length
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(config.model.vocab_size, (samples, length + num_targets), generator=generator)
    weights = 0.1 + torch.rand(samples, length, generator=generator)
    weights[min(3, samples - 1)] = 0.0
    later = [
        Targets(tokens[:, n : n + length], torch.rand(samples, length, generator=generator))
        for n in range(2, num_targets + 1)
    ]
    ids = torch.arange(samples) + step * samples
    positions = order.micro_batch_positions(0, samples, config.train.micro_batch_size, ctx.dp.rank, ctx.dp.size)
    rows = [torch.from_numpy(row) for row in positions]
    batches = [
        MicroBatch.of_samples(
            tokens[r, :length],
            tokens[r, 1 : length + 1],
            weights[r],
            ids[r],
            later_targets=[Targets(*(x[r] for x in targets)) for targets in later],
        )
        for r in rows
    ]
    if packed:
        batches = [replace(batch, starts=four_documents(row, length)) for batch, row in zip(batches, rows, strict=True)]
    if pairs:
        batches = [as_pairs(batch) for batch in batches]
    held = torch.tensor(deal.positions(length, ctx.cp.size, ctx.cp.rank))
    # Positions of their own, as the batches of a loader have.
    return [batch.columns(held.clone()).to(ctx.device) for batch in batches]


def four_documents(samples: Tensor, length: int) -> Tensor:
    """`MicroBatch.starts` of samples of `length` tokens, with documents of 1 + the sample's number, 3, 7, and the rest.

    `length` is at least 12.
    """
    firsts = torch.arange(len(samples)) * length
    second = firsts + 1 + samples % (length - 11)  # so that the last document has a token
    inner = torch.stack((firsts, second, second + 3, second + 10), dim=1).flatten()
    return torch.cat((inner, torch.tensor([len(samples) * length]))).int()


def as_pairs(batch: MicroBatch) -> MicroBatch:
    """Whole samples as pairs of unequal length, with padding. The first two tokens of each document are its prompt."""
    length = batch.sample_length
    numbers = batch.sample_ids_b % 4
    firsts = torch.arange(batch.size) * length
    starts_bd = torch.stack([firsts, firsts + length // 3 + numbers, firsts + 5 * length // 6 - numbers], dim=1)
    starts = torch.cat([starts_bd.flatten(), torch.tensor([batch.size * length])]).int()
    pairs = replace(batch, starts=starts)
    answers_bs = pairs.document_positions_bs() > 0  # the second token of a prompt is the target of the first
    answers_bs &= ~pairs.last_of_documents_bs() & (pairs.documents_in_samples_bs() < 2)
    weights_bs = 0.5 * (0.1 + batch.weights_bs) * answers_bs
    # Close to what a random model says of the answers. Other references would saturate every loss.
    lengths_bd = torch.stack([(weights_bs * (pairs.documents_in_samples_bs() == n)).sum(1) for n in (0, 1)], dim=1)
    offsets_bd = (batch.sample_ids_b[:, None] * torch.tensor([3, 5])) % 7 / 2
    return replace(pairs, weights_bs=weights_bs, references_bd=1.5 - offsets_bd - 5 * lengths_bd)
