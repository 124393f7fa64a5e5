"""Write torch_dist folders with Megatron-Core's own model, optimizer and writer, on processes with a CPU each.

    python -m tests.support.megatron_dist_writer FOLDER CASE      (in an environment with the extra `frameworks`)

FOLDER/iter_0000007 is then what a training would have saved, and FOLDER/expected.safetensors what it must hold:

    STATE/NAME   STATE is param, main (fp32), exp_avg or exp_avg_sq, NAME that of a parameter in Megatron's model on one
                 rank, with an expert as `mlp.experts.local_experts.NUMBER`: joined over tp, pp and ep
    logits       [tokens, padded vocabulary] of Megatron's model on one rank with those main weights, in fp32

All numbers are random. The optimizer takes two steps with random gradients, because its reductions over data-parallel
ranks need a GPU. The optimizer itself (its buckets, its shards, its state and the saving of all that) is Megatron's.
"""

import math
import re
import sys
import tempfile
import warnings
import zlib
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ITERATION, SAMPLES, UPDATES = 7, 56, 2
VOCABULARY = 131
TOKENS = (3, 130, 17, 64, 5, 99, 0, 41, 77, 12, 128)
EXPECTED = "expected.safetensors"
FOLDER = f"iter_{ITERATION:07d}"

DENSE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 40,
    "swiglu": True,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "max_position_embeddings": 64,
    "make_vocab_size_divisible_by": 16,
    "bf16": True,
}
TIED = DENSE | {"untie_embeddings_and_output_weights": False, "add_qkv_bias": True}
SMALL = TIED | {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "kv_channels": 4, "ffn_hidden_size": 12}
LEARNED = DENSE | {
    "group_query_attention": False,
    "swiglu": False,
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "position_embedding_type": "learned_absolute",
    "add_bias_linear": True,
    "bias_gelu_fusion": True,
    "untie_embeddings_and_output_weights": False,
}
MIXTURE = DENSE | {
    "num_layers": 2,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 12,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "qk_layernorm": True,
}
SIGMOID = {
    "num_layers": 3,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 20,
    "moe_layer_freq": [0, 1, 1],
}
LATENT = (
    MIXTURE
    | SIGMOID
    | {
        "multi_latent_attention": True,
        "group_query_attention": False,
        "num_attention_heads": 4,
        "q_lora_rank": 18,
        "kv_lora_rank": 14,
        "qk_head_dim": 10,
        "qk_pos_emb_head_dim": 6,
        "v_head_dim": 8,
        "rope_type": "rope",
    }
)
SMALL_MIXTURE = MIXTURE | {
    **{"num_layers": 1, "hidden_size": 8, "num_attention_heads": 4, "kv_channels": 4},
    **{"moe_ffn_hidden_size": 6, "num_experts": 3, "untie_embeddings_and_output_weights": False},
}


class Case(NamedTuple):
    """What is written: Megatron's args, the layout, and the form of the optimizer's states ("": no distribution)."""

    args: dict[str, Any]
    form: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    chunks: int = 1  # of a pipeline rank
    as_engine: bool = False  # parameters in the order in which layers of Transformer Engine register them
    metadata: dict[str, Any] = {}  # noqa: RUF012, never changed

    @property
    def padded_vocabulary(self) -> int:
        step = self.args["make_vocab_size_divisible_by"] * self.tp
        return math.ceil(VOCABULARY / step) * step

    @property
    def expert_tp(self) -> int:
        return 1 if self.ep > 1 else self.tp


