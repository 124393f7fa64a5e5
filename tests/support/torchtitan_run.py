"""Trains a small model of torchtitan with its own optimizer and checkpoint manager: a rank of torchrun's, on the CPU.

    PYTHON -m torch.distributed.run --nproc-per-node N torchtitan_run.py JOB.json

PYTHON has torchtitan. JOB has `kind` (of KINDS), `tied`, `fused`, `steps`, `folder` (of step-N folders),
`load` (a step of a folder to go on from, 0: begin), `save` (whether to write step-N at the end), and `dump`: a file for
losses and parameters at the end. Tests read nothing else of torchtitan. This file imports nothing of this repository.
"""

import json
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class _Kernels(types.ModuleType):
    """In the place of a module that needs Triton, and so a GPU."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


_WITH_TRITON = "torchtitan.distributed.minimal_async_ep.kernels"
sys.modules[_WITH_TRITON] = _Kernels(_WITH_TRITON)

from torchtitan.components.checkpointer.dcp import CheckpointManager  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig  # noqa: E402
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config  # noqa: E402

KINDS = ("llama3", "qwen3", "deepseek_v3")
SIZES = {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 20, "vocabulary": 31, "head": 6}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 6, "v_head_dim": 5}
EXPERTS = {"num_experts": 4, "router_top_k": 2, "moe_hidden_dim": 12, "num_shared_experts": 1, "n_dense_layers": 1}
LENGTH = 12  # tokens of a sample
SAMPLES = 4  # of a batch
EPS = 1e-5
THETA = 10000.0


def _normal(tensor):
    torch.nn.init.normal_(tensor, std=0.2)


NORMAL = {"weight": _normal, "bias": torch.nn.init.zeros_, "w1_EFD": _normal, "w2_EDF": _normal, "w3_EFD": _normal}
NORM = {"weight": lambda tensor: torch.nn.init.normal_(tensor, 1.0, 0.1)}


def in_fp32(experts, x_rd, counts_e):
    """The experts' MLP, which torchtitan computes in bf16."""
    parts = []
    for number, rows in enumerate(x_rd.split(counts_e.tolist())):
        gate, up, down = (
            (weight.full_tensor() if hasattr(weight, "full_tensor") else weight)[number]
            for weight in (experts.w1_EFD, experts.w3_EFD, experts.w2_EDF)
        )
        parts.append((F.silu(rows @ gate.T) * (rows @ up.T)) @ down.T)
    return torch.cat(parts)


