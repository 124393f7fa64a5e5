"""A model of one GPU's time in training: what benchmarks/gpu.py prints beside every measured figure.

Pure arithmetic for the Llama family without biases in bf16, with the fused kernels of kernels/megapar_kernels and one
process. Symbols: T tokens of a micro-batch, s sequence, h hidden, L layers, n query heads, k key/value heads, d width
of a head, f width of the MLP, V vocabulary, P parameters.

Time is work divided by the rate reached by such work (`Machine`); launches, Python and idle time are not in it.

- Matrix products: 6 T (matrices + h V) FLOPs (forward 2, backward 4: Kaplan et al., arXiv 2001.08361, section 2.1).
- Attention, causal, half of the scores: forward 2 s n d FLOPs a token and layer, backward 2.5 times as many, for it
  computes five matrix products instead of two (Dao, arXiv 2307.08691, section 3.1.2 and 4.1).
- All other kernels move bytes. The counts below are the least possible ones, of bf16 elements, forward plus backward;
  the docstrings of kernels/megapar_kernels state them.

Computing logits in chunks costs two more FLOPs a weight of the head; its traffic (the fp32 gradient of the head, once a
chunk) is hidden by them. Memory is predicted by the plan of --dry_run (megapar.plan.dry_run).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from megapar_models.counts import WholeModel

from megapar.config.derive import num_microbatches
from megapar.config.options import Config

OFF = 0.15  # a measured figure that differs from its prediction by more is marked

# Bytes an element of [T, h] and layer: (forward, backward).
NORM_BYTES = 4 + 8, 6 + 8  # RMSNorm, and RMSNorm with the residual's addition
RESIDUAL_BYTES = 6, 6  # the addition at the layer's end; backward: the sum of the two branches' gradients
# Bytes an element of [T, f] and layer.
ACTIVATION_BYTES = 6, 10
# Bytes an element of [T, (n + 2 k) d] and layer: one op splits and rotates, and writes one gradient of q, k and v.
ROPE_BYTES = 4, 4
# Bytes a logit: the statistics, and the gradient that is written in the logits' place.
LOGIT_BYTES = 2 + 4
# Bytes a parameter and step: AdamW, and the sum of squares of its gradient.
STEP_BYTES = 30 + 4

# The parts of the time, by what the kernels that take it are called in a profile.
CATEGORIES: dict[str, tuple[str, ...]] = {
    "matrix products": ("matrix products",),
    "attention": ("attention forward", "attention backward"),
    "norms": ("norms",),
    "activation": ("activation",),
    "rope": ("rope",),
    "cross entropy": ("cross entropy",),
    "optimizer and norm": ("optimizer and norm",),
    "copies and other": ("residual",),
}


@dataclass(frozen=True)
class Machine:
    """What a GPU reaches. The defaults are an H200's: rates reached, and its dense bf16 peak by the data sheet."""

    matrix_tflops: float = 700.0
    """Of the matrix products of training; 8192^3 alone reaches 770 to 798."""
    kernel_tb_per_second: float = 4.0
    """Of our kernels, read plus written; torch's copy reaches 4.3."""
    attention_tflops: Mapping[int, tuple[float, float]] = field(
        default_factory=lambda: {64: (420.0, 300.0), 128: (560.0, 430.0)}
    )
    """cuDNN's forward and backward at the head widths 64 and 128, causal, half of the scores counted."""
    peak_tflops: float = 989.0
    """What MFU is a share of."""


H200 = Machine()


@dataclass(frozen=True)
class Prediction:
    """`ms` of a micro-batch by part. A step's own work is shared among its micro-batches."""

    config: Config
    ms: Mapping[str, float]
    machine: Machine

    @property
    def total_ms(self) -> float:
        return math.fsum(self.ms.values())

    @property
    def tokens_per_second(self) -> float:
        return self.config.train.micro_batch_size * self.config.train.seq_length / self.total_ms * 1e3

    @property
    def mfu(self) -> float:
        flops = WholeModel(self.config.model).flops_per_token(self.config.train.seq_length)
        return flops * self.tokens_per_second / (self.machine.peak_tflops * 1e12)

    def by_category(self) -> dict[str, float]:
        """Milliseconds of a micro-batch by the category of `CATEGORIES`."""
        return {name: sum(self.ms[part] for part in parts) for name, parts in CATEGORIES.items()}


def predict(config: Config, machine: Machine = H200) -> Prediction:
    """Time of megapar with its fused kernels. Heads up to 64 wide reach attention's rates at 64, wider ones at 128."""
    model = config.model
    train = config.train
    tokens = train.micro_batch_size * train.seq_length
    layers = model.num_hidden_layers
    query = model.num_attention_heads * model.head_dim
    key = model.num_key_value_heads * model.head_dim
    recomputed = train.recompute == "full"
    attention_again = train.recompute in ("selective", "full")
    chunked = 0 < config.kernels.loss_chunk < tokens
    # FLOPs of the layers' matrices: forward 2, backward 4, forward again 2; of the head's likewise.
    layer_matrices = model.hidden_size * (2 * query + 2 * key + 3 * model.intermediate_size)
    matrices = tokens * layers * layer_matrices * (8 if recomputed else 6)
    head = tokens * model.hidden_size * model.vocab_size * (8 if chunked else 6)
    scores = 2.0 * tokens * train.seq_length * query * layers
    forward_tflops, backward_tflops = machine.attention_tflops[64 if model.head_dim <= 64 else 128]
    step = WholeModel(model).parameters() / num_microbatches(config)

    def compute(flops: float, tflops: float) -> float:
        return flops / tflops / 1e9

    def move(bytes_: float) -> float:
        return bytes_ / machine.kernel_tb_per_second / 1e9

    def twice(forward: int, backward: int) -> int:
        """Bytes of an element; forward counts twice if layers are recomputed."""
        return forward * (2 if recomputed else 1) + backward

    wide = layers * tokens * model.hidden_size
    rope_bytes = twice(*ROPE_BYTES) + (ROPE_BYTES[0] if train.recompute == "selective" else 0)
    ms = {
        "matrix products": compute(matrices + head, machine.matrix_tflops),
        "attention forward": compute(scores * (2 if attention_again else 1), forward_tflops),
        "attention backward": compute(2.5 * scores, backward_tflops),
        "norms": move(wide * twice(*NORM_BYTES)),
        "residual": move(wide * twice(*RESIDUAL_BYTES)),
        "activation": move(layers * tokens * model.intermediate_size * twice(*ACTIVATION_BYTES)),
        "rope": move(layers * tokens * (query + 2 * key) * rope_bytes),
        "cross entropy": move(tokens * model.vocab_size * LOGIT_BYTES),
        "optimizer and norm": move(step * STEP_BYTES),
    }
    return Prediction(config, ms, machine)
