"""Checkpoints that DeepSpeed itself writes, beside what its engines held, for tests of `convert.formats.deepspeed`.

It needs DeepSpeed (the extra `frameworks`), and imports nothing of ours:

    python tests/support/deepspeed_folders.py write KIND WORLD FOLDER      a run of 3 steps, saved
    python tests/support/deepspeed_folders.py continue KIND WORLD FOLDER   3 more steps from FOLDER/step3_universal
    python tests/support/deepspeed_folders.py keep FOLDER                  those of KEPT, packed as FOLDER/*.zip

KIND is a key of `KINDS`, WORLD a number of processes on one host, over gloo. `write` leaves in FOLDER the checkpoint
(`latest`, `step3/`), ds_to_universal's form of it (`latest_universal`, `step3_universal/`), and `held.safetensors`:
what DeepSpeed's own accessors say of each tensor, named `STATE/NAME` with the states weight, fp32, exp_avg and
exp_avg_sq, and after 3 more steps of the same engine `after/weight/NAME`. `continue` writes `continued.safetensors`.
"""

import importlib
import json
import os
import socket
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn

VOCAB, PADDED_VOCAB, HIDDEN, INNER = 13, 16, 6, 7
STEPS = 3
# ZeRO stage, dtype, and options of DeepSpeed's zero_optimization. A sub group of 40 values makes ZeRO-3 cut its flat
# group in several; round_robin_gradients stores the parameters in another order than the model's.
KINDS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "zero1": (1, "bf16", {}),
    "zero1_fp32": (1, "fp32", {}),
    "zero1_master": (1, "bf16_optimizer", {}),
    "zero1_elastic": (1, "bf16", {"elastic_checkpoint": True}),
    "zero2": (2, "bf16", {}),
    "zero2_round_robin": (2, "bf16", {"round_robin_gradients": True}),
    "zero2_aligned": (2, "bf16", {"parameter_alignment": True}),
    "zero3": (3, "bf16", {"sub_group_size": 40}),
    "zero3_fp32": (3, "fp32", {}),
    "moe": (2, "bf16", {}),
}
# Kinds and worlds whose folders are kept in tests/data/deepspeed, and whether ds_to_universal's are kept too.
KEPT = {
    ("zero1", 2): True,
    ("zero1_master", 2): False,
    ("zero1_elastic", 3): False,
    ("zero2", 3): False,
    ("zero2_round_robin", 3): False,
    ("zero2_aligned", 2): False,
    ("zero3", 3): True,
    ("moe", 4): False,
}


class Block(nn.Module):
    """A layer of sizes that divide nothing, with a frozen scale and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        self.frozen = nn.Parameter(torch.ones(HIDDEN), requires_grad=False)
        self.register_buffer("table", torch.arange(HIDDEN, dtype=torch.float32) / 8)

    def forward(self, x_bsh: Tensor) -> Tensor:
        inner = torch.tanh(self.up(self.norm(x_bsh)))
        return x_bsh + self.down(inner) * self.frozen + self.table.to(x_bsh.dtype) / 64


class Model(nn.Module):
    """Two layers between a padded embedding and a head that is tied with it."""

    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(PADDED_VOCAB, HIDDEN)
        self.layers = nn.ModuleList([Block(), Block()])
        if experts:
            from deepspeed.moe.layer import MoE

            expert = nn.Sequential(nn.Linear(HIDDEN, 5), nn.Tanh(), nn.Linear(5, HIDDEN))
            self.mixture = MoE(HIDDEN, expert, num_experts=4, ep_size=2, k=1, capacity_factor=4.0, use_rts=False)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, PADDED_VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens_bs: Tensor) -> Tensor:
        x_bsh = self.embedding(tokens_bs)
        for layer in self.layers:
            x_bsh = layer(x_bsh)
        if hasattr(self, "mixture"):
            x_bsh = x_bsh + self.mixture(x_bsh)[0]
        logits_bsv = self.head(self.norm(x_bsh)).float()
        return nn.functional.cross_entropy(logits_bsv[:, :-1].reshape(-1, PADDED_VOCAB), tokens_bs[:, 1:].reshape(-1))


def fill(model: nn.Module, rank: int) -> None:
    """Give each weight random values, all distinct; those of experts differ by rank."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(name.encode()) + (1000 * rank if "experts" in name else 0))
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4 + (parameter.dim() == 1))


def config(kind: str, world: int, universal: bool) -> dict[str, Any]:
    stage, dtype, options = KINDS[kind]
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 2 * world,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 4},
        },
        "zero_optimization": {"stage": stage, **options},
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": universal},
    }
    if stage == 3:
        made["zero_optimization"]["stage3_param_persistence_threshold"] = 10
    if dtype == "bf16":
        made["bf16"] = {"enabled": True}
    if dtype == "bf16_optimizer":
        made |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return made


def start(kind: str, world: int, rank: int, universal: bool) -> Any:
    """An engine of DeepSpeed with the model of a kind."""
    import deepspeed

    experts = kind == "moe"
    torch.manual_seed(5)
    settings = config(kind, world, universal)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    if settings["zero_optimization"]["stage"] == 3:
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = Model(experts)
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            if rank == 0:
                fill(model, rank)
    else:
        model = Model(experts)
        fill(model, rank)
    if not universal:
        model.universal_checkpoint_info = {
            "universal_checkpoint_version": 0.4,
            "vocabulary_parameter_patterns": ["embedding.weight"],
            "original_vocab_size": VOCAB,
            "padded_vocab_size": PADDED_VOCAB,
        }
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    # Two groups, as most trainers make them: weight decay for matrices alone.
    matrices = [p for name, p in trained if "norm" not in name and not name.endswith("bias")]
    others = [p for name, p in trained if "norm" in name or name.endswith("bias")]
    groups: Any = [{"params": matrices, "name": "decayed"}, {"params": others, "weight_decay": 0.0, "name": "others"}]
    if experts:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=settings)
    return engine


