"""Builds this rank's pipeline stages from a configuration."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megapar_kernels.backend import Kernels
from torch import nn

from megapar.activations.recompute import Recompute
from megapar.base.grid import Grid
from megapar.config.model_options import ModelConfig
from megapar.config.options import AdapterConfig, Config
from megapar.declare.batch import PipelineStage
from megapar.declare.context import ParallelContext, planned
from megapar.declare.sharding import Sharding, model_dtype
from megapar.declare.stage_set import Declared, StageSet
from megapar.linear.fp8_products import Fp8Products, fp8_products
from megapar.linear.torch_products import TORCH_PRODUCTS, TorchProducts
from megapar.pipeline.partition import explicit, partition, split_finely
from megapar.pipeline.schedules import embedding_ranks, placement
from megapar.system.device import kernels_of
from megapar_models.counts import WholeModel, mtp_cost, size_and_flops
from megapar_models.factory import initializations
from megapar_models.fp8_matrices import Fp8Matrices
from megapar_models.registry import find, find_number_format, find_objective, kinds_of
from megapar_models.stage import Stage, title


def build_stages(
    config: Config, ctx: ParallelContext, *, layers: Sequence[range] | None = None, allocate: bool = True
) -> StageSet[Stage]:
    """Build this rank's stages on the context's device, uninitialized.

    The schedule assigns the stages to the ranks. `config` must be validated. With a context on the meta device the
    stages have shapes and no memory. Without `allocate` parameters have no memory yet (`megapar.train.trainer.start`).
    With optimizer.zero_stage 2 and 3 the stages are fine stages: the embedding, each layer, and norm with head are one
    each. `layers` are those of `stage_layers(config)`, if they are known.
    """
    model = config.model
    first_rank, last_rank = embedding_ranks(config.parallel)
    make_stage = stage_maker(config, ctx, allocate=allocate)
    if layers is None:
        layers = stage_layers(config)
    ranks = placement(config.parallel.schedule, ctx.pp.size, config.parallel.vpp)
    fine_stages: tuple[int, ...] = ()
    if config.optimizer.zero_stage >= 2:
        fine_stages, layers, ranks = split_finely(layers, ranks)
    stages: dict[int, Stage] = {}
    for number, rank in enumerate(ranks):
        if rank != ctx.pp.rank:
            continue
        # If one rank has the first and the last stage, both use one parameter for the embedding. Otherwise the last
        # stage makes a copy, and the gradients of both are summed.
        tied_weight = None
        if _last_stage_uses_embedding(model) and first_rank == last_rank and 0 < number == len(layers) - 1:
            tied_weight = stages[0].embedding_weight()
        stages[number] = make_stage(
            layers[number], first=number == 0, last=number == len(layers) - 1, tied_weight=tied_weight
        )
    return StageSet(stages, layers, ranks, fine_stages, declared(config))


def declared(config: Config) -> Declared:
    """What the family declares of the model, and the objective of its losses."""
    of_model = find(config.model.family).stage.declared(config.model)
    objective = find_objective(config.train.objective)
    of_model = replace(of_model, losses=(*of_model.losses, *objective.added_losses), divided_by=objective.divided_by)
    if config.optimizer.qk_clip:
        most_heads = max(kind.heads_of(config.model).query_heads for kind in kinds_of(config.model))
        of_model = replace(of_model, logits=(config.model.all_layers, most_heads))
    if config.log.fp8_every:
        of_model = replace(of_model, fp8_products=tuple(fp8_matrices(config).watched))
    return of_model


def _last_stage_uses_embedding(model: ModelConfig) -> bool:
    """Whether the last stage has the embedding's matrix too: as its head, or to embed tokens."""
    return model.tie_word_embeddings or model.embeds_on_last_stage


