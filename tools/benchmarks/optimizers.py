"""What optimizers cost on a CPU: Muon's Newton-Schulz by rank, and steps with a share of AdamW's state on the host.

Ranks of dp train a Llama with Muon. The CPU time of Newton-Schulz is that of each rank, beside the FLOPs of the
matrices that it owns. Then one process trains with each optimizer.offload, with QK-clip and with Muon, in turns with
PyTorch's fused AdamW and its Muon on the same model. On a CPU the host's memory is the device's, so offload shows the
time of its pieces and copies alone. The benchmark fails if losses of our AdamW differ in one bit, or those of PyTorch
by more than roundings: its Muon iterates in bf16, ours on a CPU in fp32.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from megapar_models.registry import validate
from torch import Tensor, nn

from benchmarks.contenders import Megapar
from benchmarks.counting import cost, ratio
from benchmarks.gpu_contenders import RandomWeights
from benchmarks.harness import Case, Found, Output
from benchmarks.layouts import make_batches
from benchmarks.peers import Peer, Plain
from benchmarks.ranks import BenchmarkError, run_ranks
from benchmarks.small_llama import make_batch, make_state, small_llama
from megapar.config.options import Config, OptimizerConfig, ParallelConfig, TrainConfig
from megapar.optimizer import muon, owners
from megapar.step.step import train_step

OFFLOADS = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class Options(Output):
    """Measure optimizers on this machine."""

    ranks: int = 4
    """Ranks of dp that share the matrices of Muon."""
    layers: int = 4
    """Layers of the Llama."""
    hidden_size: int = 256
    """Its width, a multiple of 128: two query heads of 64 share a key/value head."""
    tokens: int = 1024
    """Tokens of a step of each rank, in samples of 128."""
    rounds: int = 5
    """Rounds that count, after one that warms up."""


def make_config(options: Options, optimizer: OptimizerConfig, ranks: int = 1) -> Config:
    """ZeRO-1 over `ranks`, fp32."""
    model = small_llama(options.hidden_size, options.layers, 128)
    samples = options.tokens // 128
    train = TrainConfig(seq_length=128, global_batch_size=samples * ranks, micro_batch_size=samples)
    return validate(Config(model=model, parallel=ParallelConfig(dp=ranks), train=train, optimizer=optimizer), ranks)


def newton_schulz(config: Config, rounds: int, device: torch.device) -> dict[str, Any]:
    """What this rank spends on Newton-Schulz: the median CPU seconds of a step, and the FLOPs of its matrices."""
    state = make_state(config, device)
    spent = 0.0

    def timed(iterate: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        nonlocal spent
        start = time.thread_time()
        found = iterate(x)
        spent += time.thread_time() - start
        return found

    muon.orthogonalized = partial(timed, muon.orthogonalized)  # in this process, which ends behind the measurement
    batch = make_batch(config)
    seconds, steps = [], []
    for _ in range(rounds + 1):
        spent = 0.0
        step, _ = cost(partial(train_step, state, [batch]))
        seconds.append(spent)
        steps.append(step.cpu)
    (optimizer,) = (each for each in state.optimizer.each if isinstance(each, muon.Muon))
    shapes = [shape for routes in optimizer.routes.values() for shape in routes.shapes.values()]
    flops = muon.ROUNDS * sum(map(owners.cost, shapes))
    return {"seconds": statistics.median(seconds[1:]), "step": statistics.median(steps[1:]), "flops": flops}


def of_ranks(options: Options, per_head: bool) -> dict[str, Any]:
    """The largest of the ranks over their mean: by CPU time, and by FLOPs of the matrices owned."""
    config = make_config(options, OptimizerConfig(name="muon", muon_per_head=per_head), options.ranks)
    found = run_ranks(options.ranks, "cpu", partial(newton_schulz, config, options.rounds))
    over_mean = {
        key: max(rank[key] for rank in found) * len(found) / sum(rank[key] for rank in found)
        for key in ("seconds", "flops")
    }
    share = sum(rank["seconds"] for rank in found) / sum(rank["step"] for rank in found)
    return {"per_head": per_head, "ranks": found, "largest_over_mean": over_mean, "share_of_step": share}


class TorchMuon(Plain):
    """PyTorch with its own Muon for the matrices of layers, and fused AdamW for the rest."""

    name = "PyTorch, Muon"

    def make_optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        options = self.config.optimizer
        layers = cast(nn.ModuleDict, self.model.layers)
        matrices = {id(param): param for param in layers.parameters() if param.ndim == 2}
        self.muon = torch.optim.Muon(
            matrices.values(),
            lr=options.lr,
            weight_decay=options.weight_decay,
            momentum=options.momentum,
            nesterov=options.nesterov,
            adjust_lr_fn="match_rms_adamw",
        )
        return super().make_optimizer([param for param in params if id(param) not in matrices])

    def zero_gradients(self) -> None:
        super().zero_gradients()
        self.muon.zero_grad()

    def update(self) -> float:
        norm = super().update()
        self.muon.step()
        return norm


def contenders_of(options: Options) -> dict[str, Peer]:
    """megapar with each optimizer, and PyTorch with its own, all from the same weights. By name."""
    device = torch.device("cpu")
    adamw = OptimizerConfig(schedule="constant")  # the peers have no schedule
    optimizers = {f"adamw, offload {share:g}": replace(adamw, offload=share) for share in OFFLOADS}
    optimizers["adamw, qk_clip 100"] = replace(adamw, qk_clip=100.0)
    optimizers["muon"] = muon_options = replace(adamw, name="muon")
    optimizers["muon, per head"] = replace(muon_options, muon_per_head=True)
    weights = RandomWeights(make_config(options, muon_options).model, device)
    found: dict[str, Peer] = {
        name: Megapar(make_config(options, optimizer), weights, device) for name, optimizer in optimizers.items()
    }
    found["PyTorch, AdamW"] = Plain(make_config(options, adamw), weights, device)
    found[TorchMuon.name] = TorchMuon(make_config(options, muon_options), weights, device)
    return found


def check(losses: Mapping[str, float]) -> None:
    """Raise BenchmarkError if losses of our AdamW differ in one bit, or those of PyTorch by more than roundings."""
    different = len({loss for name, loss in losses.items() if name.startswith("adamw")}) > 1
    peers = {"PyTorch, AdamW": ("adamw, offload 0", 1e-4), TorchMuon.name: ("muon", 1e-3)}
    far = [name for name, (ours, most) in peers.items() if abs(losses[name] / losses[ours] - 1) > most]
    if different or far:
        raise BenchmarkError(f"losses differ: {losses}")


def measure(options: Options) -> Found:
    """Measure Newton-Schulz on ranks, then steps: CPU time over that of our AdamW on the device, and the last loss."""
    torch.set_num_threads(1)
    ranks = [of_ranks(options, per_head) for per_head in (False, True)]
    contenders = contenders_of(options)
    batch = make_batches(contenders["muon"].config, 1)[0]
    works = {name: partial(peer.step, *batch) for name, peer in contenders.items()}
    turns = Case(works, options.rounds, note=lambda _, result: result.loss, check=check).measure()
    plain, *_ = turns.values()
    steps = [
        {"optimizer": name, "seconds": found.cpu, "time": ratio(found.cpu, plain.cpu), "loss": found.notes[-1]}
        for name, found in turns.items()
    ]
    return Found({"newton_schulz": ranks, "steps": steps})
