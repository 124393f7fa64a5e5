"""Logits of layers of multi-token prediction are those of Megatron-Core's own, two layers deep."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megapar_models.convert.megatron_core import on_cpu
from megapar_models.stage import Stage
from torch import Tensor, nn

from megapar.declare.batch import MicroBatch, StepScope, Targets
from tests.support.grid import Layout, make_state
from tests.support.multi_token import MODEL, logits_of_layers
from tests.support.published import logits_of, weights_of

pytestmark = pytest.mark.slow  # as all that needs the extra judges
pytest.importorskip("megatron.core", reason="not run: needs megatron-core, pip install megatron-core==0.16.1")
PADDED, LENGTH = 256, 24


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """What Megatron-Core's layers of multi-token prediction ask for their groups, on one rank of a CPU."""
    from megatron.core import parallel_state

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        with on_cpu():
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def gpt_model() -> nn.Module:
    """Megatron-Core's GPTModel of `MODEL`, without its weights."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 10}
    sizes |= {"ffn_hidden_size": 76, "layernorm_epsilon": MODEL.rms_norm_eps, "mtp_num_layers": 2}
    form = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "qk_layernorm": True}
    form |= {"add_bias_linear": False, "add_qkv_bias": True, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    fused = dict.fromkeys(("bias_activation_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion"), False)
    options = {**sizes, **form, **fused}
    config = TransformerConfig(**options, use_cpu_initialization=True, perform_initialization=False)
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    further = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    ends: dict[str, Any] = {"vocab_size": PADDED, "max_sequence_length": LENGTH, "position_embedding_type": "rope"}
    ends |= {"rotary_base": 10000, "parallel_output": False}
    model: nn.Module = GPTModel(config, layer, mtp_block_spec=further, **ends)
    return model.eval()


def their_tensors(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors by the names of Megatron-Core."""

    def padded(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, PADDED - len(x)))

    def of_groups(name: str, kind: str) -> Tensor:
        parts = [ours[f"{name}.{letter}.{kind}"].unflatten(0, (2, -1)) for letter in "qkv"]
        return torch.cat(parts, dim=1).flatten(0, 1)

    found = {"decoder.final_layernorm.weight": ours["norm.weight"]}
    found["embedding.word_embeddings.weight"] = padded(ours["embedding.weight"])
    found["output_layer.weight"] = padded(ours["head.weight"])
    same = {"input_layernorm": "attention_norm", "pre_mlp_layernorm": "mlp_norm", "mlp.linear_fc2": "mlp.down"}
    same |= {"self_attention.linear_proj": "attention.o"}
    same |= {f"self_attention.{letter}_layernorm": f"attention.{letter}_norm" for letter in "qk"}
    for number in range(4):
        name, further = f"layers.{number}", f"mtp.layers.{number - 2}"
        theirs = f"decoder.layers.{number}" if number < 2 else f"{further}.transformer_layer"
        found |= {f"{theirs}.{their}.weight": ours[f"{name}.{our}.weight"] for their, our in same.items()}
        for kind in ("weight", "bias"):
            found[f"{theirs}.self_attention.linear_qkv.{kind}"] = of_groups(f"{name}.attention", kind)
        gate_up = [ours[f"{name}.mlp.{matrix}.weight"] for matrix in ("gate", "up")]
        found[f"{theirs}.mlp.linear_fc1.weight"] = torch.cat(gate_up)
        if number >= 2:
            own = {matrix: matrix for matrix in ("enorm", "hnorm", "eh_proj")} | {"final_layernorm": "shared_head_norm"}
            found |= {f"{further}.{their}.weight": ours[f"{name}.{our}.weight"] for their, our in own.items()}
    return found


def test_logits_are_those_of_megatron_core(one_rank: None) -> None:
    """Megatron-Core rolls tokens over the end of a sample, as zeros: the batch here has the same."""
    (stage,) = make_state(Layout(MODEL, micro_batch_size=12, zero_stage=0).config()).stages.values()
    assert isinstance(stage, Stage)
    theirs = gpt_model()
    params = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, tensor in (tensors := their_tensors(weights_of(stage))).items():
            params[name].copy_(tensor)
    assert params.keys() == tensors.keys()
    tokens_bs = torch.randint(131, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    ahead = [Targets(F.pad(tokens_bs[:, n:], (0, n)), torch.ones(2, LENGTH)) for n in (1, 2, 3)]
    batch = MicroBatch.of_samples(tokens_bs, *ahead[0], torch.arange(2), later_targets=ahead[1:])
    batch = replace(batch, scope=StepScope(grad_scale=torch.ones(())))
    given: list[Tensor] = []
    # A copy, because the loss overwrites logits.
    theirs.output_layer.register_forward_hook(lambda module, args, output: given.append(output[0].clone()))
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    with torch.no_grad():
        theirs(tokens_bs, torch.arange(LENGTH)[None].expand(2, -1), mask, labels=ahead[0].tokens_bs)
        expected = [logits_sbv.transpose(0, 1)[..., :131] for logits_sbv in (given[2], *given[:2])]
        found = [logits_of(stage.eval(), batch), *logits_of_layers(stage, batch)]
    for ours, logits in zip(found, expected, strict=True):
        assert (ours - logits).norm() <= 1e-6 * logits.norm()