def stage_maker(config: Config, ctx: ParallelContext, *, allocate: bool = True) -> Callable[..., Stage]:
    """The class of the family's stage, with the arguments common to all stages of this rank given already.

    Call it with the layers of a stage, `first` and `last`. `allocate` is as in `build_stages`.
    """
    model = config.model
    family = find(model.family)
    first_rank, last_rank = embedding_ranks(config.parallel)
    kernels = kernels_of(config.kernels, ctx.device, config.train.precision)
    sharding = Sharding.of(
        ctx,
        model_dtype(config.train.precision),
        sequence_parallel=config.parallel.sequence_parallel,
        overlap_chunks=config.parallel.tp_overlap_chunks,
        expert_chunks=max(config.parallel.ep_overlap_chunks, 1),  # where nobody chose a number, nothing is cut
        allocate=allocate,
    )
    products = TorchProducts(kernels.weight_gradient, kernels.grouped_products)
    factory = family.factory(sharding, *initializations(model), kernels, products, config.parallel.cp_attention)
    factory = replace(
        factory,
        adapter=config.adapter,
        measures_logits=config.optimizer.qk_clip > 0,
        number_format=find_number_format(config),
        fp8=fp8_rule(config, kernels, products, ctx.device),
    )
    if config.train.fp8 != "none" and ctx.device.type != "meta":
        fp8_matrices(config).check()  # before this rank builds its part: all ranks raise the same error
    if factory.beside or config.adapter.targets:
        # It raises ConfigError for a pattern without a match, before this rank builds its part.
        WholeModel(model, config.adapter)
    return partial(
        family.stage,
        model,
        factory,
        tied_over=ctx.tied if _last_stage_uses_embedding(model) and first_rank != last_rank else None,
        recompute_rule=Recompute.of(config.train),
        seed=config.train.seed,
        z_loss=config.train.z_loss,
        loss_chunk=config.kernels.loss_chunk,
        objective=partial(find_objective(config.train.objective).total, train=config.train),
        bundle=family.stage.bundle(model),
    )


def fp8_rule(config: Config, kernels: Kernels, products: TorchProducts, device: torch.device) -> Fp8Matrices | None:
    """Return which matrices are multiplied in FP8 on `device`, or None without train.fp8.

    `products` multiply what is in the dtype of activations, and `kernels` say what quantizes.
    """
    if config.train.fp8 == "none":
        return None
    in_fp8 = fp8_products(device, model_dtype(config.train.precision), products, kernels.quantize)
    watches = config.log.fp8_every > 0
    return Fp8Matrices(in_fp8, config.train.fp8_skip, config.model.all_layers, watches=watches)


def fp8_matrices(config: Config, device: torch.device | None = None) -> Fp8Matrices:
    """Return what train.fp8 means for each matrix of the whole model, in the layout of `config`.

    The products are those of `device`, by default the meta device.
    """
    device = device or torch.device("meta")
    kernels = kernels_of(config.kernels, device, config.train.precision)
    rule = fp8_rule(config, kernels, TORCH_PRODUCTS, device)
    assert rule is not None, "train.fp8 is none"
    parallel = config.parallel
    # Only tp and etp cut matrices. dp is as large as etp needs.
    has_experts = config.model.num_experts > 0
    grid = Grid(tp=parallel.tp, dp=parallel.etp, ep=1, etp=parallel.etp) if has_experts else Grid(tp=parallel.tp)
    ctx = planned(grid, 0, device=torch.device("meta"))
    sharding = Sharding.of(ctx, torch.float32, sequence_parallel=parallel.sequence_parallel)
    family = find(config.model.family)
    factory = replace(family.factory(sharding, *initializations(config.model)), adapter=config.adapter, fp8=rule)
    layers = range(config.model.num_hidden_layers)
    family.stage(config.model, factory, layers, first=True, last=True, recompute_rule=Recompute())
    return rule


def in_fp8(config: Config, device: torch.device) -> tuple[list[str], dict[str, Any]]:
    """Return what train.fp8 means in a run on `device`: lines for the user, and what the run records. Empty without it.

    Raises ConfigError if train.fp8_skip means no matrix, or if no matrix is left.
    """
    if config.train.fp8 == "none":
        return [], {}
    matrices = fp8_matrices(config, device)
    matrices.check()
    assert isinstance(matrices.products, Fp8Products)  # of `fp8_rule`
    return [f"train.fp8 blocks: {matrices.in_words()}", matrices.products.in_words()], matrices.by_format()


def described(config: Config, device: torch.device) -> tuple[tuple[str, list[str], dict[str, Any]], int]:
    """Return what a run on `device` says of its model, and the FLOPs of a token.

    The former are the number of parameters in words, and what `in_fp8` returns.
    """
    words, flops = size_and_flops(config)
    return (words, *in_fp8(config, device)), flops


