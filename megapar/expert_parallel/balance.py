"""The router of a layer, and what keeps its experts evenly loaded: auxiliary losses and a selection bias.

    sequence    the loss E sum_e f_e P_e of each sample: f_e is the share of expert e in the sample's choices, and
                P_e is the mean probability of expert e (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20)
    global      the same loss over all tokens of a step (arXiv 2501.11873), with the shares f_e of the step before. In
                the first step all shares are equal
    z           the loss logsumexp(logits)^2 of each token (ST-MoE, arXiv 2202.08906, equation 5)
    bias        no loss: the selection bias of experts with fewer tokens than the mean is raised (arXiv 2408.15664)
    bias+sequence   both, as DeepSeek-V3 trains. f_e is then the share of expert e in the choices that the sample's
                scores would make without the bias and without groups, as in the paper's equation 18

None of these depends on the layout:

- A rank computes its part of a loss as a sum over its own tokens. Each term is a factor times what the router computed
  for the token. The factors have no gradient, and are the same on all ranks with parts of a sample.
- Tokens have the same weights as in the language loss. So the step divides all losses by one number
  (`megapar.declare.batch.add_loss`).
- Numbers of tokens are whole numbers, with exact sums over ranks.

The loss over a micro-batch (Switch, arXiv 2101.03961) is left out, because it depends on the size of the micro-batch.

Shapes: s positions and b samples of this rank, t = s b tokens, k experts of a token, e experts, h hidden. E is the
number of experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapar.comm import collectives
from megapar.comm.axis import Axis
from megapar.config.model_rules import SELECTION_BIAS
from megapar.declare.params import ONES, ZEROS, Init, ParamSpec, shared_piece
from megapar.declare.sharding import Sharding
from megapar.declare.tally import Tally
from megapar.expert_parallel import route
from megapar.expert_parallel.route import RouterRule
from megapar.linear.function import LOCAL, LinearFunction
from megapar.linear.torch_products import TORCH_PRODUCTS, TorchProducts


@dataclass(frozen=True)
class BalanceRule:
    """How the load of a layer's experts is balanced. The docstring of the module explains the kinds.

    `coef` is the factor of the loss of kind "sequence", "bias+sequence" or "global". `bias_rate` is how far kind "bias"
    or "bias+sequence" moves an expert's bias in a step. `z_coef` is the factor of the z-loss. It can be combined with
    every kind.
    """

    kind: Literal["none", "sequence", "global", "bias", "bias+sequence"] = "none"
    coef: float = 0.001
    bias_rate: float = 0.001
    z_coef: float = 0.0

    @property
    def has_loss(self) -> bool:
        """Whether the rule adds a loss to the main one."""
        return self.of_samples or self.kind == "global" or self.z_coef != 0

    @property
    def of_samples(self) -> bool:
        """Whether the rule adds a loss by the load of each sample."""
        return self.kind in ("sequence", "bias+sequence")

    @property
    def has_bias(self) -> bool:
        """Whether a bias takes part in the selection of experts."""
        return self.kind in ("bias", "bias+sequence")


@dataclass(frozen=True)
class Routing:
    """Where this rank's tokens go: fp32 logits and scores [t, e], int64 chosen experts [t, k], fp32 weights [t, k]."""

    logits: Tensor
    scores: Tensor
    indices: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Float32Products(TorchProducts):
    """Products in fp32 of inputs of any dtype. Backward keeps the inputs in their own dtype, not the fp32 copies.

    y is fp32. Gradients have the dtypes of x and of the weight.
    """

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype == weight.dtype and x.element_size() == 2 and not x.is_cpu:
            # Products of 16-bit numbers are exact in fp32, and tensor cores add them in fp32: the same but for the
            # order of sums, and several times as fast. On the meta device too, which stands for a GPU.
            y = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32).unflatten(0, x.shape[:-1])
            return y if bias is None else y.add_(bias)
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())

    def input_gradient(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        if _by_halves(weight):
            # One product, so that both halves are added in fp32.
            return torch.cat(halves(grad_y), -1) @ torch.cat((weight, weight))
        return (grad_y @ weight.float()).to(weight.dtype)  # x has the dtype of the weight

    def weight_gradient(self, grad_2d: Tensor, x_2d: Tensor) -> Tensor:
        return (grad_2d.t() @ x_2d.float()).to(x_2d.dtype)

    def add_weight_gradient(self, total: Tensor, grad_2d: Tensor, x_2d: Tensor, *, overwrite: bool = False) -> None:
        if _by_halves(x_2d):
            high, low = halves(grad_2d)
            super().add_weight_gradient(total, high, x_2d, overwrite=overwrite)
            super().add_weight_gradient(total, low, x_2d)
            return
        super().add_weight_gradient(total, grad_2d, x_2d.float(), overwrite=overwrite)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two bf16 tensors with the sum x, up to 2^-17 of each number."""
    high = x.bfloat16()
    return high, (x - high).bfloat16()


def _by_halves(other: Tensor) -> bool:
    """Whether an fp32 gradient is multiplied by `other` in two halves.

    Tensor cores multiply bf16 and add in fp32. Products in fp32 take ten times as long. On the meta device too, which
    stands for a GPU.
    """
    return other.dtype == torch.bfloat16 and not other.is_cpu


class Router(nn.Module):
    """The matrix that maps a token to the logits of the experts, in fp32, and the state of the balance.

    The weight `name`.weight [e, h] is on every tp rank. Each tp rank routes tokens of its own, so its gradient is a
    part of the sum. With `logit_bias` there is `name`.logit_bias [e], trained and added to the logits. With
    `in_model_dtype` the product has the dtype of the model, as in gpt-oss, and scores are computed in fp32 from it.
    With `expert_scale` there is `name`.expert_scale [e], trained, the factor of the weights of an expert's tokens.
    `layer` is the row of its counts in the table of all layers. The buffers are equal on all ranks
    after `end_step`:

    - `bias`, fp32 [e], is added to scores for the selection.
    - `last_counts`, int64 [e]: how often all ranks chose each expert in the step before. 0 in the first step.
    - `step_counts`, int64 [e]: how often this rank has chosen each expert in the current step.
    """

    bias: Tensor
    last_counts: Tensor
    step_counts: Tensor

    def __init__(
        self,
        name: str,
        hidden_size: int,
        num_experts: int,
        rule: RouterRule,
        balance: BalanceRule,
        sharding: Sharding,
        *,
        init: Init,
        layer: int = 0,
        logit_bias: bool = False,
        in_model_dtype: bool = False,
        expert_scale: bool = False,
    ):
        super().__init__()
        self.tally = Tally("expert", layer, (sharding.tp, sharding.grad_axis))
        self.rule = rule
        self.balance = balance
        piece = shared_piece(f"{name}.weight", (num_experts, hidden_size), sharding.tp, partial=True)
        self.weight = sharding.parameter((piece,), piece.shape, init, decay=True)
        self.logit_bias = None
        if logit_bias:
            piece = shared_piece(f"{name}.logit_bias", (num_experts,), sharding.tp, partial=True)
            self.logit_bias = sharding.parameter((piece,), piece.shape, ZEROS, decay=False)
        self.expert_scale = None
        if expert_scale:
            piece = shared_piece(f"{name}.expert_scale", (num_experts,), sharding.tp, partial=True)
            self.expert_scale = sharding.parameter((piece,), piece.shape, ONES, decay=False)
        self.products = TORCH_PRODUCTS if in_model_dtype else Float32Products()
        device = sharding.device
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32, device=device))
        self.register_buffer("last_counts", torch.zeros(num_experts, dtype=torch.int64, device=device))
        self.register_buffer("step_counts", torch.zeros(num_experts, dtype=torch.int64, device=device))
        # Checkpoints hold the buffers that have a spec. Those are the ones that the next step reads.
        if balance.has_bias:
            add_to_checkpoints(self.bias, f"{name}.bias", sharding, added_by=SELECTION_BIAS)
        if balance.kind == "global":
            add_to_checkpoints(self.last_counts, f"{name}.last_counts", sharding, training_state=True)

    def forward(self, x_sbh: Tensor, indices: Tensor | None = None) -> Routing:
        """Choose the experts of this rank's tokens, and compute their weights.

        A recomputed forward pass gives the `indices` chosen in the first forward pass.
        """
        logits = LinearFunction.apply(x_sbh.flatten(0, -2), self.weight, self.logit_bias, LOCAL, self.products)
        logits = route.capped(logits, self.rule)
        scores = route.scores(logits, self.rule)
        if indices is None:
            bias = self.bias if self.balance.has_bias else None
            indices = route.select(route.ranked_by(logits, scores, self.rule), self.rule, bias)
        weights = route.weights(scores, indices, self.rule)
        if self.expert_scale is not None:
            # Not by indexing: backward would add up the rows of tokens in the order of their experts.
            weights = weights * self.expert_scale.to(weights.dtype).expand_as(scores).gather(-1, indices)
        return Routing(logits, scores, indices, weights)

    def count(self, chosen_e: Tensor) -> None:
        """Add to `step_counts`, in training, how often the tokens of a forward pass chose each expert, int64 [e].

        A recomputed forward pass chooses nothing, and is not counted.
        """
        if self.training:
            self.step_counts += chosen_e

    def loss(self, routing: Routing, weights_sb: Tensor, axes: Sequence[Axis]) -> Tensor:
        """The sum of this layer's losses over this rank's tokens, 0-d fp32. It is 0 if all losses are turned off.

        `weights_sb` are the weights of this rank's tokens in the language loss. The tokens of a sample are spread over
        the ranks of `axes`, tp and cp. A collective over them if there is a loss by the load of each sample.
        """
        balance = self.balance
        shape = weights_sb.shape
        scores_sbe = routing.scores.unflatten(0, shape)
        loss = routing.logits.new_zeros(())
        if balance.of_samples:
            indices_sbk = self._counted_choices(routing).unflatten(0, shape)
            probabilities_sbe = route.probabilities(scores_sbe, self.rule)
            loss = loss + balance.coef * sequence_loss(probabilities_sbe, indices_sbk, weights_sb, axes)
        if balance.kind == "global":
            probabilities_sbe = route.probabilities(scores_sbe, self.rule)
            loss = loss + balance.coef * lagged_loss(probabilities_sbe, weights_sb, self.last_counts)
        if balance.z_coef:
            loss = loss + balance.z_coef * z_loss(routing.logits.unflatten(0, shape), weights_sb)
        return loss

    def _counted_choices(self, routing: Routing) -> Tensor:
        """The experts of each token that the loss by the load of each sample counts, int64 [t, k]."""
        if not self.balance.has_bias:
            return routing.indices
        # Not the experts of the token: the bias has evened out their load already, and the loss is about the scores.
        return route.select(routing.scores, replace(self.rule, n_group=1))

    def end_step(self, counts_e: Tensor, skip_update: Tensor) -> None:
        """Update the state of the balance. `counts_e` is how often all ranks chose each expert in this step.

        `skip_update` is 0-d on the device. If it is not zero, the state stays as it is.
        """
        # `torch.where`, because an `if` would wait for the device to compute `skip_update`.
        skipped = skip_update != 0
        torch.where(skipped, self.last_counts, counts_e, out=self.last_counts)
        if self.balance.has_bias and self.balance.bias_rate:  # at rate 0 it keeps its mean, too
            moved_e = updated_bias(self.bias, counts_e, self.balance.bias_rate)
            torch.where(skipped, self.bias, moved_e, out=self.bias)


def add_to_checkpoints(
    buffer: Tensor, name: str, sharding: Sharding, *, training_state: bool = False, added_by: str = ""
) -> None:
    """Give a buffer a spec, so checkpoints hold it. All ranks hold the same values."""
    piece = shared_piece(name, buffer.shape, sharding.tp)
    spec = ParamSpec(
        (piece,), ZEROS, decay=False, grad_axis=sharding.grad_axis, training_state=training_state, added_by=added_by
    )
    buffer.spec = spec  # type: ignore[attr-defined]


def sequence_loss(probabilities_sbe: Tensor, indices_sbk: Tensor, weights_sb: Tensor, axes: Sequence[Axis]) -> Tensor:
    """This rank's part of the sum over samples of W E sum_e f_e P_e, where W is the sum of the sample's weights.

    f and P are means over all positions of the whole sample, whatever the weights of its tokens. Its tokens are spread
    over the ranks of `axes`.
    """
    factors_be = _sequence_factors(probabilities_sbe, indices_sbk, weights_sb, axes)
    return (probabilities_sbe * factors_be).sum()


@torch.no_grad()
def _sequence_factors(
    probabilities_sbe: Tensor, indices_sbk: Tensor, weights_sb: Tensor, axes: Sequence[Axis]
) -> Tensor:
    """The factor of each probability in `sequence_loss`, [b, e]: W E f_e / S for a sample of S positions."""
    _, samples, experts = probabilities_sbe.shape
    top_k = indices_sbk.shape[2]
    # All samples are counted at once: expert e of sample i has the number i * experts + e.
    first_of_sample_b = experts * torch.arange(samples, device=indices_sbk.device)
    counts_be = route.counts(indices_sbk + first_of_sample_b[:, None], samples * experts).view(samples, experts)
    # Counts and weights are reduced in one message. fp64 holds the counts exactly.
    totals = torch.cat([counts_be.double(), weights_sb.double().sum(0)[:, None]], dim=1)
    for axis in axes:
        collectives.all_reduce(totals, axis)
    counts_be, weight_b1 = totals.split([experts, 1], dim=1)
    choices_b1 = counts_be.sum(1, keepdim=True)  # k S
    share_be = counts_be / choices_b1  # f
    factors_be = weight_b1 * experts * share_be * top_k / choices_b1  # k / choices is 1 / S
    return factors_be.to(probabilities_sbe.dtype)


def lagged_loss(probabilities_sbe: Tensor, weights_sb: Tensor, last_counts_e: Tensor) -> Tensor:
    """This rank's part of the sum over tokens of w E sum_e f_e p_e.

    w is the weight of a token, p its probabilities, and f the shares of the experts in the step before.
    """
    experts = probabilities_sbe.shape[2]
    # In the first step all counts are 0. Then 1 is added to each, which makes all shares equal.
    counts_e = last_counts_e + (last_counts_e.sum() == 0)
    share_e = counts_e.to(probabilities_sbe.dtype) / counts_e.sum()
    return experts * (weights_sb * (probabilities_sbe @ share_e)).sum()


def z_loss(logits_sbe: Tensor, weights_sb: Tensor) -> Tensor:
    """This rank's part of the sum over tokens of w logsumexp(logits)^2, where w is the weight of a token."""
    return (weights_sb * logits_sbe.logsumexp(-1).square()).sum()


def updated_bias(bias_e: Tensor, counts_e: Tensor, rate: float) -> Tensor:
    """`bias_e`, moved by `rate`: up for experts chosen less often than the mean, down for more often.

    Then the mean of the bias is subtracted. Selection does not depend on the mean, which would drift otherwise.
    """
    # The count minus the mean, times the number of experts: a whole number. Only its sign is used.
    surplus_e = counts_e * counts_e.numel() - counts_e.sum()
    moved_e = bias_e - rate * surplus_e.sign()
    return moved_e - moved_e.mean()
