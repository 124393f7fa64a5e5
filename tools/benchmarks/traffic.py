"""Bytes that a rank of megapar sends in a training step: from the configuration, and for experts from the counts of
tokens routed to each.

For an untied Llama in fp32. Its key/value heads divide by tp, and its weights are multiples of 128 elements, so buckets
have no padding. With experts it is a Mixtral on data-parallel ranks alone, and its routers have no loss. Ring
algorithms among n ranks: an all-reduce of B bytes sends 2 B (n-1)/n, a gather to B bytes or a reduce-scatter of B bytes
B (n-1)/n.
"""

from collections.abc import Sequence
from itertools import pairwise

from megapar.config.derive import num_microbatches
from megapar.config.options import Config
from megapar.pipeline.schedules import placement

Choices = Sequence[Sequence[Sequence[int]]]
"""For each rank, layer and expert: how many of the rank's tokens chose the expert in the step."""


def stages_of_rank(config: Config, pp_rank: int) -> list[int]:
    """The numbers of the pipeline stages of a rank."""
    parallel = config.parallel
    place = placement(parallel.schedule, parallel.pp, parallel.vpp)
    return [stage for stage, rank in enumerate(place) if rank == pp_rank]


def layers_of_rank(config: Config, pp_rank: int) -> int:
    return sum(config.parallel.partition[stage] for stage in stages_of_rank(config, pp_rank))


def holds_ends(config: Config, pp_rank: int) -> tuple[bool, bool]:
    """Whether a rank has the embedding, and whether it has the head."""
    stages = stages_of_rank(config, pp_rank)
    return 0 in stages, len(config.parallel.partition) - 1 in stages


def local_parameters(config: Config, pp_rank: int) -> int:
    """Weights of one rank: its stages' layers, matrices cut over tp and norms whole. Experts do not count."""
    model = config.model
    parallel = config.parallel
    first, last = holds_ends(config, pp_rank)
    attention = 2 * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim * model.hidden_size
    mlp = 3 * model.intermediate_size * model.hidden_size
    if model.num_experts:
        mlp = model.num_experts * model.hidden_size  # the router
    vocabulary = model.vocab_size * model.hidden_size * (first + last)
    layers = layers_of_rank(config, pp_rank)
    return (layers * (attention + mlp) + vocabulary) // parallel.tp + (2 * layers + last) * model.hidden_size


def expected_traffic(config: Config, pp_rank: int, choices: Choices = (), rank: int = 0) -> dict[str, int]:
    """Bytes by axis, without axes that send nothing. `choices` and the number of the `rank` are for experts."""
    everything = {
        "tp": tensor_parallel(config, pp_rank),
        "cp": context_parallel(config, pp_rank),
        "pp": pipeline_parallel(config, pp_rank),
        "grad": data_parallel(config, pp_rank),
        "ep": expert_parallel(config, choices, rank),
        "expert_grad": replicas_of_experts(config, rank),
    }
    return {axis: sent for axis, sent in everything.items() if sent}


def hidden_bytes(config: Config) -> int:
    """Hidden states [s, b, h] of one micro-batch, for the s positions of one cp rank."""
    return 4 * rows(config) * config.model.hidden_size


def rows(config: Config) -> int:
    """Positions of one cp rank in all samples of a micro-batch."""
    return config.train.seq_length // config.parallel.cp * config.train.micro_batch_size


NORM_BYTES = 16  # of one message: the squared gradient norm and the votes to stop, fp64 each
LOSS_BYTES = 4  # of one message: the loss sum, fp32


