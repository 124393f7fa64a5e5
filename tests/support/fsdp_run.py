"""Trains a small model of transformers by torch's FSDP2 and AdamW, and saves and loads it by torch's own functions."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

Nested = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


def plain(model: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Any]:
    """The state as torch's examples name it."""
    return {"model": model, "optim": optimizer}


def of_app(model: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Any]:
    """The state as torch's tutorial of a Stateful application names it."""
    return {"app": plain(model, optimizer)}


def train(
    fields: Mapping[str, Any],
    steps: range,
    tokens_of: Callable[[int], Tensor],
    *,
    load: Path | None = None,
    save: Path | None = None,
    flat: bool = False,
    muon: bool = False,
    nested: Nested = plain,
) -> tuple[list[float], dict[str, Tensor]]:
    """A rank's training on the tokens of `steps`; returns the losses, and the model's tensors by their names.

    `fields` are those of config.json. `load` and `save` are DCP folders, with flattened states of the optimizer or not.
    With `muon` torch's Muon updates the matrices of layers, in fp32, for one rank alone.
    """
    model = model_of(fields)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers: list[torch.optim.Optimizer] = []
    groups = groups_of(model, flat=flat)
    if muon:
        _in_fp32()
        matrices = [tensor for name, tensor in model.named_parameters() if "layers." in name and tensor.ndim == 2]
        optimizers.append(torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
        for group in groups:
            group["params"] = [each for each in group["params"] if all(each is not matrix for matrix in matrices)]
    optimizers.append(torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    if load is not None:
        states = get_state_dict(model, optimizers, options=options)
        state = nested(*states)
        dcp.load(state, checkpoint_id=load)
        set_state_dict(model, optimizers, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    losses = []
    for step in steps:
        batch = tokens_of(step).chunk(world)[dist.get_rank()]
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / world)
        losses.append(mean.item())
    if save is not None:
        dcp.save(nested(*get_state_dict(model, optimizers, options=options)), checkpoint_id=save)
    return losses, {name: whole(tensor) for name, tensor in model.state_dict().items()}


def model_of(fields: Mapping[str, Any]) -> Any:
    """A model of transformers with random weights. `fields` are those of config.json."""
    import transformers

    torch.manual_seed(3)
    kind = fields["model_type"]
    config = transformers.AutoConfig.for_model(kind, **{key: fields[key] for key in fields if key != "model_type"})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, tensor in model.named_parameters():
        torch.nn.init.normal_(tensor.data, float(name.endswith("norm.weight")), 0.1)
    return model


def groups_of(model: torch.nn.Module, *, flat: bool) -> list[dict[str, Any]]:
    """Two groups, matrices that decay and norms that do not; or one without decay, which any folder's names fit."""
    if not flat:
        return [{"params": list(model.parameters()), "weight_decay": 0.0}]
    matrices = [tensor for tensor in model.parameters() if tensor.ndim > 1]
    others = [tensor for tensor in model.parameters() if tensor.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _in_fp32() -> None:
    """Make torch's Muon compute in fp32, where it has bf16."""
    from torch.optim import _muon

    def orthogonal(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
        a, b, c = coefficients
        x = whole(grad)
        x = x.T if grad.shape[0] > grad.shape[1] else x
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x.T if grad.shape[0] > grad.shape[1] else x
        return DTensor.from_local(x, grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else x

    _muon._zeropower_via_newtonschulz = orthogonal
