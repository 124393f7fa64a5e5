"""The two model families once more, in plain eager PyTorch: what every layout must agree with. Which positions and
which MLP a model has is seen from its tensors.

Nothing here is shared with the models under test but `ModelConfig`'s numbers and the names of logical tensors. Any
float dtype works; the dtype of the given tensors is that of all arithmetic.
Letters: b samples, s positions, h hidden, n heads, d width of a head, v vocabulary.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megapar.batch import MicroBatch
from megapar.config import ModelConfig

Tensors = Mapping[str, Tensor]


def linear(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    y = x @ tensors[f"{name}.weight"].t()
    return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y


def norm(model: ModelConfig, tensors: Tensors, name: str, x: Tensor) -> Tensor:
    """RMSNorm, or LayerNorm where the norm has a bias."""
    bias = tensors.get(f"{name}.bias")
    if bias is not None:
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + model.rms_norm_eps).sqrt() * tensors[f"{name}.weight"]
    return x if bias is None else x + bias


def rope_frequency(model: ModelConfig, pair: int) -> float:
    """Radians per position of the pair (pair, pair + d/2)."""
    frequency = model.rope_theta ** (-2 * pair / model.head_dim)
    scaling = model.rope_scaling
    if scaling.rope_type == "default":
        return frequency
    if scaling.rope_type == "linear":
        return frequency / scaling.factor
    wavelength, context = 2 * math.pi / frequency, scaling.original_max_position_embeddings
    if wavelength > context / scaling.low_freq_factor:
        return frequency / scaling.factor
    if wavelength < context / scaling.high_freq_factor:
        return frequency
    smooth = (context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def rotate(model: ModelConfig, x_bnsd: Tensor) -> Tensor:
    half = model.head_dim // 2
    frequencies = torch.tensor([rope_frequency(model, pair) for pair in range(half)], dtype=torch.float64)
    angles = torch.arange(x_bnsd.shape[2], dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos().to(x_bnsd), angles.sin().to(x_bnsd)
    first, second = x_bnsd[..., :half], x_bnsd[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(model: ModelConfig, tensors: Tensors, name: str, x_bsh: Tensor) -> Tensor:
    b, s, _ = x_bsh.shape
    d = model.head_dim

    def heads(projection: str) -> Tensor:
        return linear(tensors, f"{name}.{projection}", x_bsh).view(b, s, -1, d).transpose(1, 2)

    q, k, v = heads("q"), heads("k"), heads("v")
    if model.qk_norm:
        q, k = norm(model, tensors, f"{name}.q_norm", q), norm(model, tensors, f"{name}.k_norm", k)
    if "positions.weight" not in tensors:
        q, k = rotate(model, q), rotate(model, k)
    outputs = []
    for head in range(model.num_attention_heads):
        group = head * model.num_key_value_heads // model.num_attention_heads
        scores = q[:, head] @ k[:, group].transpose(-1, -2) / math.sqrt(d)
        future = torch.ones(s, s, dtype=torch.bool, device=scores.device).triu(1)
        outputs.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[:, group])
    return linear(tensors, f"{name}.o", torch.cat(outputs, dim=-1))


def mlp(model: ModelConfig, tensors: Tensors, name: str, x_bsh: Tensor) -> Tensor:
    up = linear(tensors, f"{name}.up", x_bsh)
    if f"{name}.gate.weight" not in tensors:
        return linear(tensors, f"{name}.down", activate(model, up))
    return linear(tensors, f"{name}.down", activate(model, linear(tensors, f"{name}.gate", x_bsh)) * up)


def activate(model: ModelConfig, x: Tensor) -> Tensor:
    if model.hidden_act == "silu":
        return x * x.sigmoid()
    if model.hidden_act == "relu2":
        return x * x * (x > 0)
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def logits(model: ModelConfig, tensors: Tensors, tokens_bs: Tensor) -> Tensor:
    """[b, s, v] of the true vocabulary, without dropout."""
    x = tensors["embedding.weight"][tokens_bs]
    if "positions.weight" in tensors:
        x = x + tensors["positions.weight"][: tokens_bs.shape[1]]
    for number in range(model.num_hidden_layers):
        name = f"layers.{number}"
        x = x + attention(model, tensors, f"{name}.attention", norm(model, tensors, f"{name}.attention_norm", x))
        x = x + mlp(model, tensors, f"{name}.mlp", norm(model, tensors, f"{name}.mlp_norm", x))
    head = "embedding.weight" if model.tie_word_embeddings else "head.weight"
    return norm(model, tensors, "norm", x) @ tensors[head].t()


def loss(model: ModelConfig, tensors: Tensors, batch: MicroBatch, z_loss: float = 0.0) -> Tensor:
    """Sum over targets of weight * (cross entropy + z_loss * log-sum-exp^2); targets of -100 count nothing."""
    z = logits(model, tensors, batch.tokens_bs)
    counts, normalizer = batch.targets_bs >= 0, z.logsumexp(-1)
    picked = z.gather(-1, batch.targets_bs.clamp(min=0)[..., None])[..., 0]
    losses = normalizer - picked + z_loss * normalizer**2
    return (losses * batch.weights_bs.to(z.dtype) * counts).sum()


def loss_and_gradients(
    model: ModelConfig,
    tensors: Tensors,
    batches: Sequence[MicroBatch],
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
    z_loss: float = 0.0,
) -> tuple[float, dict[str, Tensor]]:
    """The batches' scaled loss sum and its gradient in every tensor, computed in `dtype`."""
    leaves = {name: tensor.to(dtype, copy=True).requires_grad_() for name, tensor in tensors.items()}
    total = torch.stack([loss(model, leaves, batch, z_loss) for batch in batches]).sum() * scale
    total.backward()
    return total.item(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
