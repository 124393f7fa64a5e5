"""What the kernels are measured against: the same functions as one writes them in torch, for eager mode and
torch.compile, and Liger-Kernel's, if installed (pip install liger-kernel)."""

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megapar_kernels.grouped import RowGroups
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

Op = Callable[..., Any]
EPS = 1e-5
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
NAMES = ("torch", "torch.compile", "Liger-Kernel", "fla")


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return layer_norm(total, weight, bias), total


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def rotate_qk(q_sbnd: Tensor, k_sbnd: Tensor, cos_sd: Tensor, sin_sd: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys as Hugging Face's apply_rotary_pos_emb does."""
    cos = cos_sd[:, None, None]
    sin = sin_sd[:, None, None]

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)

    return rotate(q_sbnd), rotate(k_sbnd)


def dropout_add(x: Tensor, residual: Tensor, keys: Tensor, p: float) -> Tensor:
    """With torch's own random numbers: other masks than the kernel's, the same work."""
    return residual + F.dropout(x, p)


def cross_entropy(logits_sbv: Tensor, targets_sb: Tensor) -> Tensor:
    return F.cross_entropy(logits_sbv.flatten(0, 1).float(), targets_sb.flatten(), reduction="none").view_as(targets_sb)


def linear_cross_entropy(x_2d: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum over targets, by way of all logits."""
    return F.cross_entropy(F.linear(x_2d, weight).float(), targets, reduction="sum")


def adamw(
    grad: Tensor, main: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, param: Tensor, clip: Tensor, step: Tensor
) -> tuple[Tensor, ...]:
    """torch's fused AdamW on fp32 main weights, the gradient scaled in it, the weights rounded after."""
    (beta1, beta2) = ADAMW["betas"]
    rest = {name: ADAMW[name] for name in ("lr", "eps", "weight_decay")}
    torch._fused_adamw_(
        *([main], [grad], [exp_avg], [exp_avg_sq], [], [step.add_(1)]),
        **rest,
        beta1=beta1,
        beta2=beta2,
        amsgrad=False,
        maximize=False,
        grad_scale=clip.reciprocal(),
    )
    param.copy_(main)
    return main, exp_avg, exp_avg_sq, param


def adamw_formula(
    grad: Tensor, main: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, param: Tensor, clip: Tensor, step: Tensor
) -> tuple[Tensor, ...]:
    """Update by AdamW written out, for torch.compile to fuse (arXiv 1711.05101, algorithm 2)."""
    beta1, beta2 = ADAMW["betas"]
    step.add_(1)
    grad = grad * clip
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (exp_avg_sq / (1 - beta2**step)).sqrt() + ADAMW["eps"]
    main.mul_(1 - ADAMW["lr"] * ADAMW["weight_decay"])
    main.sub_(ADAMW["lr"] / (1 - beta1**step) * exp_avg / root)
    param.copy_(main)
    return main, exp_avg, exp_avg_sq, param


def square_sum(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float32).square()


class Masks(NamedTuple):
    """Which keys a query attends, as each contender takes it. They are made once, before the time is taken."""

    documents_bs: Tensor | None
    seen: Tensor
    """bool [s, s]"""
    blocks: BlockMask


def masks(positions_s: Tensor, window: int, documents_s: Tensor | None) -> Masks:
    """Return the masks of one sample. A query attends at most `window` keys of its document, its own among them."""

    def seen(sample: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        near = (key <= query) & (query - key < window)
        return near if documents_s is None else near & (documents_s[query] == documents_s[key])

    length = len(positions_s)
    blocks = create_block_mask(seen, None, None, length, length, device=positions_s.device)
    documents_bs = None if documents_s is None else documents_s[None]
    return Masks(documents_bs, seen(None, None, positions_s[:, None], positions_s), blocks)


def _heads_first(*tensors_sbnd: Tensor) -> list[Tensor]:
    return [x.permute(1, 2, 0, 3) for x in tensors_sbnd]


def _joined(y_bnsd: Tensor) -> Tensor:
    return y_bnsd.permute(2, 0, 1, 3).flatten(2)


def masked_attention(q_sbnd: Tensor, k_sbnd: Tensor, v_sbnd: Tensor, sinks_n: None, masks: Masks) -> Tensor:
    """By SDPA. Heads of k and v are repeated: its fused kernels take no mask together with fewer key/value heads."""
    run = q_sbnd.shape[2] // k_sbnd.shape[2]
    q, k, v = _heads_first(q_sbnd, k_sbnd.repeat_interleave(run, 2), v_sbnd.repeat_interleave(run, 2))
    return _joined(F.scaled_dot_product_attention(q, k, v, attn_mask=masks.seen))


def attention_with_dropout(q_sbnd: Tensor, k_sbnd: Tensor, v_sbnd: Tensor, sample_ids_b: Tensor, p: float) -> Tensor:
    """By SDPA with torch's own random numbers: other masks than the kernel's, the same work."""
    q, k, v = _heads_first(q_sbnd, k_sbnd, v_sbnd)
    return _joined(F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True))


def attention_by_scores(
    q_sbnd: Tensor, k_sbnd: Tensor, v_sbnd: Tensor, sinks_n: Tensor | None, masks: Masks, cap: float
) -> Tensor:
    """Attend with all scores in memory, as Hugging Face's eager_attention_forward of Gemma 2 and gpt-oss does."""
    q, k, v = _heads_first(q_sbnd, k_sbnd, v_sbnd)
    run = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(run, 1).transpose(2, 3) * q.shape[-1] ** -0.5
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~masks.seen, -math.inf)
    if sinks_n is not None:
        scores = torch.cat([scores, sinks_n[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return _joined(scores.softmax(-1)[..., : k.shape[2]] @ v.repeat_interleave(run, 1))


def attention_by_kv_head(
    q_sbnd: Tensor, k_sbnd: Tensor, v_sbnd: Tensor, sinks_n: Tensor | None, masks: Masks, cap: float
) -> Tensor:
    """`attention_by_scores` with the scores of one key/value head in memory at a time. Backward computes them again."""
    kv_heads = k_sbnd.shape[2]
    sinks = [None] * kv_heads if sinks_n is None else sinks_n.chunk(kv_heads)
    parts = zip(*(x.chunk(kv_heads, 2) for x in (q_sbnd, k_sbnd, v_sbnd)), sinks, strict=True)
    found = [checkpoint(attention_by_scores, *part, masks, cap, use_reentrant=False) for part in parts]
    return torch.cat(found, -1)


def flexible_attention(
    q_sbnd: Tensor, k_sbnd: Tensor, v_sbnd: Tensor, sinks_n: Tensor | None, masks: Masks, cap: float
) -> Tensor:
    """FlexAttention (arXiv 2412.05496), for torch.compile. Sinks are multiplied in by its logsumexp."""

    def capped(score: Tensor, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    q, k, v = _heads_first(q_sbnd, k_sbnd, v_sbnd)
    rule = capped if cap else None
    wanted = AuxRequest(lse=sinks_n is not None)
    y, aux = flex_attention(q, k, v, rule, masks.blocks, enable_gqa=True, return_aux=wanted)
    if sinks_n is not None and aux.lse is not None:
        y = (y * torch.sigmoid(aux.lse - sinks_n[:, None])[..., None]).to(y.dtype)
    return _joined(y)


def rows_of_tokens(x_th: Tensor, token_of_row: Tensor, row_of_choice: Tensor) -> Tensor:
    return x_th.index_select(0, token_of_row)


def sums_of_rows(rows: Tensor, token_of_row: Tensor, row_of_choice: Tensor) -> Tensor:
    """Sum the rows of each token, in the dtype of the rows."""
    return rows.new_zeros(len(row_of_choice), rows.shape[1]).index_add(0, token_of_row, rows)


def sums_of_gathered_rows(rows: Tensor, token_of_row: Tensor, row_of_choice: Tensor) -> Tensor:
    """Sum the rows of each token in two steps, for torch.compile to fuse."""
    return rows.index_select(0, row_of_choice.flatten()).view(*row_of_choice.shape, -1).sum(1)


def grouped_weight_gradients(totals_goi: Tensor, grad_2d: Tensor, x_2d: Tensor, groups: RowGroups) -> Tensor:
    grad_2d, x_2d = grad_2d.bfloat16(), x_2d.bfloat16()  # fp32 in a dry run, which grouped_mm does not take
    return totals_goi.add_(F.grouped_mm(grad_2d.t(), x_2d, offs=groups.ends))


def short_conv(x_sbc: Tensor, weight_c1w: Tensor) -> Tensor:
    """Convolve by torch's conv1d, with zeros in front."""
    x_bcs = F.pad(x_sbc.permute(1, 2, 0), (weight_c1w.shape[-1] - 1, 0))
    return F.silu(F.conv1d(x_bcs, weight_c1w, groups=weight_c1w.shape[0])).permute(2, 0, 1)


def flash_linear_attention() -> dict[str, Op]:
    """flash-linear-attention's ops by the names of ours. Raises ImportError if it is not installed."""
    importlib.import_module("fla.ops")
    ops = importlib.import_module("megapar_kernels.fla")

    def rule(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = ops.delta_rule(*inputs, None)
        return found

    return {
        "delta rule": rule,
        "delta rule of channels": rule,
        "short convolution": lambda x, weight: ops.short_conv(x, weight, None, True),
    }


def liger() -> dict[str, Op]:
    """Liger-Kernel's ops by the names of ours, with its own defaults. Raises ImportError if it is not installed."""
    ops = importlib.import_module("liger_kernel.ops")

    def rope(q_sbnd: Tensor, k_sbnd: Tensor, cos_sd: Tensor, sin_sd: Tensor) -> tuple[Tensor, ...]:
        q, k = (x.permute(1, 2, 0, 3) for x in (q_sbnd, k_sbnd))
        return tuple(x.permute(2, 0, 1, 3) for x in ops.LigerRopeFunction.apply(q, k, cos_sd[None], sin_sd[None]))

    def fused_linear(x_2d: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        rest = (None, None, -100, 0.0, 0.0, "sum", None, False, torch.float32)  # the last: sums of weight gradients
        return ops.LigerFusedLinearCrossEntropyFunction.apply(x_2d, weight, targets, *rest)[0]

    return {
        "RMSNorm": lambda x, weight: ops.LigerRMSNormFunction.apply(x, weight, EPS),
        "add + RMSNorm": lambda x, r, weight: ops.LigerFusedAddRMSNormFunction.apply(x, r, weight, EPS)[:2],
        "LayerNorm": lambda x, weight, bias: ops.LigerLayerNormFunction.apply(x, weight, bias, EPS),
        "SwiGLU": lambda gate_up: ops.LigerFusedGateUpSiLUMulFunction.apply(gate_up),
        "GeGLU": lambda gate_up: ops.LigerGELUMulFunction.apply(*gate_up.chunk(2, dim=-1)),
        "ReLU²": lambda x: ops.LigerReLUSquaredFunction.apply(x),
        "RoPE": rope,
        "cross entropy": lambda logits, targets: ops.LigerVocabParallelCEFunction.apply(
            logits, targets, None, -100, 0.0, "pytorch", "global"
        ),
        "linear cross entropy": fused_linear,
    }