_OVERLAPPED = {"overlap_grad_reduce": True, "ddp_bucket_size": 3000}
_KINDS = ("param", "exp_avg", "exp_avg_sq")
CANONICAL, BUCKETS, PLAIN = "fully_reshardable", "dp_reshardable", ""
CASES = {
    "dense": Case(DENSE, CANONICAL),
    "dense, tp 2 pp 2": Case(DENSE | {"add_qkv_bias": True, "qk_layernorm": True}, CANONICAL, tp=2, pp=2),
    "dense, by layers, dp 2": Case(DENSE, CANONICAL, dp=2, metadata={"non_homogeneous_layers": True}),
    "dense, split gates": Case(DENSE, CANONICAL, tp=2, metadata={"singleton_local_shards": True}),
    "dense, plain Adam": Case(DENSE, PLAIN, tp=2),
    "dense, fp16": Case(DENSE | {"bf16": False, "fp16": True}, CANONICAL),
    "dense, several buckets, dp 2": Case(DENSE | _OVERLAPPED, BUCKETS, dp=2),
    "tied, buckets, tp 2 pp 2": Case(TIED, BUCKETS, tp=2, pp=2),
    "tied, several buckets, tp 2 pp 2": Case(TIED | _OVERLAPPED | {"hidden_size": 64}, BUCKETS, tp=2, pp=2),
    "dense, buckets, pp 2, two chunks": Case(DENSE, BUCKETS, pp=2, chunks=2),
    "dense, buckets, as Transformer Engine": Case(TIED, BUCKETS, tp=2, as_engine=True),
    "experts, buckets, as Transformer Engine": Case(MIXTURE, BUCKETS, dp=2, as_engine=True),
    "tied, small, buckets, tp 2": Case(SMALL, BUCKETS, tp=2),
    "learned, buckets, tp 2": Case(LEARNED, BUCKETS, tp=2),
    "experts, ep 2": Case(MIXTURE, CANONICAL, dp=2, ep=2),
    "experts, buckets, ep 2 pp 2": Case(MIXTURE, BUCKETS, pp=2, dp=2, ep=2),
    "experts, buckets, tp 2 ep 2": Case(MIXTURE, BUCKETS, tp=2, ep=2),
    "experts, small": Case(SMALL_MIXTURE, CANONICAL),
    "latent, tp 2": Case(LATENT, CANONICAL, tp=2),
    "latent, buckets, tp 2 dp 2": Case(LATENT, BUCKETS, tp=2, dp=2),
}


# Megatron Core 0.16.1 saves these states at wrong places, see `_gathered`.
MISPLACED = Case(DENSE | _OVERLAPPED | {"ddp_bucket_size": 1000}, CANONICAL, dp=2)


def main(folder: str, name: str) -> None:
    """Write the folder of a case, which must not exist."""
    case = MISPLACED if name == "misplaced" else CASES[name]
    Path(folder, FOLDER).mkdir(parents=True)
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401

    for step, world in ((_save, case.tp * case.pp * case.dp), (_judge, 1)):
        with tempfile.TemporaryDirectory() as meeting:
            args = (world, f"{meeting}/file", step, folder, case)
            mp.start_processes(
                _rank, args, nprocs=world, start_method="fork"
            )  # what is imported here is imported there


