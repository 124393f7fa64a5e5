"""A layer: a mixer of tokens and an MLP, each a branch of the residual stream. `LayerKind` says what both are."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from megapar.config.model_options import ModelConfig
from megapar.config.plugins import named
from megapar_models.attention import Attention
from megapar_models.factory import Factory
from megapar_models.forward import ForwardContext
from megapar_models.layer_kind import LayerKind
from megapar_models.mlp import DenseMLP, PlainMLP
from megapar_models.moe import DenseAndExperts, MixtureOfExperts
from megapar_models.norms import NoNorm, Norm, add_and_norm
from megapar_models.packing import pack_norm

# Mixers and MLPs by name are made as CLASS(number, kind, model, factory), and map x_sbh and a ForwardContext to x_sbh.
MIXERS: Mapping[str, type] = {"attention": Attention}
MLPS: Mapping[str, type] = {"dense": DenseMLP, "plain": PlainMLP, "mixture": MixtureOfExperts, "both": DenseAndExperts}


def make_mixer(number: int, kind: LayerKind, model: ModelConfig, factory: Factory) -> nn.Module | None:
    """Make the mixer of layer `number` that `kind.mixer` says. Raises ConfigError if there is no such class."""
    if kind.mixer == "none":
        return None
    if not isinstance(kind.mixer, str):
        return kind.mixer.make(number, kind, model, factory)
    mixer: nn.Module = named(f"the mixer of layer {number}", kind.mixer, MIXERS, type)(number, kind, model, factory)
    return mixer


class Layer(nn.Module):
    """h = x + attention(norm(x)), then h + mlp(norm(h)).

    Each norm may stand before its branch, behind it, or both (`LayerKind.norms`). Behind a branch it normalizes what
    is added to the residual stream. The mixer is called attention whatever it is.

    Parallel branches (`LayerKind.parallel`) both read x, as in GPT-J and PaLM (arXiv 2204.02311):
    x + attention(norm(x)) + mlp(norm(x)). A layer without a mixer or without an MLP ("none") is the other branch alone.
    """

    def __init__(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__()
        if kind.norms == "stream":
            raise ValueError("LayerKind.norms stream: a layer of the family's own has it, such as GPT-2's")
        self.parallel = kind.parallel
        self.multiplier = kind.residual_multiplier

        def norm(module: str, placement: str, branch: object) -> Norm:
            norms = kind.mlp_norms or kind.norms if module.startswith("mlp") else kind.norms
            if norms not in (placement, "both") or branch == "none":
                return NoNorm()
            return factory.norm(f"layers.{number}.{module}", model.hidden_size, kind.norm)

        self.attention_norm = norm("attention_norm", "before", kind.mixer)
        self.attention = make_mixer(number, kind, model, factory)
        self.attention_output_norm = norm("attention_output_norm", "after", kind.mixer)
        self.mlp_norm = NoNorm() if kind.parallel == "one_norm" else norm("mlp_norm", "before", kind.mlp)
        self.mlp: nn.Module | None = None
        if kind.mlp != "none":
            self.mlp = named(f"the MLP of layer {number}", kind.mlp, MLPS, type)(number, kind, model, factory)
        self.mlp_output_norm = norm("mlp_output_norm", "after", kind.mlp)
        if type(self).forward is Layer.forward:
            both = (self.attention, self.mlp) if kind.parallel == "one_norm" else (self.attention,)
            pack_norm(self.attention_norm, *both)
            pack_norm(self.mlp_norm, self.mlp)

    @property
    def leaves_branch(self) -> bool:
        """Whether the layer takes a branch to add, and may leave its last one to the next. A subclass must say so."""
        return type(self).forward is Layer.forward

    def forward(
        self, x_sbh: Tensor, context: ForwardContext, branch_sbh: Tensor | None = None, *, adds: bool = True
    ) -> Any:
        """Return the hidden states after the layer, [s, b, h], from those before it: x, or x + branch.

        Without `adds` return the two summands h and mlp(norm(h)). The norm of the next layer adds them in its kernel.
        """
        if self.attention is not None:
            normed_sbh, x_sbh = add_and_norm(self.attention_norm, x_sbh, branch_sbh)
            branch_sbh = self._scaled(self.attention_output_norm(self.attention(normed_sbh, context)))
            if self.mlp is None:
                return x_sbh + branch_sbh if adds else (x_sbh, branch_sbh)
            if self.parallel == "no":
                del normed_sbh  # its memory is free during the MLP
        assert self.mlp is not None, "a layer has one of them"
        if self.parallel == "no":
            normed_sbh, h_sbh = add_and_norm(self.mlp_norm, x_sbh, branch_sbh)
        else:
            if self.parallel == "two_norms":
                normed_sbh, _ = add_and_norm(self.mlp_norm, x_sbh)
            assert branch_sbh is not None, "parallel branches are two"
            h_sbh = x_sbh + branch_sbh
        del branch_sbh
        mlp_sbh = self._scaled(self.mlp_output_norm(self.mlp(normed_sbh, context)))
        return h_sbh + mlp_sbh if adds else (h_sbh, mlp_sbh)

    def _scaled(self, branch_sbh: Tensor) -> Tensor:
        """Return the output of a branch, times the layer's multiplier."""
        return branch_sbh if self.multiplier == 1.0 else branch_sbh * self.multiplier
