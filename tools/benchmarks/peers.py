"""What megapar is measured against: the same Llama written in plain PyTorch, trained by torch's own parallelisms.

Each peer is the strongest plain use of its library known to us: fused AdamW, one all-reduce for the gradient norm, no
gradient sum before the last micro-batch. All compute the same step: the loss is the sum over targets divided by the
number of targets of the global batch, gradients are clipped by their global norm, matrices decay. Module names are the
logical names of megapar's parameters, so one dict of tensors loads everywhere.
"""

import importlib
import importlib.util
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megapar_models.rotary import RotaryModel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleDualPipeV, ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ranks import synchronize
from benchmarks.traffic import stages_of_rank
from megapar.config.derive import num_microbatches
from megapar.config.model_options import MixtureModel, ModelConfig
from megapar.config.options import Config, OptimizerConfig

Weights = Mapping[str, Tensor]


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_bsh: Tensor) -> Tensor:
        return F.rms_norm(x_bsh, self.weight.shape, self.weight, self.eps)


def rotate(x_bsnd: Tensor, cos_s1d: Tensor, sin_s1d: Tensor) -> Tensor:
    """Hugging Face's rotary embedding; the sign of rotate_half is already in `sin_s1d`."""
    return x_bsnd * cos_s1d + x_bsnd.roll(x_bsnd.shape[-1] // 2, -1) * sin_s1d


def causal_attention(q_bnsd: Tensor, k_bnsd: Tensor, v_bnsd: Tensor) -> Tensor:
    shared = q_bnsd.shape[1] != k_bnsd.shape[1]
    return F.scaled_dot_product_attention(q_bnsd, k_bnsd, v_bnsd, is_causal=True, enable_gqa=shared)


class Attention(nn.Module):
    """Grouped-query attention; holds a tp slice of the heads once its projections are column parallel."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        hidden = model.hidden_size
        self.head_dim = model.head_dim
        self.q = nn.Linear(hidden, model.num_attention_heads * self.head_dim, bias=False)
        self.k = nn.Linear(hidden, model.num_key_value_heads * self.head_dim, bias=False)
        self.v = nn.Linear(hidden, model.num_key_value_heads * self.head_dim, bias=False)
        self.o = nn.Linear(model.num_attention_heads * self.head_dim, hidden, bias=False)
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention

    def forward(self, x_bsh: Tensor, cos_s1d: Tensor, sin_s1d: Tensor) -> Tensor:
        q, k, v = (linear(x_bsh).unflatten(-1, (-1, self.head_dim)) for linear in (self.q, self.k, self.v))
        q = rotate(q, cos_s1d, sin_s1d)
        k = rotate(k, cos_s1d, sin_s1d)
        y_bnsd = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o(y_bnsd.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, model: ModelConfig):
        super().__init__()
        self.gate = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.up = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.down = nn.Linear(model.intermediate_size, model.hidden_size, bias=False)

    def forward(self, x_bsh: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_bsh)) * self.up(x_bsh))


class Mixture(nn.Module):
    """The sum of each token's experts, times their weights: the softmax over the chosen experts' logits (Mixtral, arXiv
    2401.04088). Rows are sorted by expert once, so each expert reads a run of rows."""

    def __init__(self, model: MixtureModel):
        super().__init__()
        self.top_k = model.moe.num_experts_per_tok
        one_expert = replace(model, intermediate_size=model.moe.moe_intermediate_size)
        self.router = nn.Linear(model.hidden_size, model.num_experts, bias=False)
        self.experts = nn.ModuleList(MLP(one_expert) for _ in range(model.num_experts))

    def forward(self, x_bsh: Tensor) -> Tensor:
        x_th = x_bsh.flatten(0, 1)
        logits_tk, experts_tk = self.router(x_th).topk(self.top_k)
        weights_tk = logits_tk.softmax(-1)
        order = experts_tk.flatten().argsort()
        rows = x_th[order // self.top_k].split(experts_tk.flatten().bincount(minlength=len(self.experts)).tolist())
        # An expert without rows runs too: DDP waits for the gradients of all parameters.
        results = torch.cat([expert(part) for expert, part in zip(self.experts, rows, strict=True)])
        results_tkh = torch.empty_like(results).index_copy(0, order, results).view(*experts_tk.shape, -1)
        return (results_tkh * weights_tk[..., None]).sum(1).view_as(x_bsh)


class Layer(nn.Module):
    def __init__(self, model: ModelConfig):
        super().__init__()
        self.attention_norm = Norm(model.hidden_size, model.rms_norm_eps)
        self.attention = Attention(model)
        self.mlp_norm = Norm(model.hidden_size, model.rms_norm_eps)
        self.mlp = Mixture(model) if isinstance(model, MixtureModel) else MLP(model)

    def forward(self, x_bsh: Tensor, cos_s1d: Tensor, sin_s1d: Tensor) -> Tensor:
        x_bsh = x_bsh + self.attention(self.attention_norm(x_bsh), cos_s1d, sin_s1d)
        return x_bsh + self.mlp(self.mlp_norm(x_bsh))


class Llama(nn.Module):
    """The layers `layers` of a Llama, or of a Mixtral if the model has experts.

    The `first` stage of a pipeline has the embedding, the `last` one norm and head.
    """

    def __init__(self, model: ModelConfig, seq_length: int, layers: range, *, first: bool = True, last: bool = True):
        super().__init__()
        self.embedding = nn.Embedding(model.vocab_size, model.hidden_size) if first else None
        self.layers = nn.ModuleDict({str(i): Layer(model) for i in layers})
        self.norm = Norm(model.hidden_size, model.rms_norm_eps) if last else None
        self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False) if last else None
        assert isinstance(model, RotaryModel), "a peer is Llama or Mixtral"
        wavelengths = model.rope_theta ** (torch.arange(0, model.head_dim, 2) / model.head_dim)
        angles = torch.arange(seq_length)[:, None, None] / wavelengths
        # Plain attributes, for DDP sends buffers around before each forward.
        self.cos = torch.cat([angles.cos(), angles.cos()], -1)
        self.sin = torch.cat([-angles.sin(), angles.sin()], -1)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [b, s] to logits [b, s, v]; between stages hidden states [b, s, h]."""
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, self.cos, self.sin)
        if self.norm is None or self.head is None:
            return x
        return self.head(self.norm(x))


