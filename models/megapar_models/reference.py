"""Plain versions of four families in eager PyTorch, and what they share. Tests compare every layout with them.

Nothing here is shared with the models under test but the numbers in `ModelConfig` and the names of logical tensors. Any
float dtype works: all arithmetic is in the dtype of the given tensors. Letters: b samples, s positions, h hidden, n
heads, d width of a head, v vocabulary, t tokens, e experts, k experts of a token, g groups of experts.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megapar.config.model_options import MixtureModel, ModelConfig
from megapar_models.rotary import RotaryModel

Tensors = Mapping[str, Tensor]  # logical tensors by name
Part = Callable[[Any, Tensors, str, Tensor], Tensor]  # with the model's options, the name of a module and its input


def linear(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    """x W^T, plus the bias if there is one."""
    y = x @ tensors[f"{name}.weight"].t()
    if f"{name}.bias" in tensors:
        return y + tensors[f"{name}.bias"]
    return y


def heads(model: ModelConfig, tensors: Tensors, name: str, x_bsh: Tensor) -> Tensor:
    """The projection `name` of x, cut into heads: [b, n, s, d]."""
    b, s, _ = x_bsh.shape
    return linear(tensors, name, x_bsh).view(b, s, -1, model.head_dim).transpose(1, 2)


def attend(q_bnsd: Tensor, k_bnsd: Tensor, v_bnsd: Tensor) -> Tensor:
    """Causal attention; returns [b, s, n d]. k and v may have fewer heads than q: each then serves a group."""
    query_heads = q_bnsd.shape[1]
    key_heads = k_bnsd.shape[1]
    s = q_bnsd.shape[2]
    outputs = []
    for head in range(query_heads):
        group = head * key_heads // query_heads
        scores = q_bnsd[:, head] @ k_bnsd[:, group].transpose(-1, -2) / math.sqrt(q_bnsd.shape[-1])
        future = torch.ones(s, s, dtype=torch.bool, device=scores.device).triu(1)
        outputs.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v_bnsd[:, group])
    return torch.cat(outputs, dim=-1)


def activate(model: ModelConfig, x: Tensor) -> Tensor:
    """The activation function named by model.hidden_act."""
    if model.hidden_act == "silu":
        return x * x.sigmoid()
    if model.hidden_act == "relu2":
        return x * x * (x > 0)
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def mixture(model: MixtureModel, tensors: Tensors, name: str, x_bsh: Tensor, mlp: Part) -> Tensor:
    """A mixture of experts, each computed by `mlp`: the sum of a token's experts, times their weights."""
    b, s, h = x_bsh.shape
    x_th = x_bsh.reshape(b * s, h)  # t tokens
    experts_tk, weights_tk = _route(model, tensors, f"{name}.router", x_th)
    output_th = torch.zeros_like(x_th)
    for expert in range(model.moe.num_experts):
        token_t, rank_t = (experts_tk == expert).nonzero(as_tuple=True)
        y = mlp(model, tensors, f"{name}.experts.{expert}", x_th[token_t])
        output_th = output_th.index_add(0, token_t, weights_tk[token_t, rank_t, None] * y)
    if model.moe.shared_expert_intermediate_size:
        shared_th = mlp(model, tensors, f"{name}.shared", x_th)
        if model.moe.shared_expert_gate:
            shared_th = shared_th * linear(tensors, f"{name}.shared_gate", x_th).sigmoid()
        output_th = output_th + shared_th
    return output_th.view(b, s, h)


def _route(model: MixtureModel, tensors: Tensors, name: str, x_th: Tensor) -> tuple[Tensor, Tensor]:
    """The experts [t, k] chosen by each token, and their weights."""
    moe = model.moe
    logits_te = x_th @ tensors[f"{name}.weight"].t()
    scores_te = logits_te.sigmoid() if moe.scoring_func == "sigmoid" else logits_te.softmax(-1)
    # The bias decides which experts are chosen. It is no part of their weights.
    chosen_by_te = scores_te
    if f"{name}.bias" in tensors:
        chosen_by_te = scores_te + tensors[f"{name}.bias"]
    if moe.n_group > 1:
        chosen_by_te = _best_groups(model, chosen_by_te)
    # Of experts with equal scores those with the lowest numbers are chosen, which topk does not promise.
    best_first_te = chosen_by_te.sort(dim=-1, descending=True, stable=True).indices
    experts_tk = best_first_te[:, : moe.num_experts_per_tok]
    weights_tk = scores_te.gather(1, experts_tk)
    if moe.norm_topk_prob:
        weights_tk = weights_tk / weights_tk.sum(-1, keepdim=True)
    return experts_tk, weights_tk * moe.routed_scaling_factor


