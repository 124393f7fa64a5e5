"""Load torch_dist folders with Megatron-Core's own model, optimizer and loader, on processes with a CPU each.

    python -m tests.support.megatron_dist_loader FOLDER OUT.safetensors SPEC      (with the extra `frameworks`)

The model is that of the args in the folder's common.pt, the layout that of SPEC, the JSON of a `Spec`. Loading goes as
in Megatron-LM's training/checkpointing.py. OUT then holds, joined over ranks as `tests.support.megatron_dist_writer`
does it:

    loaded/STATE/NAME      what Megatron holds behind its load; STATE is param, main, exp_avg, exp_avg_sq or buffer
    gradient/N/NAME        the random gradient of update N from 0 on
    updated/STATE/NAME     what Megatron holds after the updates
    losses                 of the steps on the tokens of the spec, by Megatron's model and optimizer

and in its metadata the JSON of the optimizer's groups behind the load, of the scheduler and of the iteration.

Reductions of gradients need a GPU. So gradients of data-parallel ranks are equal, and training on tokens has one rank.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support import megatron_dist_writer as writer
from tests.support.megatron_dist_writer import CANONICAL, Case

_OF_WRITER = (  # options that `megatron_dist_writer._model` gives itself
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "attention_dropout", "hidden_dropout"),
)
TRACKER = "latest_checkpointed_iteration.txt"


class Spec(NamedTuple):
    """Megatron's layout and what Megatron does behind its load."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    fp32: bool = False
    divisible: int = 16  # make_vocab_size_divisible_by
    updates: int = 0  # by random gradients
    tokens: str = ""  # a safetensors file with tokens [samples, length + 1] by the number of each step from 0 on
    saves: str = ""  # a new folder of Megatron's own, of `saves_after` steps on tokens
    saves_after: int = 0


def main(folder: str, out: str, spec: str) -> None:
    """Load the newest iteration in `folder`."""
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401, what is imported here is imported in the ranks

    asked = Spec(**json.loads(spec))
    newest = Path(folder, f"iter_{int(Path(folder, TRACKER).read_text()):07d}")
    args = vars(torch.load(newest / "common.pt", weights_only=False)["args"])
    args = {name: value for name, value in args.items() if name not in _OF_WRITER}
    args |= {"bf16": not asked.fp32, "make_vocab_size_divisible_by": asked.divisible}
    case = Case(args, CANONICAL, asked.tp, asked.pp, asked.dp, asked.ep)
    world = case.tp * case.pp * case.dp
    with tempfile.TemporaryDirectory() as meeting:
        step = partial(_load, out=out, spec=asked)
        ranks = (world, f"{meeting}/file", step, str(newest), case)
        mp.start_processes(writer._rank, ranks, nprocs=world, start_method="fork")


def _load(folder: str, case: Case, out: str, spec: Spec) -> None:
    model, chunk, optimizer, scheduler = _built(case, spec)
    loaded = _read(folder, model, optimizer, scheduler)
    found = {f"loaded/{name}": tensor for name, tensor in _joined(model, optimizer, case).items()}
    # Without an update the scheduler has no part in the rates of groups.
    said = {
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        "steps": sorted({float(state["step"]) for state in _torch_states(optimizer)}),
        "scheduler": scheduler.state_dict(),
        "iteration": loaded["iteration"],
        "consumed_train_samples": loaded["args"].consumed_train_samples,
    }
    for number in range(spec.updates):
        held = []
        for name, parameter in writer._named([model], case):
            parameter.main_grad.copy_(writer._shard(name, parameter, case, 100 + number))
            cut = writer._cut(name, parameter, case)
            held.append((f"gradient/{number}", name, cut, parameter.main_grad.clone()))
        optimizer.step()
        found |= _over_ranks(held, case)
    if spec.tokens:
        losses = []
        for number, tokens_bs in sorted(load_file(spec.tokens).items(), key=lambda item: int(item[0])):
            losses.append(_train(model, chunk, optimizer, tokens_bs))
            if spec.saves and int(number) + 1 == spec.saves_after:
                _save(model, optimizer, loaded, spec, len(tokens_bs))
        found["losses"] = torch.stack(losses)
    if spec.updates or spec.tokens:
        found |= {f"updated/{name}": tensor for name, tensor in _joined(model, optimizer, case).items()}
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, out, {"said": json.dumps(said)})


