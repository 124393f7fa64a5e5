"""The recorded work of the parts of a pipeline: embedding, each layer, norm with head. Like parts are recorded once."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from megapar import context
from megapar.batch import PipelineStage
from megapar.config.options import Config, ModelConfig
from megapar.launch.grid import grid_of
from megapar.params import spec_of
from megapar.pipeline.sharding_plan import Item
from megapar.plan.parts import META, Builder, meta_batch
from megapar.plan.work import Tape, Work, record, recording


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a model on one rank: what it does with a micro-batch, and the elements of its parameters.

    `elements` counts them on this rank, by the axis of their gradients' sum. `tied` are those of a tied embedding.
    `itemsize` is of a weight.
    """

    work: Work
    elements: Mapping[str, int]
    tied: int
    itemsize: int


Stage = list[tuple[Part, int]]
"""The parts of a pipeline stage in their order. A number says how often a part follows itself."""


@dataclass
class Works:
    """The recorded parts of all configurations of one planning. Each is recorded once."""

    builder: Builder
    _parts: dict[tuple[Hashable, ...], Part] = field(default_factory=dict)
    _layers: dict[tuple[Hashable, ...], Sequence[range]] = field(default_factory=dict)
    plans: dict[Hashable, Sequence[Sequence[Item]]] = field(default_factory=dict)
    """The plans of pipelines made before by `megapar.plan.step_time`."""
    makespans: dict[Hashable, float] = field(default_factory=dict)
    """How long such a plan takes, by what decides it."""
    _flops: dict[tuple[Hashable, ...], int] = field(default_factory=dict)
    _kinds: dict[ModelConfig, Sequence[Hashable]] = field(default_factory=dict)
    _makers: dict[tuple[Hashable, ...], tuple[Callable[..., PipelineStage], Tape]] = field(default_factory=dict)

    def of(self, config: Config, *, halves: bool = False) -> list[Stage]:
        """The parts of each of the pp * vpp stages. With `halves` they have I and W too.

        `config` is validated, and its kernels are those of the planned machine.
        """
        stages = self._stage_layers(config)
        recorded: dict[Hashable, Part] = {}
        found = []
        for number, layers in enumerate(stages):
            parts: Stage = []
            if number == 0:
                parts.append((self._part(config, "embedding", range(layers.start, layers.start), halves), 1))
            for layer in layers:
                kind = self._kind(config, layer)
                if kind not in recorded:
                    recorded[kind] = self._part(config, kind, range(layer, layer + 1), halves)
                part = recorded[kind]
                if parts and parts[-1][0] is part:
                    parts[-1] = part, parts[-1][1] + 1
                else:
                    parts.append((part, 1))
            if number == len(stages) - 1:
                parts.append((self._part(config, "head", range(layers.stop, layers.stop), halves), 1))
            found.append(parts)
        return found

    def flops_per_token(self, config: Config) -> int:
        """FLOPs of a token, forward and backward, for MFU."""
        key = config.model, config.train.seq_length
        if key not in self._flops:
            self._flops[key] = self.builder.flops_per_token(config)
        return self._flops[key]

    def _stage_layers(self, config: Config) -> Sequence[range]:
        parallel = config.parallel
        key = config.model, parallel.pp * parallel.vpp, parallel.partition, config.train.seq_length
        if key not in self._layers:
            self._layers[key] = self.builder.stage_layers(config)
        return self._layers[key]

    def _kind(self, config: Config, layer: int) -> Hashable:
        """What decides what a layer does: its kind, and whether it is recomputed."""
        if config.model not in self._kinds:
            self._kinds[config.model] = self.builder.layer_kinds(config)
        recomputed = config.train.recompute == "full" and layer % config.train.recompute_every == 0
        return self._kinds[config.model][layer], recomputed

    def _part(self, config: Config, kind: Hashable, layers: range, halves: bool) -> Part:
        key = (*_decides(config), kind)
        found = self._parts.get((*key, halves)) or self._parts.get((*key, True))
        if found is None:
            found = self._record(config, kind, layers, halves)
            self._parts[(*key, halves)] = found
        return found

    def _record(self, config: Config, kind: Hashable, layers: range, halves: bool) -> Part:
        # A maker decides which layers it makes recompute. A part's kind says whether it does.
        key = (*_decides(config), config.train.recompute_every)
        maker = self._makers.get(key)
        if maker is None:
            ctx, tape = recording(context.planned(grid_of(config), 0, device=META))
            maker = self.builder.maker(config, ctx), tape
            self._makers[key] = maker
        make, tape = maker
        stage = make(layers, first=kind == "embedding", last=kind == "head")
        train = config.train
        num_targets = self.builder.declared(config).num_targets
        batch = meta_batch(train.micro_batch_size, train.seq_length, config.parallel.cp, num_targets)
        elements: dict[str, int] = {}
        tied = 0
        itemsize = 0
        for param in stage.parameters():
            spec = spec_of(param)
            elements[spec.grad_axis.name] = elements.get(spec.grad_axis.name, 0) + param.numel()
            itemsize = param.dtype.itemsize
            if any(piece.name.startswith("embedding.") for piece in spec.pieces):
                tied += param.numel()
        if not config.model.tie_word_embeddings:
            tied = 0
        return Part(record(stage, batch, tape, halves=halves), elements, tied, itemsize)


def _decides(config: Config) -> tuple[Hashable, ...]:
    """The options deciding the work of a part."""
    parallel = config.parallel
    train = config.train
    return (
        config.model,
        parallel.tp,
        parallel.cp,
        parallel.cp_attention,
        parallel.ep,
        parallel.etp,
        parallel.sequence_parallel,
        parallel.tp_overlap_chunks,
        train.micro_batch_size,
        train.seq_length,
        train.precision,
        train.recompute,
        train.z_loss,
        config.kernels,
    )