def build(kind, tied, fused):
    """A model of torchtitan: its Llama 3, its Qwen3 with norms of queries and keys, or its DeepSeek-V3."""
    s = SIZES

    def norm(width=s["dim"]):
        return RMSNorm.Config(normalized_shape=width, eps=EPS, param_init=NORM)

    def layer(block, rope, qk_norm):
        return block.Config(
            attention_norm=norm(),
            ffn_norm=norm(),
            attention=make_gqa_config(
                dim=s["dim"],
                n_heads=s["heads"],
                n_kv_heads=s["kv_heads"],
                head_dim=s["head"],
                wqkv_param_init=NORMAL,
                wo_param_init=NORMAL,
                inner_attention=ScaledDotProductAttention.Config(),
                fuse_qkv=fused,
                qk_norm=qk_norm,
                rope=rope.Config(dim=s["head"], max_seq_len=64, theta=THETA),
            ),
            feed_forward=make_ffn_config(
                dim=s["dim"], hidden_dim=s["hidden"], w1_param_init=NORMAL, w2w3_param_init=NORMAL
            ),
        )

    if kind == "llama3":
        from torchtitan.models.llama3.model import Llama3Model as Model
        from torchtitan.models.llama3.model import Llama3TransformerBlock as Block

        layers = [layer(Block, ComplexRoPE, None) for _ in range(s["layers"])]
    elif kind == "qwen3":
        from torchtitan.models.qwen3.model import Qwen3Model as Model
        from torchtitan.models.qwen3.model import Qwen3TransformerBlock as Block

        layers = [layer(Block, CosSinRoPE, norm(s["head"])) for _ in range(s["layers"])]
    else:
        from torchtitan.models.common.moe import GroupedExperts
        from torchtitan.models.deepseek_v3 import build_mla_moe_layers
        from torchtitan.models.deepseek_v3.model import DeepSeekV3Model as Model

        GroupedExperts.forward = in_fp32
        layers = build_mla_moe_layers(
            n_layers=s["layers"],
            dim=s["dim"],
            n_heads=s["heads"],
            mscale=1.0,
            dense_hidden_dim=s["hidden"],
            router_score_func="sigmoid",
            router_route_norm=True,
            router_route_scale=1.5,
            attn_backend="flex",
            moe_comm_backend="standard",
            non_blocking_capacity_factor=None,
            linear_init=NORMAL,
            norm_init=NORM,
            depth_init=lambda layer: NORMAL,
            depth_experts_init=lambda layer: NORMAL,
            rope=ComplexRoPE.Config(dim=LATENT["qk_rope_head_dim"], max_seq_len=64, theta=THETA),
            **LATENT,
            **EXPERTS,
        )
        for each in layers:
            each.attention.inner_attention = ScaledDotProductAttention.Config()
            # As the code of its authors and of transformers has them; torchtitan's default is 1e-5.
            each.attention.q_norm.eps = each.attention.kv_norm.eps = 1e-6
    config = Model.Config(
        dim=s["dim"],
        vocab_size=s["vocabulary"],
        tok_embeddings=Embedding.Config(num_embeddings=s["vocabulary"], embedding_dim=s["dim"], param_init=NORMAL),
        norm=norm(),
        lm_head=Linear.Config(in_features=s["dim"], out_features=s["vocabulary"], param_init=NORMAL),
        layers=layers,
        **({} if kind == "deepseek_v3" else {"enable_weight_tying": tied}),
    )
    model = config.build()
    torch.manual_seed(7)
    model.init_states()
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias_E"):
            torch.nn.init.normal_(buffer, std=0.2)
    return model


def tokens_of(step):
    """The batch [samples, length + 1] of a step, counted from 0."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(SIZES["vocabulary"], (SAMPLES, LENGTH + 1), generator=generator)


class Values:
    """What torch's checkpoints call Stateful: a dict."""

    def __init__(self, values):
        self.values = values

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, values):
        self.values.update(values)


def whole(tensor):
    """A copy of a parameter, on every rank."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(job["kind"], job["tied"], job["fused"])
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    shared = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    groups = [
        ParamGroupConfig(pattern="norm", optimizer_name="AdamW", optimizer_kwargs={**shared, "weight_decay": 0.0}),
        ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={**shared, "weight_decay": 0.1}),
    ]
    config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    optimizers = config.build(model_parts=[model])
    rates = LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0).build(
        optimizers=optimizers, training_steps=99
    )
    state = Values({"step": 0, "ntokens_seen": 0})
    manager = CheckpointManager(
        CheckpointManager.Config(
            enable=True,
            folder=job["folder"],
            keep_latest_k=0,
            interval=1,
            last_save_model_only=False,
            exclude_from_loading=["dataloader"],
        ),
        dataloader=Values({f"dp_rank_{rank}": b"position", "world_size": world}),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=rates,
        states={"train_state": state},
        sd_adapter=None,
    )
    if job["load"]:
        assert manager.load(step=job["load"])
    losses = []
    for step in range(state.values["step"], state.values["step"] + job["steps"]):
        batch = tokens_of(step).chunk(world)[rank]
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        rates.step()
        dist.all_reduce(mean := loss.detach() / world)
        losses.append(mean.item())
        state.values["step"] += 1
        state.values["ntokens_seen"] += SAMPLES * LENGTH
    if job["save"]:
        manager.save(state.values["step"], last_step=True)
    parameters = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    if rank == 0 and job["dump"]:
        torch.save({"losses": losses, "step": state.values["step"], "parameters": parameters}, job["dump"])
    manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