def _best_groups(model: MixtureModel, scores_te: Tensor) -> Tensor:
    """The scores, with -inf for experts outside the topk_group best groups of each token (arXiv 2412.19437)."""
    moe = model.moe
    scores_tge = scores_te.view(len(scores_te), moe.n_group, -1)
    counted = moe.num_experts_per_tok // moe.topk_group  # experts whose scores are added to the score of a group
    group_scores_tg = scores_tge.topk(counted).values.sum(-1)
    best_tg = torch.zeros_like(group_scores_tg, dtype=torch.bool)
    best_first_tg = group_scores_tg.sort(dim=-1, descending=True, stable=True).indices
    best_tg.scatter_(1, best_first_tg[:, : moe.topk_group], True)
    return scores_tge.masked_fill(~best_tg[..., None], -math.inf).view_as(scores_te)


def logits_of_layers(
    model: ModelConfig, tensors: Tensors, x_bsh: Tensor, *, norm: Part, attention: Part, mlp: Part
) -> Tensor:
    """All layers, the last norm and the head on embedded tokens: logits [b, s, v] of the true vocabulary.

    A layer is x + attention(norm(x)), then x + mlp(norm(x)).
    """
    x = x_bsh
    for number in range(model.num_hidden_layers):
        name = f"layers.{number}"
        x = x + attention(model, tensors, f"{name}.attention", norm(model, tensors, f"{name}.attention_norm", x))
        x = x + mlp(model, tensors, f"{name}.mlp", norm(model, tensors, f"{name}.mlp_norm", x))
    head = "embedding.weight" if model.tie_word_embeddings else "head.weight"
    return norm(model, tensors, "norm", x) @ tensors[head].t()


# Llama


def llama_logits(model: ModelConfig, tensors: Tensors, tokens_bs: Tensor) -> Tensor:
    """[b, s, v] of the true vocabulary. Positions count from 0 in each sample."""
    x_bsh = tensors["embedding.weight"][tokens_bs]
    return logits_of_layers(model, tensors, x_bsh, norm=rms_norm, attention=attention, mlp=mlp)


def rms_norm(model: ModelConfig, tensors: Tensors, name: str, x: Tensor) -> Tensor:
    """RMSNorm with weight."""
    return x / (x.pow(2).mean(-1, keepdim=True) + model.rms_norm_eps).sqrt() * tensors[f"{name}.weight"]


def _rope_frequency(model: RotaryModel, pair: int) -> float:
    """Radians per position of the pair (pair, pair + d/2)."""
    frequency = model.rope_theta ** (-2 * pair / model.head_dim)
    scaling = model.rope_scaling
    if scaling.rope_type == "default":
        return frequency
    if scaling.rope_type == "linear":
        return frequency / scaling.factor
    wavelength = 2 * math.pi / frequency
    context = scaling.original_max_position_embeddings
    if scaling.rope_type == "yarn":
        first, last = _yarn_mixed_pairs(model)
        stretch = min(max((pair - first) / (last - first), 0.0), 1.0)
        return (1 - stretch) * frequency + stretch * frequency / scaling.factor
    assert scaling.rope_type == "llama3"
    if wavelength > context / scaling.low_freq_factor:
        return frequency / scaling.factor
    if wavelength < context / scaling.high_freq_factor:
        return frequency
    smooth = (context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _yarn_mixed_pairs(model: RotaryModel) -> tuple[float, float]:
    """YaRN: the last pair with its frequency kept, and the first one with its frequency divided by the factor."""
    scaling = model.rope_scaling
    ends = []
    for turns in (scaling.beta_fast, scaling.beta_slow):
        # The pair whose wavelength is context / turns: 2 pi theta^(2 pair / d) = context / turns.
        wavelength = scaling.original_max_position_embeddings / turns
        ends.append(model.head_dim / 2 * math.log(wavelength / (2 * math.pi), model.rope_theta))
    first, last = ends
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, model.head_dim - 1)
    return first, last + (0.001 if first == last else 0)


