"""What the plain versions of several families share, in eager PyTorch. Tests compare the models with these versions.

Nothing here or in a family's reference.py is shared with the models under test but the numbers in `ModelConfig` and the
names of logical tensors. Any float dtype works: all arithmetic is in the dtype of the given tensors.
Letters: b samples, s positions, h hidden, n heads, d width of a head, v vocabulary, t tokens, e experts, k experts of a
token, g groups of experts.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megapar.config.model_options import MixtureModel, ModelConfig

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