def _built(case: Case, spec: Spec) -> tuple[Any, Any, Any, Any]:
    """Megatron's model with random weights, its wrapper, optimizer and scheduler, with other rates than any test's."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    model: Any = writer._model(case, case.tp, case.pp, case.ep, 0)
    for layer in model.decoder.layers:
        _name_as_engine(layer, case)
    dtype = torch.float32 if spec.fp32 else torch.bfloat16
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    chunk = DistributedDataParallel(model.config, ddp, model)
    settings = OptimizerConfig(
        **{"optimizer": "adam", "lr": 0.5, "min_lr": 0.25, "clip_grad": 0.0, "use_distributed_optimizer": True},
        **{"bf16": not spec.fp32, "params_dtype": dtype, "adam_beta1": 0.5, "adam_beta2": 0.5, "adam_eps": 1.0},
    )
    optimizer = get_megatron_optimizer(settings, [chunk])
    # Without Transformer Engine the optimizer is torch's, which has no states before its first update, and Megatron
    # asks for their numbers of updates when it prepares a load.
    for parameter in model.parameters():
        parameter.main_grad.zero_()
    optimizer.step()
    scheduler = OptimizerParamScheduler(
        optimizer,
        **{"init_lr": 0.0, "max_lr": 0.5, "min_lr": 0.25, "lr_warmup_steps": 3, "lr_decay_steps": 1000},
        **{"lr_decay_style": "linear", "start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 1000},
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=True,
        override_opt_param_scheduler=False,
    )
    return model, chunk, optimizer, scheduler


def _name_as_engine(layer: Any, case: Case) -> None:
    """Let a local layer have the names of a layer of Transformer Engine, Megatron-LM's default, in checkpoints.

    Those of norms before experts and of latents differ, so Megatron-Core loads no such folder of the other kind.
    """
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if case.args.get("multi_latent_attention"):
        fused = {"q": "linear_q_up_proj", "kv": "linear_kv_up_proj"}
        names = {f"self_attention.{n}_layernorm.": f"self_attention.{m}.layer_norm_" for n, m in fused.items()}
    if not hasattr(layer.mlp, "router"):
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    layer.submodules_config.sharded_state_dict_keys_map = names


def _read(folder: str, model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Load as Megatron-LM's `load_checkpoint`. Returns the state dict."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    common = dist_checkpointing.load_common_state_dict(folder)
    content = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    content["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state: dict[str, Any] = {"args": None, "checkpoint_version": 3.0}
    state["model"] = model.sharded_state_dict(metadata=content)
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=content, is_loading=True)
    state["opt_param_scheduler"] = scheduler.state_dict()
    loaded: dict[str, Any] = dist_checkpointing.load(state, folder)
    model.load_state_dict(loaded["model"], strict=True)
    with patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", _set_states):
        optimizer.load_state_dict(loaded["optimizer"])
    # Megatron-Core gives all parameters one tensor, which torch's AdamW would count up once for each of them.
    for of_parameter in _torch_states(optimizer):
        of_parameter["step"] = of_parameter["step"].clone()
    scheduler.load_state_dict(loaded["opt_param_scheduler"])
    return loaded


def _set_states(one: Any, parameter: Tensor, tensors: dict[str, Tensor]) -> None:
    """Set what a parameter's shard holds.

    Without Transformer Engine and apex, Megatron-Core 0.16.1 loads no folder in the form fully_reshardable: its method
    asks for the number of updates of each parameter, which torch's AdamW keeps there and no folder has.
    """
    held = one._get_main_param_and_optimizer_states(parameter)
    for name in ("param", "exp_avg", "exp_avg_sq"):
        held[name].copy_(tensors[name])


def _torch_states(optimizer: Any) -> list[dict[str, Any]]:
    """The states of torch's optimizers within Megatron's."""
    return [state for one in optimizer.chained_optimizers for state in one.optimizer.state.values()]


def _joined(model: Any, optimizer: Any, case: Case) -> dict[str, Tensor]:
    return _over_ranks(writer._states([model], optimizer, case), case)


def _over_ranks(held: list[Any], case: Case) -> dict[str, Tensor]:
    """The whole tensors of what all ranks hold."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, held)
    return {name: tensor.clone() for name, tensor in writer._joined(gathered, case).items()}


def _train(model: Any, chunk: Any, optimizer: Any, tokens_bs: Tensor) -> Tensor:
    """Take a step on tokens [samples, length + 1]. Returns the loss before it, a mean over tokens."""
    samples, length = tokens_bs.shape[0], tokens_bs.shape[1] - 1
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    positions_bs = torch.arange(length).expand(samples, length)
    chunk.zero_grad_buffer()
    logits_bsv = model(tokens_bs[:, :-1], positions_bs, mask)
    loss = nn.functional.cross_entropy(logits_bsv.flatten(0, 1), tokens_bs[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    found: Tensor = loss.detach()
    return found


def _save(model: Any, optimizer: Any, loaded: dict[str, Any], spec: Spec, samples: int) -> None:
    """Save as Megatron-LM's `save_checkpoint`."""
    from megatron.core import dist_checkpointing

    content = {"chained_optim_avoid_prefix": True, "distrib_optim_sharding_type": CANONICAL}
    iteration, args = loaded["iteration"] + spec.saves_after, loaded["args"]
    args.consumed_train_samples += spec.saves_after * samples
    sharded = {"model": model.sharded_state_dict(metadata=dict(content))}
    state = {
        **sharded,
        "optimizer": optimizer.sharded_state_dict(sharded, metadata=dict(content)),
        "opt_param_scheduler": loaded["opt_param_scheduler"],
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": iteration,
    }
    folder = Path(spec.saves, f"iter_{iteration:07d}")
    folder.mkdir(parents=True)
    dist_checkpointing.save(state, str(folder), content_metadata=content)
    Path(spec.saves, TRACKER).write_text(str(iteration))


if __name__ == "__main__":
    main(*sys.argv[1:])