def tensor_parallel(config: Config, pp_rank: int) -> int:
    """A layer and micro-batch: forward the outputs of attention and MLP are summed, backward the gradients of their
    inputs: 4 all-reduces of the hidden states. With sequence parallel each is a reduce-scatter and a gather, each half
    an all-reduce, and both inputs are gathered once more for the weight gradients: 10 halves.

    A micro-batch: the embedding's output and the head's input gradient are summed, 2 all-reduces; with sequence
    parallel 2 halves and, the head's input being gathered twice, 3. The loss takes a maximum and two sums of fp32
    numbers per token.

    A recomputed layer does its forward's 4 halves once more, but for its last collective: torch's checkpoint stops with
    all needs of the backward pass met, and nothing needs the MLP's sum. So 2 halves more. With sequence parallel this
    collective is a reduce-scatter: 3 halves more. With tp_overlap_chunks it is part of the MLP's last product and
    recomputed with it: all 4 halves.

    A step: the squared gradient norm and the votes to stop (fp64 each), and with sequence parallel the gradients of
    norm weights.
    """
    model = config.model
    parallel = config.parallel
    train = config.train
    first, last = holds_ends(config, pp_rank)
    layers = layers_of_rank(config, pp_rank)
    sequence = parallel.sequence_parallel
    a_layer, recomputed = (10, 3) if sequence else (8, 2)
    if parallel.tp_overlap_chunks > 1:
        recomputed = 4
    if train.recompute == "full":
        a_layer += recomputed  # recompute_every 1
    halves = layers * a_layer + first * 2 + last * (3 if sequence else 2)
    loss = last * _all_reduce(3 * 4 * rows(config), parallel.tp)
    norms = sequence * _all_reduce(4 * (2 * layers + last) * model.hidden_size, parallel.tp)
    one_micro_batch = halves * _all_reduce(hidden_bytes(config), parallel.tp) // 2 + loss
    return num_microbatches(config) * one_micro_batch + norms + _all_reduce(NORM_BYTES, parallel.tp)