def build(
    config: Config, weights: Weights, device: torch.device, partition: Sequence[int] = (), stage: int = 0
) -> Llama:
    """The model, or one stage of it, holding copies of the logical tensors `weights`.

    `partition` are the numbers of layers of all stages.
    """
    sizes = partition or [config.model.num_hidden_layers]
    first = sum(sizes[:stage])
    layers = range(first, first + sizes[stage])
    with device:
        ends = {"first": stage == 0, "last": stage == len(sizes) - 1}
        model = Llama(config.model, config.train.seq_length, layers, **ends)
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model


def loss_sum(logits: Tensor, targets_bs: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets_bs.flatten(), reduction="sum")


def local(x: Tensor | None) -> Tensor:
    assert x is not None
    if isinstance(x, DTensor):
        return x.to_local()
    return x


def summed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sums of tensors over all ranks, by one all-reduce."""
    if not tensors:
        return []
    flat = torch.cat([x.flatten() for x in tensors])
    dist.all_reduce(flat)
    return [part.view(x.shape) for part, x in zip(flat.split([x.numel() for x in tensors]), tensors, strict=True)]


def parameter_groups(params: Iterable[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Groups of an optimizer. Matrices decay. Fused kernels refuse mixed lists of DTensor and Tensor, so each has its
    own groups."""
    groups: dict[tuple[bool, bool], list[Tensor]] = {}
    for param in params:
        groups.setdefault((param.ndim > 1, isinstance(param, DTensor)), []).append(param)
    return [{"params": group, "weight_decay": weight_decay if decays else 0.0} for (decays, _), group in groups.items()]