def train(engine: Any, first: int, rank: int) -> list[float]:
    """Some steps from step `first` on, and their losses."""
    losses = []
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(97 * step + rank)
        tokens_bs = torch.randint(0, VOCAB, (2, 5), generator=generator)
        loss = engine(tokens_bs)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def held(engine: Any) -> dict[str, Tensor]:
    """Every tensor as DeepSpeed's accessors say. A collective."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed links moments to parameters after the first group's first step, when other groups have none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    tensors = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            tensors[f"weight/{name}"] = parameter.detach().clone()
        # Under round_robin_gradients the accessors give values of other parameters.
        if parameter.requires_grad and not engine.zero_round_robin_gradients():
            tensors[f"fp32/{name}"] = safe_get_full_fp32_param(parameter).clone()
            for state in ("exp_avg", "exp_avg_sq"):
                tensors[f"{state}/{name}"] = safe_get_full_optimizer_state(parameter, state).clone()
    for name, buffer in engine.module.named_buffers():
        tensors[f"weight/{name}"] = buffer.clone()
    return tensors


def joined(tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The tensors of all ranks: an expert's name gets its number among all. Even ranks hold the first two of four."""
    marker = "deepspeed_experts."
    named = {}
    for name, tensor in tensors.items():
        before, found, after = name.partition(marker)
        if found:
            number, _, rest = after.partition(".")
            name = f"{before}{marker}{int(number) + 2 * (rank % 2)}.{rest}"
        named[name] = tensor
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, named)
    return {name: tensor for part in reversed(parts) for name, tensor in part.items()}


def write(kind: str, world: int, rank: int, folder: Path) -> None:
    engine = start(kind, world, rank, universal=False)
    losses = train(engine, 0, rank)
    engine.save_checkpoint(str(folder), tag=f"step{STEPS}", client_state={"note": "kept", "seen": 3})
    tensors = joined(held(engine), rank)
    losses += train(engine, STEPS, rank)
    after = joined(held(engine), rank)
    if rank == 0:
        tensors |= {f"after/{name}": tensor for name, tensor in after.items()}
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "held.safetensors")
        (folder / "losses.json").write_text(json.dumps(losses))


def own_steps(engine: Any) -> None:
    """Give each group a tensor of its own for AdamW's step after loading.

    ZeRO-3 gives one object to all groups: an int, which torch's AdamW refuses, or a tensor, in which the update of each
    group would count for all of them.
    """
    for state in engine.optimizer.optimizer.state.values():
        state["step"] = torch.tensor(float(state["step"]))


def go_on(kind: str, world: int, rank: int, folder: Path) -> None:
    engine = start(kind, world, rank, universal=True)
    path, _ = engine.load_checkpoint(str(folder))
    assert path is not None, folder
    own_steps(engine)
    assert engine.global_steps == STEPS, engine.global_steps
    losses = train(engine, STEPS, rank)
    tensors = joined(held(engine), rank)
    if rank == 0:
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "continued.safetensors")
        (folder / "continued.json").write_text(json.dumps(losses))


def _process(rank: int, world: int, port: int, work: Callable[..., None], *arguments: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    import deepspeed

    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # gloo alone: DeepSpeed's own operator of shared memory needs a compiler
    deepspeed.logger.setLevel("ERROR")
    kind, folder = arguments
    work(kind, world, rank, folder)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run(work: Callable[..., None], kind: str, world: int, folder: Path) -> None:
    """Run `work` in `world` processes."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    import deepspeed  # noqa: F401  # once, before the processes fork

    arguments = (world, port, work, kind, folder)
    torch.multiprocessing.start_processes(_process, arguments, nprocs=world, start_method="fork")


def universal(folder: Path) -> None:
    """Convert FOLDER/step3 by DeepSpeed's own ds_to_universal."""
    from argparse import Namespace

    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        Namespace(
            input_folder=str(folder / f"step{STEPS}"),
            output_folder=str(folder / f"step{STEPS}_universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def pack(written: Path, archive: Path, *, also_universal: bool) -> None:
    """Pack a folder that `write` made, without the scripts that DeepSpeed leaves in it and the values of `after/`."""
    held = {name: tensor for name, tensor in load_file(written / "held.safetensors").items() if "after/" not in name}
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for path in sorted(written.rglob("*")):
            name = str(path.relative_to(written))
            if path.suffix not in (".py", ".json", ".safetensors") and (also_universal or "universal" not in name):
                packed.write(path, name)
        packed.writestr("held.safetensors", save(held))


def main(words: list[str]) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported
    command, *rest = words
    if command == "keep":
        for (kind, world), also_universal in KEPT.items():
            with tempfile.TemporaryDirectory() as folder:
                main(["write", kind, str(world), folder])
                pack(Path(folder), Path(rest[0]) / f"{kind}_{world}.zip", also_universal=also_universal)
        return
    kind, world, folder = rest[0], int(rest[1]), Path(rest[2])
    if command == "write":
        run(write, kind, world, folder)
        if kind not in ("moe", "zero1_elastic"):  # which ds_to_universal does not convert
            universal(folder)
    else:
        run(go_on, kind, world, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
