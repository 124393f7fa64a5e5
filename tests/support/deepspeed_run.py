"""Trains a small model of transformers by DeepSpeed's ZeRO and torch's AdamW, and saves and loads it by DeepSpeed.

    python -m tests.support.deepspeed_run tests/data/deepspeed      makes the kept folder of KEPT anew

It needs DeepSpeed (the extra `frameworks`) and transformers, in processes that have not imported DeepSpeed before.
"""

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from tests.support import deepspeed_folders, fsdp_run
from tests.support.distributed import run_ranks

KEPT = "llama_zero2_2"
"""A folder of two ranks under ZeRO-2 in bf16, of the model KEPT_FIELDS, beside what the engine held."""
KEPT_FIELDS: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 4},
    **{"num_key_value_heads": 2, "intermediate_size": 10, "vocab_size": 17, "max_position_embeddings": 64},
    **{"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
}


def start(
    fields: Mapping[str, Any],
    stage: int,
    samples: int,
    *,
    warmup: int = 0,
    bf16: bool = False,
    universal: bool = False,
) -> Any:
    """Start DeepSpeed's engine on a rank, under ZeRO's stage `stage`.

    `fields` are those of config.json, and `samples` are a rank's in a step. The rate grows for `warmup` steps by
    torch's scheduler. `universal` says that the engine will load a universal checkpoint.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    import deepspeed
    from torch.optim.lr_scheduler import LambdaLR

    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # gloo alone: DeepSpeed's own operator of shared memory needs a compiler
    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    model = fsdp_run.model_of(fields)
    settings = {
        "train_micro_batch_size_per_gpu": samples,
        "train_batch_size": samples * dist.get_world_size(),
        "gradient_clipping": 0.0,
        # ZeRO-3 cuts even small parameters, and its groups.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10, "sub_group_size": 3000},
        "bf16": {"enabled": bf16},
        "checkpoint": {"load_universal": universal},
    }
    optimizer = torch.optim.AdamW(fsdp_run.groups_of(model, flat=True), lr=1e-2, betas=(0.9, 0.95))
    scheduler = LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / warmup)) if warmup else None
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=settings)
    return engine


def train(
    fields: Mapping[str, Any],
    stage: int,
    steps: range,
    tokens_of: Callable[[int], Tensor],
    *,
    load: Path | None = None,
    save: Path | None = None,
    warmup: int = 0,
) -> tuple[list[float], dict[str, Tensor]]:
    """A rank's training on the tokens of `steps`; returns the losses, and the parameters by their names.

    `tokens_of` returns the tokens [samples, length + 1] of a step. `load` is the folder of a run with a universal
    checkpoint. `save` gets what DeepSpeed saves after the first three steps as step3/, and the universal form that
    DeepSpeed makes of step3/ as step3_universal/.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    engine = start(fields, stage, len(tokens_of(0)) // world, warmup=warmup, universal=load is not None)
    if load is not None:
        path, _ = engine.load_checkpoint(str(load))
        assert path is not None, load
        assert engine.global_steps == steps[0], engine.global_steps
        if stage == 3:
            deepspeed_folders.own_steps(engine)

    def run(numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            batch = tokens_of(number).chunk(world)[rank]
            logits = engine(batch[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
            dist.all_reduce(mean := loss.detach() / world)
            losses.append(mean.item())
        return losses

    losses = run(steps[: deepspeed_folders.STEPS])
    if save is not None:
        engine.save_checkpoint(str(save), tag=f"step{deepspeed_folders.STEPS}")
        if rank == 0:
            deepspeed_folders.universal(save)
        dist.barrier()
    losses += run(steps[deepspeed_folders.STEPS :])
    return losses, {
        name.removeprefix("fp32/"): tensor
        for name, tensor in deepspeed_folders.held(engine).items()
        if name.startswith("fp32/")
    }


def _keep(folder: Path) -> None:
    """Write KEPT's checkpoint and what the engine held to a folder."""
    engine = start(KEPT_FIELDS, 2, 2, bf16=True)
    for number in range(deepspeed_folders.STEPS):
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        tokens = torch.randint(KEPT_FIELDS["vocab_size"], (2, 9), generator=generator)
        engine.backward(engine(tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(str(folder), tag=f"step{deepspeed_folders.STEPS}")
    tensors = deepspeed_folders.held(engine)
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "held.safetensors")


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, _keep, Path(folder))
        deepspeed_folders.pack(Path(folder), target / f"{KEPT}.zip", also_universal=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
