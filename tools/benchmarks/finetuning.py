"""Fine-tuning of a small Llama on packs of conversations, beside the Trainer of transformers, all of it or adapters
(PEFT).

Both train the same weights on the same packs with AdamW in fp32, in the same processes of one thread. They take turns
step by step: our step runs before or after that of the Trainer, in its callbacks. The Trainer's clock stands while it
fetches data. The benchmark fails if losses or norms of gradients differ. Memory is that of each alone, in fresh
processes: the highest resident size above that of a process with its packages and the weights to load.

A pack is a row with positions that begin anew in each conversation. transformers sees documents by them, and so do we.
"""

import importlib.metadata
import importlib.util
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megapar_models.build import build_stages
from megapar_models.registry import validate
from torch import Tensor, nn

from benchmarks import layouts
from benchmarks.contenders import LAYOUTS, load_weights
from benchmarks.counting import cost, in_turn, memory, ratio, spread
from benchmarks.harness import Found, Output, progress
from benchmarks.peers import Weights
from benchmarks.peers_huggingface import HuggingFace
from benchmarks.ranks import BenchmarkError, run_ranks, synchronize
from megapar.base.errors import ConfigError
from megapar.config.options import AdapterConfig, Config
from megapar.data.packs import best_fit
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from megapar.launch.grid import grid_of
from megapar.step.state import TrainState
from megapar.step.step import train_step
from megapar.step.trainable import freeze_others
from megapar.train.trainer import assemble

WAYS = ("megapar", "Trainer")
PACKAGES = ("transformers", "accelerate", "peft")
TOLERANCES = {"loss": 1e-3, "grad_norm": 1e-2}  # relative
_MODULES = {"attention": "self_attn", "mlp": "mlp"}


@dataclass(frozen=True)
class Options(Output):
    """Measure fine-tuning on this machine."""

    layouts: tuple[Literal["single", "dp2"], ...] = ("single", "dp2")
    """One process, or two data-parallel ones."""
    trained: tuple[Literal["all", "adapters"], ...] = ("all", "adapters")
    """All weights, or adapters of all matrices of the layers."""
    rank: int = 16
    """Of the adapters."""
    layers: int = 8
    """Layers of the Llama."""
    hidden_size: int = 256
    """Its width, a multiple of 256."""
    seq_length: int = 1024
    """Tokens of a pack."""
    mean_length: int = 200
    """About the mean tokens of a conversation. Their lengths are lognormal, and the second half of each is trained."""
    packs: int = 2
    """Packs of a step over all processes. Each is a micro-batch."""
    rounds: int = 3
    """Rounds that count, after one that warms up."""


@dataclass(frozen=True)
class Pack:
    """A row of tokens, the weight of each as a target, and where its documents start. All int64."""

    tokens_s: Tensor
    trained_s: Tensor
    starts: Sequence[int]

    def ours(self) -> MicroBatch:
        """Return the pack as a micro-batch of megapar. The last column has no target."""
        targets_bs, weights_bs = (x.roll(-1)[None] for x in (self.tokens_s, self.trained_s))
        starts = torch.tensor([*self.starts, len(self.tokens_s)], dtype=torch.int32)
        return MicroBatch.of_samples(self.tokens_s[None], targets_bs, weights_bs.float(), torch.zeros(1).long(), starts)

    def theirs(self) -> dict[str, Tensor]:
        """Return the pack as an example of transformers' Trainer."""
        stops = [*self.starts[1:], len(self.tokens_s)]
        positions = [torch.arange(stop - start) for start, stop in zip(self.starts, stops, strict=True)]
        labels_s = self.tokens_s.masked_fill(self.trained_s == 0, -100)
        return {"input_ids": self.tokens_s, "labels": labels_s, "position_ids": torch.cat(positions)}