class _Cpu(TorchFunctionMode):
    """Put on the CPU what Megatron-Core asks to be on "cuda", and call tensors' types by the names that it expects."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is Tensor.cuda:
            return args[0]
        if function is Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)


def _rank(rank: int, world: int, meeting: str, step: Any, folder: str, case: Case) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"file://{meeting}", world_size=world, rank=rank, timeout=timedelta(seconds=60))
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as megatron_random

    alone = step is _judge
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=1 if alone else case.tp,
        pipeline_model_parallel_size=1 if alone else case.pp,
        virtual_pipeline_model_parallel_size=case.chunks if case.chunks > 1 and not alone else None,
        expert_model_parallel_size=1 if alone else case.ep,
        expert_tensor_parallel_size=1 if alone else case.expert_tp,
    )
    with ExitStack() as stack:
        stack.enter_context(patch("torch.cuda.current_device", return_value="cpu"))
        stack.enter_context(patch("torch.cuda.synchronize"))
        # Attention forks CUDA's random state for its dropout, even if there is no dropout.
        no_state = Namespace(fork=lambda *_: ExitStack())
        stack.enter_context(patch.object(megatron_random, "get_cuda_rng_tracker", return_value=no_state))
        stack.enter_context(patch("megatron.core.tensor_parallel.get_cuda_rng_tracker", return_value=no_state))
        # Without Transformer Engine, Megatron-Core 0.16.1 takes it for installed, and does not define a name.
        stack.enter_context(patch("megatron.core.transformer.multi_latent_attention.HAVE_TE", False))
        stack.enter_context(patch("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, create=True))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_Cpu())
        step(folder, case)
    dist.barrier()
    dist.destroy_process_group()


def _save(folder: str, case: Case) -> None:
    """Save a rank's part of the folder, and the expected tensors of all ranks."""
    from megatron.core import dist_checkpointing
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    models = [_model(case, case.tp, case.pp, case.ep, chunk) for chunk in range(case.chunks)]
    if case.as_engine:
        for model in models:
            _reorder(model)
    named = list(_named(models, case))
    for name, parameter in named:
        parameter.data.copy_(_shard(name, parameter, case, 0) * 0.1)
    for name, buffer in _biases(models, case):
        buffer.copy_(torch.randn(buffer.shape, generator=_seeded(name, 0)))
    dtype = torch.float16 if case.args.get("fp16") else torch.bfloat16
    for _, parameter in named:
        parameter.data = parameter.data.to(dtype)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=case.args.get("overlap_grad_reduce", False),
        use_distributed_optimizer=bool(case.form),
        bucket_size=case.args.get("ddp_bucket_size"),
    )
    chunks = [
        DistributedDataParallel(model.config, ddp, model, disable_bucketing=number > 0)
        for number, model in enumerate(models)
    ]
    settings = OptimizerConfig(
        **{"optimizer": "adam", "lr": 1e-2, "clip_grad": 0.0, "use_distributed_optimizer": bool(case.form)},
        **{"bf16": not case.args.get("fp16"), "fp16": bool(case.args.get("fp16")), "params_dtype": dtype},
        **{"initial_loss_scale": 4096.0, "min_loss_scale": 1.0, "loss_scale_window": 1000, "hysteresis": 2},
    )
    optimizer = get_megatron_optimizer(settings, chunks)
    for number in range(UPDATES):
        for name, parameter in named:
            parameter.main_grad.copy_(_shard(name, parameter, case, number + 1))
        optimizer.step()
    content: dict[str, Any] = {"chained_optim_avoid_prefix": True, **case.metadata}
    if case.form:
        content["distrib_optim_sharding_type"] = case.form
    keys = ["model"] if case.chunks == 1 else [f"model{number}" for number in range(case.chunks)]
    sharded = {key: model.sharded_state_dict(metadata=dict(content)) for key, model in zip(keys, models, strict=True)}
    # Megatron-LM has an arg for each option of Megatron-Core.
    plain = (type(None), bool, int, float, str)
    options = {field.name: field.default for field in fields(models[0].config) if isinstance(field.default, plain)}
    args = (
        options
        | case.args
        | {
            "tensor_model_parallel_size": case.tp,
            "pipeline_model_parallel_size": case.pp,
            "virtual_pipeline_model_parallel_size": case.chunks if case.chunks > 1 else None,
            "expert_model_parallel_size": case.ep,
            "expert_tensor_parallel_size": case.expert_tp,
            "world_size": dist.get_world_size(),
            "data_parallel_size": case.dp,
            "consumed_train_samples": SAMPLES,
            "padded_vocab_size": case.padded_vocabulary,
            "tokenizer_type": "NullTokenizer",
            "transformer_impl": "transformer_engine" if case.as_engine else "local",
            "moe_grouped_gemm": case.as_engine,
            "use_distributed_optimizer": bool(case.form),
        }
    )
    state = {
        **sharded,
        "optimizer": optimizer.sharded_state_dict(sharded, metadata=dict(content)),
        "args": Namespace(**args),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "opt_param_scheduler": {"max_lr": 1e-2, "num_steps": SAMPLES},
    }
    dist_checkpointing.save(state, f"{folder}/{FOLDER}", content_metadata=content)
    held = _states(models, optimizer, case)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, held)
    if dist.get_rank() == 0:
        Path(folder, "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
        save_file(_joined(gathered, case), f"{folder}/{EXPECTED}")


def _judge(folder: str, case: Case) -> None:
    """Add the logits of Megatron's model with the expected weights."""
    model = _model(case, 1, 1, 1, None).float()
    tensors = load_file(f"{folder}/{EXPECTED}")
    weights = {name.removeprefix("main/"): tensor for name, tensor in tensors.items() if name.startswith("main/")}
    weights |= {name.removeprefix("buffer/"): tensor for name, tensor in tensors.items() if name.startswith("buffer/")}
    left, unknown = model.load_state_dict(weights, strict=False)
    left = [name for name in left if "_extra_state" not in name]
    if left or unknown:
        raise ValueError(f"not all are there: {left}, {unknown}")
    tokens_s = torch.tensor(TOKENS)
    mask = torch.ones(1, 1, len(TOKENS), len(TOKENS), dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits_bsv = model.eval()(tokens_s[None], torch.arange(len(TOKENS))[None], mask)
    save_file(tensors | {"logits": logits_bsv[0].contiguous()}, f"{folder}/{EXPECTED}")


def _model(case: Case, tp: int, pp: int, ep: int, chunk: int | None) -> nn.Module:
    """This rank's part of the model, in fp32. `chunk` None: the whole model."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    args = case.args
    kind: Any = MLATransformerConfig if args.get("multi_latent_attention") else TransformerConfig
    names = {field.name for field in fields(kind)} - {"bf16", "fp16"}
    values = {name: value for name, value in args.items() if name in names}
    values |= {"layernorm_epsilon": args["norm_epsilon"], "num_moe_experts": args.get("num_experts")}
    values |= {"bias_activation_fusion": args.get("bias_gelu_fusion", False)}
    if not args["group_query_attention"]:
        values["num_query_groups"] = args["num_attention_heads"]
    if args["swiglu"]:
        values |= {"gated_linear_unit": True, "activation_func": nn.functional.silu}
    config = kind(
        **values,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=case.chunks if case.chunks > 1 and pp > 1 else None,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=case.expert_tp if tp > 1 else 1,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    if args.get("num_experts"):
        spec = get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=False,
            normalization=args["normalization"],
            vp_stage=chunk if pp > 1 and case.chunks > 1 else None,
        )
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=args.get("qk_layernorm", False), normalization=args["normalization"]
        )
    if args.get("multi_latent_attention"):
        for layer in getattr(spec, "layer_specs", None) or [spec]:
            layer.submodules.self_attention.submodules.core_attention = _latent_core()
    ends: dict[str, Any] = {"ignore_virtual": False, "vp_stage": chunk} if pp > 1 and case.chunks > 1 else {}
    return GPTModel(
        config,
        spec,
        vocab_size=case.padded_vocabulary,
        max_sequence_length=args["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        vp_stage=chunk if ends else None,
        parallel_output=False,
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        position_embedding_type=args["position_embedding_type"],
        rotary_base=args["rotary_base"],
    )


def _latent_core() -> type[nn.Module]:
    """Megatron-Core's attention without Transformer Engine, for values of another width than keys.

    Version 0.16.1 has it for equal widths alone.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LatentCore(DotProductAttention):
        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return LatentCore


def _named(models: list[nn.Module], case: Case) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the model on one rank, parameter) of all chunks."""
    for chunk, model in enumerate(models):
        for name, parameter in model.named_parameters():
            yield _global(name, case, chunk), parameter


def _reorder(model: nn.Module) -> None:
    """Let a model name its parameters in Transformer Engine's order: norms before matrices, experts' by kinds."""
    of_layers = list(model.named_parameters())

    def place(named: tuple[str, Tensor]) -> tuple[Any, ...]:
        name = named[0]
        before = re.sub(r"input_layernorm\..*", "self_attention.linear_qkv", name)
        first = next(index for index, (other, _) in enumerate(of_layers) if other.startswith(before))
        expert = re.match(r"(.*local_experts\.)\d+\.(linear_fc\d)", name)
        if expert:
            first = next(index for index, (other, _) in enumerate(of_layers) if other.startswith(expert[1]))
        return first, expert[2] if expert else "", "layernorm" not in name

    ordered = sorted(of_layers, key=place)
    model.named_parameters = lambda *_, **__: iter(ordered)  # type: ignore[method-assign, assignment]


def _biases(models: list[nn.Module], case: Case) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the model on one rank, bias that selects experts)."""
    for chunk, model in enumerate(models):
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                yield _global(name, case, chunk), buffer


def _global(name: str, case: Case, chunk: int) -> str:
    """The name of a parameter in the model on one rank."""
    from megatron.core import parallel_state

    stage = chunk * case.pp + parallel_state.get_pipeline_model_parallel_rank()
    first = stage * case.args["num_layers"] // (case.pp * case.chunks)
    name = re.sub(r"layers\.(\d+)", lambda found: f"layers.{first + int(found[1])}", name)
    if case.ep > 1:
        before = parallel_state.get_expert_model_parallel_rank() * case.args["num_experts"] // case.ep
        name = re.sub(r"local_experts\.(\d+)", lambda found: f"local_experts.{before + int(found[1])}", name)
    if name == "output_layer.weight" and not case.args["untie_embeddings_and_output_weights"]:
        name = "embedding.word_embeddings.weight"  # the last stage's copy
    return name


def _seeded(name: str, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()) * 10 + number)