def whole_model(config: Config) -> WholeModel:
    """The model of a run, with its adapters."""
    return WholeModel(config.model, config.adapter)


def stage_layers(config: Config, whole: Callable[[Config], WholeModel] = whole_model) -> list[range]:
    """The layers of each of the pp * vpp stages: those of `parallel.partition`, or a split of balanced cost.

    The cost is in multiplications per token. Head, loss and layers of multi-token prediction count on the last stage.
    The embedding's lookup is nearly free. `whole` returns the model of which the costs are counted.
    """
    model = config.model
    parallel = config.parallel
    num_stages = parallel.pp * parallel.vpp
    if parallel.partition:
        return explicit(parallel.partition)
    if num_stages == 1:
        return [range(model.num_hidden_layers)]  # without building the model to count its costs
    counted = whole(config)
    length = config.train.seq_length
    last = float(model.head_rows * model.hidden_size) + mtp_cost(counted, length)
    return partition(counted.layer_costs(length), float(model.hidden_size), last, num_stages)


class StageBuilder:
    """Builds the parts of models for plans (`megapar_tools.plan.parts.Builder`).

    What takes long is kept: the whole model of which layers are counted and compared, and the balanced stages.
    """

    def __init__(self) -> None:
        self._models: dict[tuple[ModelConfig, AdapterConfig], WholeModel] = {}
        self._kinds: dict[tuple[object, ...], list[int]] = {}
        self._layers: dict[tuple[object, ...], list[range]] = {}

    def stage_layers(self, config: Config) -> list[range]:
        """The layers of each stage: those of the function `stage_layers`."""
        parallel = config.parallel
        decides = (
            *(config.model, config.adapter, config.train.seq_length),
            *(parallel.pp * parallel.vpp, parallel.partition),
        )
        if decides not in self._layers:
            self._layers[decides] = stage_layers(config, self._whole)
        return self._layers[decides]

    def layer_kinds(self, config: Config) -> list[int]:
        """For each layer the number of the first layer of the same kind (`WholeModel.layer_kinds`).

        Layers of a kind are handed the same tensors, and leave the same ones (`megapar_models.handed`).
        """
        train, parallel = config.train, config.parallel
        in_fp8 = (train.fp8, train.fp8_skip, *((parallel.tp, parallel.etp) if train.fp8 != "none" else ()))
        decides = (config.model, config.adapter, train.seq_length, *in_fp8)
        if decides not in self._kinds:
            kinds = self._whole(config).layer_kinds(train.seq_length)
            bundle = find(config.model.family).stage.bundle(config.model)
            around = [(kind, bundle.at(number), bundle.at(number + 1)) for number, kind in enumerate(kinds)]
            kinds = [around.index(one) for one in around]
            if train.fp8_skip:
                formats = fp8_matrices(config).by_layer()[: len(kinds)]
                pairs = list(zip(kinds, formats, strict=True))
                kinds = [pairs.index(pair) for pair in pairs]
            self._kinds[decides] = kinds
        return self._kinds[decides]

    def maker(self, config: Config, ctx: ParallelContext) -> Callable[..., Stage]:
        """The function `stage_maker`."""
        return stage_maker(config, ctx)

    def embedding_weight(self, config: Config, first: PipelineStage) -> nn.Parameter | None:
        """The embedding's matrix, if the last stage uses it too."""
        assert isinstance(first, Stage)  # of `maker`
        return first.embedding_weight() if _last_stage_uses_embedding(config.model) else None

    def declared(self, config: Config) -> Declared:
        """The function `declared`."""
        return declared(config)

    def in_fp8(self, config: Config) -> list[str]:
        """Which matrices are multiplied in FP8, as the first line of `in_fp8`."""
        return in_fp8(config, torch.device("meta"))[0][:1]

    def flops_per_token(self, config: Config) -> int:
        """FLOPs of a token, forward and backward, without those of frozen weights' gradients."""
        return self._whole(config).flops_per_token(config.train.seq_length, config.train.trainable)

    def title(self, layers: range, *, first: bool, last: bool) -> str:
        """The parts of a stage in words."""
        return title(layers, first=first, last=last)

    def _whole(self, config: Config) -> WholeModel:
        decides = (config.model, config.adapter)
        if decides not in self._models:
            self._models[decides] = WholeModel(*decides)
        return self._models[decides]
