"""Builds this rank's pipeline stages from a configuration, and counts a model's parameters and FLOPs."""

from collections.abc import Sequence
from fractions import Fraction

import torch

from megapar.config.options import Config, ModelConfig, ParallelConfig
from megapar.context import ParallelContext, single
from megapar.device import choose_kernels
from megapar.params import ParamSpec, Piece, selected, spec_of
from megapar.pipeline.partition import explicit, partition
from megapar.pipeline.schedules import embedding_ranks, placement
from megapar.precision import model_dtype
from megapar.products import MatrixProducts
from megapar.recompute import Recompute
from megapar.sharding import Sharding
from megapar_models.registry import find
from megapar_models.stage import Blueprint, Stage


def build_stages(
    config: Config, ctx: ParallelContext, *, layers: Sequence[range] | None = None, allocate: bool = True
) -> dict[int, Stage]:
    """Build this rank's stages on the context's device, uninitialized; returns them by global stage number.

    The schedule decides which rank has which stage. `config` must be validated. With a context on the meta device the
    stages have shapes and no memory. Without `allocate` parameters have no memory yet (`megapar.train.trainer.start`).
    With optimizer.zero_stage 2 and 3 the stages are fine stages: the embedding, each layer, and norm with head are one
    each. `layers` are those of `stage_layers(config)`, if they are known.
    """
    model = config.model
    first_rank, last_rank = embedding_ranks(config.parallel)
    blueprint = make_blueprint(config, ctx, allocate=allocate)
    if layers is None:
        layers = stage_layers(config)
    ranks = placement(config.parallel.schedule, ctx.pp.size, config.parallel.vpp)
    fine_stages: tuple[int, ...] = ()
    if config.optimizer.zero_stage >= 2:
        parts = [_fine_layers(stage, layers) for stage in range(len(layers))]
        fine_stages = tuple(len(part) for part in parts)
        ranks = [rank for rank, part in zip(ranks, parts, strict=True) for _ in part]
        layers = [fine for part in parts for fine in part]
    stages: dict[int, Stage] = {}
    for number, rank in enumerate(ranks):
        if rank != ctx.pp.rank:
            continue
        # If one rank has the first and the last stage, both use one parameter for the tied embedding. Otherwise the
        # last stage makes a copy, and the axis `tied` of the blueprint sums the gradients of both.
        tied = None
        if model.tie_word_embeddings and first_rank == last_rank and 0 < number == len(layers) - 1:
            tied = stages[0].embedding_weight()
        stages[number] = find(model.family).stage(
            blueprint, layers[number], first=number == 0, last=number == len(layers) - 1, tied=tied
        )
        stages[number].fine_stages = fine_stages
    return stages


def _fine_layers(stage: int, layers: Sequence[range]) -> list[range]:
    """The layers of each fine stage of a stage: none of the embedding, one of each layer, none of norm and head."""
    fine = [range(number, number + 1) for number in layers[stage]]
    if stage == 0:
        fine.insert(0, range(layers[0].start, layers[0].start))
    if stage == len(layers) - 1:
        fine.append(range(layers[stage].stop, layers[stage].stop))
    return fine


def make_blueprint(config: Config, ctx: ParallelContext, *, allocate: bool = True) -> Blueprint:
    """What all stages of this rank have in common. `allocate` is as in `build_stages`."""
    first_rank, last_rank = embedding_ranks(config.parallel)
    kernels = choose_kernels(config.kernels.backend, ctx.device)
    sharding = Sharding.of(
        ctx,
        model_dtype(config.train.precision),
        sequence_parallel=config.parallel.sequence_parallel,
        overlap_chunks=config.parallel.tp_overlap_chunks,
        allocate=allocate,
    )
    return Blueprint(
        config.model,
        sharding,
        Recompute(config.train.recompute, config.train.recompute_every),
        config.train.seed,
        tied=ctx.tied if config.model.tie_word_embeddings and first_rank != last_rank else None,
        kernels=kernels,
        products=MatrixProducts(kernels.weight_gradient),
        z_loss=config.train.z_loss,
        loss_chunk=config.kernels.loss_chunk,
        cp_attention=config.parallel.cp_attention,
    )


def stage_layers(config: Config) -> list[range]:
    """The layers of each of the pp * vpp stages: those of `parallel.partition`, or a split that balances the cost.

    The cost is in FLOPs per token. Head and loss count on the last stage. The embedding's lookup is nearly free.
    """
    model = config.model
    parallel = config.parallel
    if parallel.partition:
        return explicit(parallel.partition, model.num_hidden_layers, parallel.pp * parallel.vpp)
    scores = config.train.seq_length * model.num_attention_heads * model.head_dim
    layers = [float(scores)] * model.num_hidden_layers
    for name, (piece, spec) in declarations(model).items():
        layer = _depth(name, model.num_hidden_layers)
        if 0 <= layer < model.num_hidden_layers:
            layers[layer] += float(torch.Size(piece.shape).numel() * spec.token_share)
    return balanced(config, layers, float(model.hidden_size), float(model.vocab_size * model.hidden_size))


def balanced(config: Config, layers: Sequence[float], first: float, last: float) -> list[range]:
    """The layers of each stage, balanced by the costs of each layer, of the embedding, and of norm, head and loss."""
    return partition(layers, first, last, config.parallel.pp * config.parallel.vpp)


class StageBuilder:
    """`build_stages` for one rank after another. It balances the stages of a configuration once.

    To balance many layers over many stages takes longer than to build the stages of a rank.
    """

    def __init__(self) -> None:
        self._layers: dict[tuple[ModelConfig, ParallelConfig, int], list[range]] = {}

    def __call__(self, config: Config, ctx: ParallelContext) -> dict[int, Stage]:
        decides = (config.model, config.parallel, config.train.seq_length)
        if decides not in self._layers:
            self._layers[decides] = stage_layers(config)
        return build_stages(config, ctx, layers=self._layers[decides])