def _cut(name: str, parameter: Tensor, case: Case) -> tuple[int, int, int]:
    """How tensor ranks hold a parameter: (axis, number of ranks, this rank). axis -1: each holds all of it."""
    from megatron.core import parallel_state

    axis = getattr(parameter, "partition_dim", -1)
    if not getattr(parameter, "tensor_model_parallel", False):
        axis = -1
    if "local_experts" in name:
        return (
            axis if case.expert_tp > 1 else -1,
            case.expert_tp,
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    return axis if case.tp > 1 else -1, case.tp, parallel_state.get_tensor_model_parallel_rank()


def _shard(name: str, parameter: Tensor, case: Case, number: int) -> Tensor:
    """This rank's part of the random tensor `number` of a parameter."""
    axis, ranks, rank = _cut(name, parameter, case)
    shape = list(parameter.shape)
    if axis >= 0:
        shape[axis] *= ranks
    whole = torch.randn(shape, generator=_seeded(name, number))
    if axis < 0:
        return whole
    if _is_gated(name, case):
        # A rank has its rows of the gate above its rows of the up projection.
        return torch.cat([half.chunk(ranks)[rank] for half in whole.chunk(2)])
    return whole.chunk(ranks, axis)[rank]


def _is_gated(name: str, case: Case) -> bool:
    return bool(case.args["swiglu"]) and "linear_fc1" in name


def _states(models: list[nn.Module], optimizer: Any, case: Case) -> list[tuple[str, str, tuple[int, int, int], Tensor]]:
    """What this rank holds: (state, name, how it is cut, values), with shards of data-parallel ranks gathered."""
    names = {parameter: name for name, parameter in _named(models, case)}
    found = []

    def add(state: str, parameter: Tensor, values: Tensor) -> None:
        values = values.detach().clone().reshape(parameter.shape)
        found.append((state, names[parameter], _cut(names[parameter], parameter, case), values))

    for parameter in names:
        add("param", parameter, parameter)
    for single in getattr(optimizer, "chained_optimizers", [optimizer]):
        if case.form:
            for parameter, values in _gathered(single, names).items():
                for theirs, state in (("param", "main"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
                    add(state, parameter, values[theirs])
            continue
        for halves, mains in zip(single.float16_groups, single.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(halves, mains, strict=True):
                add("main", parameter, main)
                for state in ("exp_avg", "exp_avg_sq"):
                    add(state, parameter, single.optimizer.state[main][state])
    found += [("buffer", name, (-1, 1, 0), buffer.clone()) for name, buffer in _biases(models, case)]
    return found


def _gathered(optimizer: Any, names: dict[Tensor, str]) -> dict[Tensor, dict[str, Tensor]]:
    """The states of each parameter of a distributed optimizer, of the shards that data-parallel ranks have of it.

    Megatron's own gathering (`get_parameter_state_dp_zero`) is not used: it puts buckets behind each other without
    their padding, and fully_reshardable then reads parameters at places that count the padding.
    """
    mine: dict[str, tuple[int, dict[str, Tensor]]] = {}
    for buckets in optimizer.gbuf_ranges:
        for bucket in (bucket for of_dtype in buckets.values() for bucket in of_dtype):
            for parameter, ranges in bucket["param_map"].items():
                held = optimizer._get_main_param_and_optimizer_states(parameter)
                mine[names[parameter]] = (ranges["param"].start, {name: held[name].clone() for name in _KINDS})
    group = optimizer.data_parallel_group
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, mine, group)
    found = {}
    for buffer in optimizer.buffers:
        for parameter in buffer.params:
            values = {kind: torch.full((parameter.numel(),), math.nan) for kind in _KINDS}
            for held in of_ranks:
                start, parts = held.get(names[parameter], (0, {}))
                for kind, part in parts.items():
                    values[kind][start : start + len(part)] = part
            found[parameter] = values
    return found


def _joined(gathered: list[Any], case: Case) -> dict[str, Tensor]:
    """The whole tensors from what all ranks hold."""
    parts: dict[str, dict[int, Tensor]] = {}
    cuts: dict[str, int] = {}
    for held in gathered:
        for state, name, (axis, _, rank), values in held:
            parts.setdefault(f"{state}/{name}", {})[rank] = values
            cuts[f"{state}/{name}"] = axis
    whole = {}
    for name, of_ranks in parts.items():
        values = [of_ranks[rank] for rank in sorted(of_ranks)]
        axis = cuts[name]
        if axis < 0:
            whole[name] = values[0].contiguous()
        elif _is_gated(name, case):
            halves = [value.chunk(2) for value in values]
            whole[name] = torch.cat([half[0] for half in halves] + [half[1] for half in halves])
        else:
            whole[name] = torch.cat(values, axis)
    return whole


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