def make_optimizer(params: Iterable[Tensor], options: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW."""
    groups = parameter_groups(params, options.weight_decay)
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True)


def clip(split: Sequence[Tensor], whole: Sequence[Tensor], max_norm: float, group: dist.ProcessGroup | None) -> float:
    """Scale gradients to a global norm of at most `max_norm`; the norm before scaling. One all-reduce of one number.

    Every rank's gradients of `split` parameters count. All ranks hold the `whole` ones, so theirs count once.
    """
    grads_split, grads_whole = ([local(p.grad) for p in params if p.grad is not None] for params in (split, whole))
    squared = torch.zeros((), device=next(iter([*split, *whole])).device)
    if grads_split:
        squared += nn.utils.get_total_norm(grads_split).square()
    if group is not None and grads_split:
        dist.all_reduce(squared, group=group)
    if grads_whole:
        squared += nn.utils.get_total_norm(grads_whole).square()
    norm = squared.sqrt()
    torch._foreach_mul_([*grads_split, *grads_whole], (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm.item()


class Result(NamedTuple):
    """What a step reports, the same on every rank: loss per target and gradient norm before clipping."""

    loss: float
    grad_norm: float


class Peer(ABC):
    """One way to train, from `weights`. `step` trains on a global batch."""

    name: str
    package: ClassVar[str] = ""
    """The name of the peer's package for `pip install`; empty if it is PyTorch."""
    modules: ClassVar[tuple[str, ...]] = ()
    """The modules of this package in the peer's use."""
    least_micro_batches: ClassVar[int] = 1
    """Of a step: a pipeline may need more."""
    parallel: ClassVar[dict[str, Any]] = {}
    """Options of `parallel` besides those of the layout."""

    @classmethod
    def is_installed(cls) -> bool:
        """Whether the package is there. It is not imported."""
        return all(importlib.util.find_spec(module.partition(".")[0]) is not None for module in cls.modules)

    @classmethod
    def load(cls) -> None:
        """Import the package. Its code then counts as little as PyTorch's in the memory of the peer."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries for GPUs that are not there
            for module in cls.modules:
                importlib.import_module(module)

    def __init__(self, config: Config, weights: Weights, device: torch.device):
        self.config = config
        self.device = device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1

    @abstractmethod
    def step(self, tokens_bs: Tensor, targets_bs: Tensor) -> Result: ...

    def whole_step(self, tokens_bs: Tensor, targets_bs: Tensor) -> Result:
        """A step until all ranks have done it."""
        result = self.step(tokens_bs, targets_bs)
        synchronize(self.world, self.device)
        return result

    def micro_batches(self, tokens_bs: Tensor, targets_bs: Tensor) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches: the batch is dealt over the data-parallel ranks."""
        dp = self.config.parallel.dp
        parts = (x.chunk(dp)[self.rank % dp] for x in (tokens_bs, targets_bs))
        return list(zip(*(part.split(self.config.train.micro_batch_size) for part in parts), strict=True))


class Plain(Peer):
    """PyTorch in one process. A subclass says what its library changes."""

    name = "PyTorch"
    averages: ClassVar[bool] = False
    """Whether gradients become the mean over replicas, although the sum is wanted."""

    def __init__(self, config: Config, weights: Weights, device: torch.device):
        super().__init__(config, weights, device)
        self.model = self.parallelize(self.build(weights))
        self.split: list[Tensor] = []
        self.whole: list[Tensor] = []
        for name, param in self.model.named_parameters():
            (self.split if self.is_split(name, param) else self.whole).append(param)
        self.optimizer = self.make_optimizer(list(self.model.parameters()))

    def build(self, weights: Weights) -> nn.Module:
        """The whole model, with `weights`."""
        return build(self.config, weights, self.device)

    def parallelize(self, model: nn.Module) -> nn.Module:
        return model

    def is_split(self, name: str, param: Tensor) -> bool:
        """Whether ranks hold different parts of a parameter."""
        return isinstance(param, DTensor) and any(isinstance(placement, Shard) for placement in param.placements)

    def make_optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return make_optimizer(params, self.config.optimizer)

    def loss(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        """The sum of the losses of all targets."""
        return loss_sum(self.model(tokens_bs), targets_bs)

    def accumulate(self, batch: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
        """Forward and backward of all micro-batches; this rank's sum of losses."""
        total = torch.zeros((), device=self.device)
        for tokens_bs, targets_bs in batch:
            loss = self.loss(tokens_bs, targets_bs)
            (loss * scale).backward()
            total += local(loss.detach())
        return total

    def zero_gradients(self) -> None:
        self.optimizer.zero_grad()

    def step(self, tokens_bs: Tensor, targets_bs: Tensor) -> Result:
        self.zero_gradients()
        factor = self.world if self.averages else 1
        total = self.accumulate(self.micro_batches(tokens_bs, targets_bs), factor / targets_bs.numel())
        norm = self.update()
        # Ranks of tp all have the whole sum. Others have that of their samples, positions or stages.
        if self.world > self.config.parallel.tp:
            dist.all_reduce(total)
        return Result(total.item() / targets_bs.numel(), norm)

    def update(self) -> float:
        """Clip, step, and return the gradient norm."""
        group = dist.group.WORLD if self.world > 1 else None
        norm = clip(self.split, self.whole, self.config.optimizer.clip_grad, group)
        self.optimizer.step()
        return norm


class CompiledLayers(Plain):
    """PyTorch in one process, with each layer compiled by torch.compile, as torchtitan does."""

    name = "PyTorch, layers compiled"

    def parallelize(self, model: nn.Module) -> nn.Module:
        for layer in model.layers.values():  # type: ignore[operator]
            layer.compile(fullgraph=True, dynamic=False)
        return model


class DDP(Plain):
    """DistributedDataParallel; gradients are summed with the last micro-batch only."""

    name = "DDP"
    averages = True

    def parallelize(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def accumulate(self, batch: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
        model = cast(DistributedDataParallel, self.model)
        with model.no_sync():
            total = super().accumulate(batch[:-1], scale)
        return total + super().accumulate(batch[-1:], scale)


class ZeroRedundancy(DDP):
    """DDP with ZeroRedundancyOptimizer: each rank updates some of the parameters and broadcasts them."""

    name = "ZeroRedundancyOptimizer"

    def make_optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        options = self.config.optimizer
        return ZeroRedundancyOptimizer(
            parameter_groups(params, options.weight_decay),
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=True,  # one broadcast for each rank, not one for each parameter
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            fused=True,
        )


class FSDP2(DDP):
    """fully_shard on every layer; between micro-batches weights stay gathered and gradients stay local."""

    name = "FSDP2"
    reshard_after_forward = False

    def parallelize(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, Llama)
        mesh = init_device_mesh(self.device.type, (self.world,))
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
        fully_shard(model, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
        return model

    def accumulate(self, batch: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
        model = cast(FSDPModule, self.model)
        total = torch.zeros((), device=self.device)
        for i, micro in enumerate(batch):
            last = i == len(batch) - 1
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last or self.reshard_after_forward)
            total += Plain.accumulate(self, [micro], scale)
        return total


class FSDP2Reshard(FSDP2):
    """FSDP2 as ZeRO-3: weights are freed after each use."""

    name = "FSDP2 reshard"
    reshard_after_forward = True


class TensorParallel(Plain):
    """DTensor tensor parallel by parallelize_module, the loss on sharded logits."""

    name = "DTensor TP, loss parallel"
    sequence_parallel = False

    def parallelize(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, Llama)
        mesh = init_device_mesh(self.device.type, (self.world,))
        hidden = Shard(1) if self.sequence_parallel else Replicate()
        plan: dict[str, ParallelStyle] = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden),
            "head": ColwiseParallel(input_layouts=hidden, output_layouts=Shard(-1), use_local_output=False),
        }
        for name in (f"layers.{i}" for i in model.layers):
            plan |= self.layer_plan(name, hidden)
        if self.sequence_parallel:
            plan |= {name: SequenceParallel() for name, module in model.named_modules() if isinstance(module, Norm)}
        return parallelize_module(model, mesh, plan)

    def layer_plan(self, layer: str, hidden: Placement) -> dict[str, ParallelStyle]:
        """A norm's output becomes one DTensor for all its readers: its gradient is summed once, not three times."""
        plan: dict[str, ParallelStyle] = {
            f"{layer}.attention": PrepareModuleInput(
                input_layouts=(hidden, None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            f"{layer}.mlp": PrepareModuleInput(input_layouts=(hidden,), desired_input_layouts=(Replicate(),)),
        }
        plan |= {f"{layer}.{x}": ColwiseParallel() for x in ("attention.q", "attention.k", "attention.v")}
        plan |= {f"{layer}.{x}": ColwiseParallel() for x in ("mlp.gate", "mlp.up")}
        plan |= {f"{layer}.{x}": RowwiseParallel(output_layouts=hidden) for x in ("attention.o", "mlp.down")}
        return plan

    def accumulate(self, batch: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
        with loss_parallel():
            return super().accumulate(batch, scale)

    def update(self) -> float:
        """Give gradients their parameters' placements first: the embedding's is whole on each rank, those of norms
        under sequence parallel are partial sums, completed by one all-reduce."""
        sharded = [p for p in self.model.parameters() if isinstance(p, DTensor)]
        partial = [p for p in sharded if cast(DTensor, p.grad).placements[0].is_partial()]
        for param, whole in zip(partial, summed([local(p.grad) for p in partial]), strict=True):
            param.grad = DTensor.from_local(whole, param.device_mesh, [Replicate()], run_check=False)
        for param in sharded:
            param.grad = cast(DTensor, param.grad).redistribute(placements=param.placements)
        return super().update()


class SequenceTensorParallel(TensorParallel):
    name = "DTensor TP+SP, loss parallel"
    sequence_parallel = True


class Pipeline1F1B(Plain):
    """torch.distributed.pipelining. Stages hold the layers of `parallel.partition`."""

    name = "pipelining 1F1B"
    schedule_class: ClassVar[Any] = Schedule1F1B

    def build(self, weights: Weights) -> nn.Module:
        """This rank's stages."""
        partition = self.config.parallel.partition
        self.stages = []
        for index in stages_of_rank(self.config, self.rank):
            model = build(self.config, weights, self.device, partition, index)
            self.stages.append(PipelineStage(model, index, len(partition), self.device))
        several = self.stages if len(self.stages) > 1 else self.stages[0]
        count = num_microbatches(self.config)
        self.schedule = self.schedule_class(several, count, loss_fn=self.scaled_loss, scale_grads=False)
        return nn.ModuleList(stage.submod for stage in self.stages)

    def is_split(self, name: str, param: Tensor) -> bool:
        return True

    def scaled_loss(self, logits: Tensor, targets_bs: Tensor) -> Tensor:
        """The part of a micro-batch in the loss of the step."""
        return loss_sum(logits, targets_bs) * self.scale

    def micro_batches(self, tokens_bs: Tensor, targets_bs: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The whole batch: the schedule cuts it."""
        return [(tokens_bs, targets_bs)]

    def accumulate(self, batch: list[tuple[Tensor, Tensor]], scale: float) -> Tensor:
        ((tokens_bs, targets_bs),) = batch
        self.scale = scale
        losses: list[Tensor] = []
        inputs = [tokens_bs] if self.rank == 0 else []
        # A rank without the head gets no targets: schedules that split the backward pass would look for its loss.
        holds_head = any(stage.is_last for stage in self.stages)
        target = targets_bs if holds_head else None
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        if holds_head:
            return torch.stack(losses).sum().detach() / scale
        return torch.zeros((), device=self.device)


class PipelineV(Pipeline1F1B):
    """Two stages on each rank, in the form of a V: the first rank holds the first stage and the last one.

    The backward pass of weights is apart from the one of inputs, and fills bubbles.
    """

    least_micro_batches: ClassVar[int] = 4
    parallel: ClassVar[dict[str, Any]] = {"schedule": "zb-v", "vpp": 2}


class PipelineDualPipeV(PipelineV):
    name = "pipelining DualPipe-V"
    schedule_class: ClassVar[Any] = ScheduleDualPipeV


class PipelineZeroBubbleV(PipelineV):
    name = "pipelining ZB-V"
    schedule_class: ClassVar[Any] = ScheduleZBVZeroBubble