def make_packs(options: Options, config: Config, count: int) -> list[Pack]:
    """Packs of random conversations."""
    rng = np.random.default_rng(0)
    length = options.seq_length
    drawn = rng.lognormal(np.log(options.mean_length) - 0.32, 0.8, 2 * count * length // options.mean_length)
    lengths = np.clip(drawn, 8, length).astype(np.int64)
    packs = []
    for numbers in best_fit(lengths.tolist(), length)[:count]:
        stops = np.cumsum(lengths[numbers])
        starts = [0, *stops.tolist()]
        trained = np.zeros(length, np.int64)
        for start, stop in zip(starts[:-1], stops, strict=True):
            trained[(start + stop) // 2 : stop] = 1
        tokens = (config.model.vocab_size * rng.random(length) ** 3).astype(np.int64)
        firsts = [start for start in starts if start < length]  # with the padding's, if there is some
        packs.append(Pack(torch.from_numpy(tokens), torch.from_numpy(trained), firsts))
    if len(packs) < count:
        raise ConfigError(f"--seq_length {length} is too short for packs of --mean_length {options.mean_length}")
    return packs


def make_config(options: Options, layout: str, trained: str) -> Config:
    """What is trained. In two processes with ZeRO-1, the default."""
    sizes = layouts.Options(
        num_hidden_layers=options.layers, seq_length=options.seq_length, global_batch_size=options.packs
    )
    config = layouts.make_config(sizes, options.hidden_size, LAYOUTS[layout], {})
    if trained == "adapters":
        config = replace(config, adapter=AdapterConfig(options.rank))
    return validate(config, LAYOUTS[layout].world)


def make_weights(config: Config) -> Weights:
    """Return the model's weights, and factors of adapters. B is not 0, or the gradients of A would be."""
    weights = dict(layouts.make_weights(config))
    generator = torch.Generator().manual_seed(3)
    rank = config.adapter.rank
    for name in [name for name in weights if rank and name.startswith("layers.") and weights[name].ndim == 2]:
        rows, columns = weights[name].shape
        for factor, shape in (("lora_a", (rank, columns)), ("lora_b", (rows, rank))):
            weights[name.replace("weight", factor)] = torch.randn(shape, generator=generator) * 0.02
    return weights


def our_state(config: Config, weights: Weights, device: torch.device) -> TrainState:
    """The state of a training, as the trainer makes it."""
    ctx = context.create(grid_of(config), device=device)
    stages = build_stages(config, ctx)
    load_weights(stages.values(), weights)
    freeze_others(stages.values(), config.train.trainable, ctx)
    return assemble(config, ctx, stages)


def their_model(config: Config, weights: Weights, device: torch.device) -> nn.Module:
    """The model of transformers, with adapters of PEFT if some are trained."""
    base = {name: weight for name, weight in weights.items() if ".lora_" not in name}
    model = HuggingFace(config, base, device).model
    if not config.adapter.rank:
        return model
    peft = importlib.import_module("peft")
    options = peft.LoraConfig(r=config.adapter.rank, lora_alpha=config.adapter.rank, target_modules="all-linear")
    adapted: nn.Module = peft.get_peft_model(model, options)
    factors = dict(adapted.named_parameters())
    with torch.no_grad():
        for name in weights.keys() - base.keys():
            layer, module, matrix, factor = name.removeprefix("layers.").split(".")
            path = f"layers.{layer}.{_MODULES[module]}.{matrix}_proj.lora_{factor[-1].upper()}.default.weight"
            factors.pop(f"base_model.model.model.{path}").copy_(weights[name])
    if left := [name for name, factor in factors.items() if factor.requires_grad]:
        raise BenchmarkError(f"PEFT trains more: {left[0]}")
    return adapted


@contextmanager
def training(config: Config, weights: Weights, packs: Sequence[Pack], device: torch.device) -> Iterator[Any]:
    """A Trainer that goes through the packs once, in order. The process group is that of the ranks."""
    transformers, accelerate = map(importlib.import_module, ("transformers", "accelerate"))
    options = config.optimizer
    dp = config.parallel.dp
    places = {"OMP_NUM_THREADS": 1}
    if dp > 1:
        rank = dist.get_rank()
        places |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": dp, "LOCAL_WORLD_SIZE": dp}
    with tempfile.TemporaryDirectory() as folder, accelerate.utils.patch_environment(**places):
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo" if dp > 1 else None,
            ddp_find_unused_parameters=False,  # True, the default, walks the graph of every step
            per_device_train_batch_size=1,
            gradient_accumulation_steps=config.train.global_batch_size // dp,
            num_train_epochs=1,
            train_sampling_strategy="sequential",
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            adam_beta1=options.betas[0],
            adam_beta2=options.betas[1],
            adam_epsilon=options.eps,
            weight_decay=options.weight_decay,
            max_grad_norm=options.clip_grad,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        model = their_model(config, weights, device)
        trainer = transformers.Trainer(model, arguments, train_dataset=[pack.theirs() for pack in packs])
        trainer.remove_callback(transformers.PrinterCallback)
        yield trainer


def measure_time(options: Options, layout: str, trained: str, device: torch.device) -> dict[str, Any]:
    """The seconds and results (loss, norm of the gradient) of every step, warm-up included."""
    config = make_config(options, layout, trained)
    weights = make_weights(config)
    steps, world = options.rounds + 1, LAYOUTS[layout].world
    packs = make_packs(options, config, steps * options.packs)
    state = our_state(config, weights, device)
    found: dict[str, Any] = {way: {"seconds": [], "results": []} for way in WAYS}
    transformers = importlib.import_module("transformers")

    def our_turn(step: int) -> None:
        micro_batches = of_this_rank(state, packs[step * options.packs : (step + 1) * options.packs])
        synchronize(world, device)
        spent, result = cost(lambda: whole(train_step(state, micro_batches)))
        found[WAYS[0]]["seconds"].append(spent.wall)
        found[WAYS[0]]["results"].append([result.loss, result.grad_norm])

    def whole(result: Any) -> Any:
        synchronize(world, device)
        return result

    class Turns(transformers.TrainerCallback):  # type: ignore[name-defined]
        """Ours before the Trainer's step or after it."""

        def on_step_begin(self, args: Any, progress: Any, control: Any, **_: Any) -> None:
            self.ours_first = in_turn(WAYS, progress.global_step)[0] == WAYS[0]
            if self.ours_first:
                our_turn(progress.global_step)
            synchronize(world, device)
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, progress: Any, control: Any, **_: Any) -> None:
            synchronize(world, device)
            found[WAYS[1]]["seconds"].append(time.perf_counter() - self.began)
            if not self.ours_first:
                our_turn(progress.global_step - 1)  # it counts this step already

    with training(config, weights, packs, device) as trainer:
        trainer.add_callback(Turns)
        trainer.train()
        logged = [line for line in trainer.state.log_history if "grad_norm" in line]
    found[WAYS[1]]["results"] = [[line["loss"], line["grad_norm"]] for line in logged]
    return found


def of_this_rank(state: TrainState, packs: Sequence[Pack]) -> list[MicroBatch]:
    """The micro-batches of a step."""
    return [pack.ours() for pack in packs[state.ctx.dp.rank :: state.ctx.dp.size]]


def measure_memory(options: Options, layout: str, trained: str, way: str, device: torch.device) -> int:
    """Bytes that two steps take, with the model built for them."""
    config = make_config(options, layout, trained)
    weights = make_weights(config)
    packs = make_packs(options, config, 2 * options.packs)
    if way == WAYS[0]:

        def work() -> None:
            state = our_state(config, weights, device)
            for step in range(2):
                train_step(state, of_this_rank(state, packs[step * options.packs : (step + 1) * options.packs]))

        return memory(work)[1]
    for package in (*PACKAGES, "transformers.trainer", "transformers.models.llama.modeling_llama"):
        importlib.import_module(package)

    def their_work() -> None:
        with training(config, weights, packs, device) as trainer:
            trainer.train()

    return memory(their_work)[1]


def compared(options: Options, layout: str, trained: str) -> dict[str, Any]:
    """One layout. Raises BenchmarkError if the two compute something else."""
    world = LAYOUTS[layout].world
    found, *_ = run_ranks(world, "cpu", partial(measure_time, options, layout, trained))
    for ours, theirs in zip(*(found[way]["results"] for way in WAYS), strict=True):
        for (what, tolerance), one, other in zip(TOLERANCES.items(), ours, theirs, strict=True):
            if not abs(one - other) <= tolerance * abs(other):
                raise BenchmarkError(f"{layout}, {trained}: {what}: megapar {one}, Trainer {other}")
    seconds = {way: found[way]["seconds"][1:] for way in WAYS}
    tokens = options.packs * options.seq_length
    return {
        "layout": layout,
        "trained": trained,
        "speed": ratio(*(seconds[way] for way in reversed(WAYS))),
        "tokens_per_second": {way: spread(tokens / one for one in seconds[way]) for way in WAYS},
        "bytes": {
            way: max(run_ranks(world, "cpu", partial(measure_memory, options, layout, trained, way))) for way in WAYS
        },
        "results": {way: found[way]["results"] for way in WAYS},
    }


def measure(options: Options) -> Found:
    """Compare each layout with all weights trained, and with adapters."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"the Trainer needs packages: pip install {' '.join(missing)}")
    torch.set_num_threads(1)
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    rows = [compared(options, *case) for case in progress(product(options.layouts, options.trained))]
    return Found({"peers": versions, "rows": rows})