def context_parallel(config: Config, pp_rank: int) -> int:
    """A layer and micro-batch, KV being the keys and values of one rank: gather and ring send (c-1) KV forward, and
    backward as much again and the gradients of it in fp32. Ulysses sends (c-1)/c of q, k, v and of the output, forward
    and backward; a head of k and v is sent to each of its readers.

    Recomputed layers send their forward again. With recompute selective torch's checkpoint stops before the last
    collective, the way back of the output.
    """
    model = config.model
    parallel = config.parallel
    cp = parallel.cp
    if cp == 1:
        return 0
    heads = model.num_attention_heads // parallel.tp
    kv_heads = model.num_key_value_heads // parallel.tp
    one_head = 4 * rows(config) * model.head_dim
    if parallel.cp_attention == "ulysses":
        read = max(kv_heads // cp, 1)  # key/value heads of a rank between the exchanges
        to_heads = (cp - 1) * (heads // cp + 2 * read) * one_head
        to_positions = (cp - 1) * (heads // cp) * one_head
        again = {"none": 0, "selective": to_heads, "full": to_heads + to_positions}[config.train.recompute]
        a_layer = 2 * (to_heads + to_positions) + again
    else:
        forward = (cp - 1) * 2 * kv_heads * one_head
        a_layer = 3 * forward if config.train.recompute == "none" else 4 * forward
    return num_microbatches(config) * layers_of_rank(config, pp_rank) * a_layer


def pipeline_parallel(config: Config, pp_rank: int) -> int:
    """A micro-batch: hidden states to the next stage, their gradients to the one before, slices of them with sequence
    parallel, if these stages live on other ranks. A step: the squared gradient norm and the votes to stop (fp64 each),
    and the loss (fp32)."""
    parallel = config.parallel
    place = placement(parallel.schedule, parallel.pp, parallel.vpp)
    links = [ends for ends in pairwise(place) if ends[0] != ends[1]]
    messages = sum((sender == pp_rank) + (receiver == pp_rank) for sender, receiver in links)
    message = hidden_bytes(config) // (parallel.tp if parallel.sequence_parallel else 1)
    return (
        num_microbatches(config) * messages * message
        + _all_reduce(NORM_BYTES, parallel.pp)
        + _all_reduce(LOSS_BYTES, parallel.pp)
    )


def data_parallel(config: Config, pp_rank: int) -> int:
    """A step: gradients and weights; then the squared gradient norm and the votes to stop (fp64 each). The number of
    targets and the loss (fp32 each). With experts the tokens of each expert of each layer (int64). All over dp x cp."""
    dp = config.parallel.dp * config.parallel.cp
    targets = _all_reduce(4, dp)
    loss = _all_reduce(LOSS_BYTES, dp)
    load = _all_reduce(8 * config.model.num_hidden_layers * config.model.num_experts, dp)
    return gradients_and_weights(config, pp_rank) + _all_reduce(NORM_BYTES, dp) + targets + loss + load


def gradients_and_weights(config: Config, pp_rank: int) -> int:
    """Gradients are all-reduced (zero_stage 0), or reduce-scattered and the new weights gathered, in fp32.

    With grad_reduce_dtype bf16 gradients are reduced in half the bytes. With zero_stage 2 and 3 gradients are
    reduce-scattered in every backward, and with 3 weights are gathered for every forward and backward, and not after
    the update. A unit stays if the next action uses it too: the head between a forward and its backward, the embedding
    between a backward and the next forward. With schedule breadth all micro-batches share them. Stages 2 and 3 are for
    one pipeline rank.
    """
    dp = config.parallel.dp * config.parallel.cp
    weights = 4 * local_parameters(config, pp_rank)
    half = _all_reduce(weights, dp) // 2  # a gather or a reduce-scatter of all of them
    reduction = half // 2 if config.optimizer.grad_reduce_dtype == "bf16" else half
    stage = config.optimizer.zero_stage
    if stage < 2:
        return half + reduction
    rounds = 1 if config.parallel.schedule == "breadth" else num_microbatches(config)
    if stage == 2:
        return rounds * reduction + half
    embedding = 4 * config.model.vocab_size * config.model.hidden_size
    head = embedding + 4 * config.model.hidden_size  # with its norm
    kept = rounds * _all_reduce(head, dp) // 2 + (rounds - 1) * _all_reduce(embedding, dp) // 2
    return rounds * reduction + 2 * rounds * half - kept


def experts_of_rank(config: Config, rank: int) -> range:
    """The numbers of the experts of `rank`. Ranks of ep are neighbors."""
    number = config.model.num_experts
    ep = config.parallel.ep
    place = rank % ep
    return range(number * place // ep, number * (place + 1) // ep)


def expert_parallel(config: Config, choices: Choices, rank: int) -> int:
    """A layer and micro-batch: the ranks of ep tell each other how many rows go to each expert (int64). The row of a
    token travels to each of its experts on other ranks with a weight (fp32), and the result travels back; backward
    their gradients do."""
    ep = config.parallel.ep
    if ep == 1:
        return 0
    layers = config.model.num_hidden_layers
    counts = (ep - 1) * 8 * config.model.num_experts * layers * num_microbatches(config)
    mine = experts_of_rank(config, rank)
    first = rank // ep * ep
    leaving = sum(sum(layer) - sum(layer[mine.start : mine.stop]) for layer in choices[rank])
    arriving = 0
    for other in range(first, first + ep):
        if other != rank:
            arriving += sum(sum(layer[mine.start : mine.stop]) for layer in choices[other])
    return counts + 4 * (2 * config.model.hidden_size + 1) * (leaving + arriving)


def replicas_of_experts(config: Config, rank: int) -> int:
    """A step: the gradients of experts, over the ranks with the same ones; as for other weights."""
    model = config.model
    if model.experts is None:
        return 0
    one_expert = 3 * model.experts.moe_intermediate_size * model.hidden_size
    elements = model.num_hidden_layers * len(experts_of_rank(config, rank)) * one_expert
    return _all_reduce(4 * elements, config.parallel.dp // config.parallel.ep)


def _all_reduce(nbytes: int, ranks: int) -> int:
    return 2 * nbytes * (ranks - 1) // ranks