def _whole_model(model: ModelConfig) -> Stage:
    """The model in one stage on the meta device: from it parameters and FLOPs are counted, and from no second list."""
    sharding = Sharding.of(single(torch.device("meta")), torch.float32)
    blueprint = Blueprint(model, sharding, Recompute(), seed=0)
    return find(model.family).stage(blueprint, range(model.num_hidden_layers), first=True, last=True)


def declarations(model: ModelConfig) -> dict[str, tuple[Piece, ParamSpec]]:
    """Every logical tensor of the model by name, and the declaration of its parameter. A tied embedding is listed once.

    A fused parameter declares several tensors.
    """
    specs = [spec_of(param) for param in _whole_model(model).parameters()]
    return {piece.name: (piece, spec) for spec in specs for piece in spec.pieces}


def logical_tensors(model: ModelConfig) -> dict[str, Piece]:
    """Every logical tensor of the model by name. A tied embedding is listed once."""
    return {name: piece for name, (piece, _) in declarations(model).items()}


def layer_kinds(model: ModelConfig) -> list[int]:
    """For each layer the number of the first layer that has tensors of the same names and shapes.

    Models may have layers with experts and layers without.
    """
    tensors: list[set[tuple[str, Sequence[int]]]] = [set() for _ in range(model.num_hidden_layers)]
    for name, piece in logical_tensors(model).items():
        layer = _depth(name, model.num_hidden_layers)
        if 0 <= layer < model.num_hidden_layers:
            tensors[layer].add((name.removeprefix(f"layers.{layer}."), piece.shape))
    return [tensors.index(own) for own in tensors]


def parameter_count(model: ModelConfig) -> int:
    """The number of parameters of the whole model, without padding of the vocabulary. A tied embedding counts once."""
    return sum(torch.Size(piece.shape).numel() for piece in logical_tensors(model).values())


def active_parameter_count(model: ModelConfig) -> int:
    """The number of parameters that a token is computed with: of a mixture, those of its own experts alone."""
    counts = (torch.Size(piece.shape).numel() * spec.token_share for piece, spec in declarations(model).values())
    return round(sum(counts))  # a whole number: each layer has num_experts_per_tok times an expert's parameters


def describe_size(model: ModelConfig) -> str:
    """The number of parameters, and of active ones if there are experts that not every token uses."""
    total = parameter_count(model)
    active = active_parameter_count(model)
    return f"{total:,} parameters" if active == total else f"{total:,} parameters, {active:,} active"


def flops_per_token(model: ModelConfig, seq_length: int, trainable: Sequence[str] = ()) -> int:
    """The FLOPs of forward and backward for one token, where train.trainable is `trainable`.

    Each weight of a matrix product counts 2 for the forward pass, 2 for the gradient of the product's input, and 2 for
    its own gradient: those of the head do, those of the embedding's lookup do not. Of a mixture's experts those count
    that a token is sent to. Causal attention counts 2 * s * heads * head_dim for each layer's forward pass, because
    half of its s^2 scores are computed, and twice as much for its backward pass. As in Megatron-LM, attention counts
    over the whole sample, also if data.documents=apart computes less.

    Frozen weights have no gradient of their own. Gradients of inputs are counted back to the first layer that holds a
    trained parameter, and for all products of that layer. Layers before it need none.
    """
    layers = model.num_hidden_layers
    shapes: dict[str, Sequence[int]] = {}
    share: dict[str, Fraction] = {}
    trained: set[str] = set()
    for param in _whole_model(model).parameters():
        spec = spec_of(param)
        shapes.update({piece.name: piece.shape for piece in spec.pieces})
        share.update({piece.name: spec.token_share for piece in spec.pieces})
        if param.requires_grad and selected(spec, trainable):  # a model may freeze a parameter of its own
            trained.update(piece.name for piece in spec.pieces)
    first = min((_depth(name, layers) for name in trained), default=layers + 2)
    # A tied head is listed as the embedding.
    head = "head.weight" if "head.weight" in shapes else "embedding.weight"
    total = Fraction(0)
    for name, shape in shapes.items():
        if len(shape) != 2 or name in ("embedding.weight", "positions.weight", "head.weight"):
            continue
        passes = _passes(input_gradient=first <= _depth(name, layers), weight_gradient=name in trained)
        total += 2 * passes * torch.Size(shape).numel() * share[name]
    # The head is alone at its depth: its input needs a gradient only if a parameter before it is trained.
    passes = _passes(input_gradient=first <= layers, weight_gradient=head in trained)
    total += 2 * passes * model.vocab_size * model.hidden_size
    scores = 2 * seq_length * model.num_attention_heads * model.head_dim
    for layer in range(layers):
        total += 3 * scores if first <= layer else scores
    return round(total)  # a whole number: each layer has num_experts_per_tok times an expert's FLOPs


def _depth(name: str, layers: int) -> int:
    """The place of a logical tensor in the forward pass: its layer, -1 before the layers, `layers` or more after."""
    module, _, rest = name.partition(".")
    if module == "layers":
        return int(rest.partition(".")[0])
    # A tensor of a name that is not known here counts as one before the layers: the count is then never too small.
    return {"norm": layers, "head": layers + 1}.get(module, -1)


def _passes(*, input_gradient: bool, weight_gradient: bool) -> int:
    """How many products as large as the forward one a matrix takes part in."""
    passes = 1
    if input_gradient:
        passes += 1
    if weight_gradient:
        passes += 1
    return passes