def _attention_factor(model: RotaryModel) -> float:
    """YaRN: what cos and sin are multiplied by."""
    scaling = model.rope_scaling
    if scaling.rope_type != "yarn":
        return 1.0
    stretch = math.log(max(scaling.factor, 1.0)) / 10
    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return (1 + scaling.mscale * stretch) / (1 + scaling.mscale_all_dim * stretch)
    return 1 + stretch


def _rotate(model: RotaryModel, x_bnsd: Tensor) -> Tensor:
    half = model.head_dim // 2
    frequencies = torch.tensor([_rope_frequency(model, pair) for pair in range(half)], dtype=torch.float64)
    angles = torch.arange(x_bnsd.shape[2], dtype=torch.float64)[:, None] * frequencies
    factor = _attention_factor(model)
    cos, sin = (factor * angles.cos()).to(x_bnsd), (factor * angles.sin()).to(x_bnsd)
    first, second = x_bnsd[..., :half], x_bnsd[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(model: RotaryModel, tensors: Tensors, name: str, x_bsh: Tensor) -> Tensor:
    """Causal attention with rotary positions; with biases and norms of q and k if the model has them."""
    q, k, v = (heads(model, tensors, f"{name}.{letter}", x_bsh) for letter in "qkv")
    if f"{name}.q_norm.weight" in tensors:
        q = rms_norm(model, tensors, f"{name}.q_norm", q)
        k = rms_norm(model, tensors, f"{name}.k_norm", k)
    outputs = attend(_rotate(model, q), _rotate(model, k), v)
    return linear(tensors, f"{name}.o", outputs)


def mlp(model: ModelConfig, tensors: Tensors, name: str, x_bsh: Tensor) -> Tensor:
    """down(act(gate x) * up x)."""
    gate = activate(model, linear(tensors, f"{name}.gate", x_bsh))
    return linear(tensors, f"{name}.down", gate * linear(tensors, f"{name}.up", x_bsh))


# GPT-2, without dropout


def gpt_logits(model: ModelConfig, tensors: Tensors, tokens_bs: Tensor) -> Tensor:
    """[b, s, v] of the true vocabulary. Positions count from 0 in each sample."""
    x_bsh = tensors["embedding.weight"][tokens_bs] + tensors["positions.weight"][: tokens_bs.shape[1]]
    return logits_of_layers(model, tensors, x_bsh, norm=_layer_norm, attention=_gpt_attention, mlp=_gpt_mlp)


def _layer_norm(model: ModelConfig, tensors: Tensors, name: str, x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + model.rms_norm_eps).sqrt() * tensors[f"{name}.weight"]
    return x + tensors[f"{name}.bias"]


def _gpt_attention(model: ModelConfig, tensors: Tensors, name: str, x_bsh: Tensor) -> Tensor:
    q, k, v = (heads(model, tensors, f"{name}.{letter}", x_bsh) for letter in "qkv")
    return linear(tensors, f"{name}.o", attend(q, k, v))


def _gpt_mlp(model: ModelConfig, tensors: Tensors, name: str, x_bsh: Tensor) -> Tensor:
    return linear(tensors, f"{name}.down", activate(model, linear(tensors, f"{name}.up", x_bsh)))


# Mixtures


def mixtral_logits(model: MixtureModel, tensors: Tensors, tokens_bs: Tensor) -> Tensor:
    """[b, s, v] of the true vocabulary. Positions count from 0 in each sample."""
    x_bsh = tensors["embedding.weight"][tokens_bs]
    return logits_of_layers(model, tensors, x_bsh, norm=rms_norm, attention=attention, mlp=_experts)


def _experts(model: MixtureModel, tensors: Tensors, name: str, x_bsh: Tensor) -> Tensor:
    return mixture(model, tensors, name, x_bsh, mlp)


def qwen3_moe_logits(model: Any, tensors: Tensors, tokens_bs: Tensor) -> Tensor:
    """[b, s, v] of the true vocabulary. Positions count from 0 in each sample."""
    x_bsh = tensors["embedding.weight"][tokens_bs]
    return logits_of_layers(model, tensors, x_bsh, norm=rms_norm, attention=attention, mlp=_experts_or_mlp)


def _experts_or_mlp(model: Any, tensors: Tensors, name: str, x_bsh: Tensor) -> Tensor:
    layer = int(name.split(".")[1])  # layers.N.mlp
    if layer in model.moe.mlp_only_layers:
        return mlp(model, tensors, name, x_bsh)
    return mixture(model, tensors, name, x_bsh, mlp)
