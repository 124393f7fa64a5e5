"""The gated MLP of a layer, and of a mixture's shared expert."""

from megapar_kernels.activations import geglu, reglu_squared, swiglu
from torch import Tensor, nn

from megapar.config.options import ModelConfig
from megapar.tensor_parallel.layers import Columns
from megapar_models.factory import Factory
from megapar_models.forward import ForwardContext
from megapar_models.layer_kind import LayerKind

# The gated activation of each `hidden_act`: SwiGLU and GeGLU (Shazeer, arXiv 2002.05202), and gated squared ReLU (So et
# al., arXiv 2109.08668). The names are Hugging Face's, except "auto": the activation of Llama.
GATED = {"auto": swiglu, "silu": swiglu, "gelu_pytorch_tanh": geglu, "relu2": reglu_squared}


class GatedMLP(nn.Module):
    """down(act(gate x) * up x), with gate and up [width, h] in one matrix.

    tp cuts gate and up by their output dimension, and down by its input dimension. `name` is the prefix of the weights'
    names, such as layers.3.mlp. `activation` is a key of GATED.
    """

    def __init__(self, name: str, hidden_size: int, width: int, activation: str, factory: Factory):
        super().__init__()
        tp = factory.sharding.tp
        self.activation = GATED[activation]
        self.impl = factory.kernels.activation
        columns = [Columns.even(f"{name}.gate", width, tp), Columns.even(f"{name}.up", width, tp)]
        self.gate_up = factory.column_parallel(hidden_size, columns)
        self.down = factory.row_parallel(f"{name}.down", width, hidden_size)

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        return self.down(self.activation(self.gate_up(x_sbh), self.impl))


class DenseMLP(GatedMLP):
    """The gated MLP of layer `number`, of width model.intermediate_size."""

    def __init__(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__(f"layers.{number}.mlp", model.hidden_size, model.intermediate_size, model.hidden_act, factory)
