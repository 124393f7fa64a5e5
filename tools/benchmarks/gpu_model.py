"""A model of one GPU's time and memory in training: what benchmarks/gpu.py prints beside every measured figure.

Pure arithmetic for the Llama family without biases in bf16, with the fused kernels of kernels/megapar_kernels and one
process. Symbols: T tokens of a micro-batch, s sequence, h hidden, L layers, n query heads, k key/value heads, d width
of a head, f width of the MLP, V vocabulary, P parameters.

Time is work divided by the rate that such work reaches (`Machine`); launches, Python and idle time are not in it.

- Matrix products: 6 T (matrices + h V) FLOPs (forward 2, backward 4: Kaplan et al., arXiv 2001.08361, section 2.1).
- Attention, causal, half of the scores: forward 2 s n d FLOPs a token and layer, backward 2.5 times that, for it
  computes five matrix products where forward has two (Dao, arXiv 2307.08691, section 3.1.2 and 4.1).
- All other kernels move bytes. The counts below are the least that each can move, of bf16 elements, forward plus
  backward; the docstrings of kernels/megapar_kernels state them.

Memory is counted in bytes: 18 a parameter (2 weight, 4 gradient, 4 main weight, 8 moments), what autograd keeps for the
backward pass, and the largest temporary tensors beside it. Computing logits in chunks costs two more FLOPs a weight of
the head; what it moves (the fp32 gradient of the head, once a chunk) is hidden by them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megapar_models.llama.family import LLAMA
from megapar_models.registry import find

from megapar.config.options import ModelConfig

Recompute = Literal["none", "selective", "full"]

STATE_BYTES = 18  # a parameter: bf16 weight 2, fp32 gradient 4, main weight 4, two moments 8
DECAY_UNIT = 64  # parameters that share a byte which says whether they decay (megapar_kernels.adamw.UNIT)
OFF = 0.15  # a measured figure that differs from its prediction by more is marked

# Bytes an element of [T, h] and layer: (forward, backward).
NORM_BYTES = 4 + 8, 6 + 8  # RMSNorm, and RMSNorm with the residual's addition
RESIDUAL_BYTES = 6, 6  # the addition at the layer's end; backward: the sum of the two branches' gradients
# Bytes an element of [T, f] and layer.
ACTIVATION_BYTES = 6, 10
# Bytes an element of [T, (n + 2 k) d] and layer: one op splits and rotates, and writes one gradient of q, k and v.
ROPE_BYTES = 4, 4
# Bytes a logit.
STATISTICS_BYTES = 2
LOGIT_GRADIENT_BYTES = 4
# Bytes a parameter and step.
ADAMW_BYTES = 30
SQUARE_SUM_BYTES = 4

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
    memory_bytes: int = 143_771 * 2**20
    """All memory of the device, as nvidia-smi states it."""
    reserve_bytes: int = 2**30
    """What the tensors cannot have: CUDA's context, cuBLAS's and cuDNN's workspaces, fragments."""


H200 = Machine()


@dataclass(frozen=True)
class Job:
    """What one GPU trains. `micro_batches` are those of a step; `loss_chunk` as kernels.loss_chunk (0: all tokens)."""

    model: ModelConfig
    micro_batch_size: int
    seq_length: int
    micro_batches: int = 8
    recompute: Recompute = "none"
    loss_chunk: int = 0

    def __post_init__(self) -> None:
        model = self.model
        if find(model.family) is not LLAMA or model.attention_bias or model.qk_norm:
            raise ValueError("the model of time and memory knows Llama without biases and without q/k norm alone")

    @property
    def tokens(self) -> int:
        """Of a micro-batch: T."""
        return self.micro_batch_size * self.seq_length

    @property
    def query_width(self) -> int:
        """n d"""
        model = self.model
        return model.num_attention_heads * (model.head_dim or model.hidden_size // model.num_attention_heads)

    @property
    def key_width(self) -> int:
        """k d"""
        model = self.model
        groups = model.num_attention_heads // (model.num_key_value_heads or model.num_attention_heads)
        return self.query_width // groups

    @property
    def head_dim(self) -> int:
        return self.query_width // self.model.num_attention_heads

    @property
    def intermediate_size(self) -> int:
        return self.model.intermediate_size or 4 * self.model.hidden_size

    @property
    def chunked(self) -> bool:
        """Whether logits are computed chunk by chunk, twice."""
        return 0 < self.loss_chunk < self.tokens

    @property
    def layer_matrices(self) -> int:
        """Weights of one layer's matrices: q, k, v, o, gate, up, down."""
        attention = 2 * self.query_width + 2 * self.key_width
        return self.model.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def head_matrix(self) -> int:
        return self.model.hidden_size * self.model.vocab_size

    @property
    def parameters(self) -> int:
        """P: matrices, two norms a layer, the last norm, the vocabulary's one or two matrices."""
        model = self.model
        norms = (2 * model.num_hidden_layers + 1) * model.hidden_size
        vocabulary = (1 if model.tie_word_embeddings else 2) * self.head_matrix
        return model.num_hidden_layers * self.layer_matrices + norms + vocabulary

    @property
    def flops(self) -> float:
        """Of a micro-batch as MFU counts them (megapar_models.counts): nothing that is recomputed."""
        layers = self.model.num_hidden_layers
        matrices = layers * self.layer_matrices + self.head_matrix
        return 6.0 * self.tokens * (matrices + layers * self.seq_length * self.query_width)


@dataclass(frozen=True)
class Prediction:
    """`ms` of a micro-batch and `bytes` at the peak, both by part. A step's own work is shared among its
    micro-batches."""

    job: Job
    ms: Mapping[str, float]
    bytes: Mapping[str, int]
    machine: Machine

    @property
    def total_ms(self) -> float:
        return math.fsum(self.ms.values())

    @property
    def tokens_per_second(self) -> float:
        return self.job.tokens / self.total_ms * 1e3

    @property
    def mfu(self) -> float:
        return self.job.flops / self.total_ms * 1e3 / (self.machine.peak_tflops * 1e12)

    @property
    def peak_bytes(self) -> int:
        return sum(self.bytes.values())

    @property
    def spare_bytes(self) -> int:
        """What is left of the device's memory; negative: what is missing."""
        return self.machine.memory_bytes - self.machine.reserve_bytes - self.peak_bytes

    def by_category(self) -> dict[str, float]:
        """Milliseconds of a micro-batch by the category of `CATEGORIES`."""
        return {name: sum(self.ms[part] for part in parts) for name, parts in CATEGORIES.items()}


def predict(job: Job, machine: Machine = H200) -> Prediction:
    """Time and memory of megapar with its fused kernels."""
    return Prediction(job, _milliseconds(job, machine), _peak_bytes(job), machine)


def _milliseconds(job: Job, machine: Machine) -> dict[str, float]:
    """Of a micro-batch, by part. Heads up to 64 wide reach attention's rates at 64, wider ones those at 128."""
    model = job.model
    tokens = job.tokens
    layers = job.model.num_hidden_layers
    recomputed = job.recompute == "full"
    attention_again = recomputed or job.recompute == "selective"
    # FLOPs of the layers' matrices: forward 2, backward 4, forward again 2; of the head's likewise.
    matrices = tokens * layers * job.layer_matrices * (8 if recomputed else 6)
    head = tokens * job.head_matrix * (8 if job.chunked else 6)
    scores = 2.0 * tokens * job.seq_length * job.query_width * layers
    forward_tflops, backward_tflops = machine.attention_tflops[64 if job.head_dim <= 64 else 128]
    step = job.parameters / job.micro_batches

    def compute(flops: float, tflops: float) -> float:
        return flops / tflops / 1e9

    def move(bytes_: float) -> float:
        return bytes_ / machine.kernel_tb_per_second / 1e9

    def twice(forward: int, backward: int) -> int:
        """Bytes of an element; forward counts twice where layers are recomputed."""
        return forward * (2 if recomputed else 1) + backward

    wide = layers * tokens * model.hidden_size
    narrow = layers * tokens * job.intermediate_size
    rope_bytes = twice(*ROPE_BYTES) + (ROPE_BYTES[0] if job.recompute == "selective" else 0)
    logit_bytes = STATISTICS_BYTES + LOGIT_GRADIENT_BYTES
    return {
        "matrix products": compute(matrices + head, machine.matrix_tflops),
        "attention forward": compute(scores * (2 if attention_again else 1), forward_tflops),
        "attention backward": compute(2.5 * scores, backward_tflops),
        "norms": move(wide * twice(*NORM_BYTES)),
        "residual": move(wide * twice(*RESIDUAL_BYTES)),
        "activation": move(narrow * twice(*ACTIVATION_BYTES)),
        "rope": move(layers * tokens * (job.query_width + 2 * job.key_width) * rope_bytes),
        "cross entropy": move(tokens * model.vocab_size * logit_bytes),
        "optimizer and norm": move(step * (ADAMW_BYTES + SQUARE_SUM_BYTES)),
    }


def kept_layer_bytes(job: Job) -> int:
    """What autograd keeps of one layer that is not recomputed. Elements are bf16, statistics fp32.

    The layer's input, its norm, rotated q and k and a copy of v, attention's result, the sum with the residual, its
    norm, gate and up, their product. Under selective recomputation the projection stays in place of q, k and v, and has
    their size.
    """
    hidden = job.model.hidden_size
    query = job.query_width
    elements = 2 * hidden + (query + 2 * job.key_width) + query + 2 * hidden + 3 * job.intermediate_size
    norm_statistics = 2 * 4
    log_sum_exp = 4 * job.model.num_attention_heads
    if job.recompute == "selective":
        log_sum_exp = 0  # computed again
    return job.tokens * (2 * elements + norm_statistics + log_sum_exp)


def kept_bytes(job: Job) -> dict[str, int]:
    """What autograd keeps of one micro-batch between forward and backward, the batch itself and parameters not counted.

    With full recompute a layer keeps its input alone. The cross entropy keeps the logits, in whose place it later
    writes their gradient; chunk by chunk it keeps none.
    """
    model = job.model
    tokens = job.tokens
    hidden = job.model.hidden_size
    layer = 2 * tokens * hidden if job.recompute == "full" else kept_layer_bytes(job)
    tables = 2 * 4 * job.seq_length * job.head_dim  # cos and sin, fp32
    looked_up = tokens * 8  # ids
    last_norm = tokens * (2 * 2 * hidden + 4)  # its input, its result, its statistics
    padded = -(-model.vocab_size // 128) * 128
    logits = 0 if job.chunked else 2 * tokens * padded
    token_statistics = tokens * (16 + 4)  # four numbers a token in one tensor, and the highest logit
    return {
        "layers": model.num_hidden_layers * layer,
        "last norm": last_norm,
        "logits": logits,
        "rope tables": tables,
        "a token's numbers": looked_up + token_statistics,
    }


def _peak_bytes(job: Job) -> dict[str, int]:
    """The larger of two moments: the head's backward, when everything is kept, and the last layer's, when the logits
    are gone and the gradients of gate, up and the residual stream are there."""
    tokens = job.tokens
    hidden = job.model.hidden_size
    kept = kept_bytes(job)
    chunk = 2 * job.loss_chunk * job.model.vocab_size if job.chunked else 0
    at_head = kept["last norm"] + kept["logits"] + chunk + 2 * tokens * hidden  # with the gradient of the head's input
    again = kept_layer_bytes(job) if job.recompute == "full" else 0
    at_layer = again + 2 * tokens * (2 * job.intermediate_size + 2 * hidden)
    return {
        "weights, gradients, optimizer": STATE_BYTES * job.parameters + job.parameters // DECAY_UNIT,
        "kept by layers": kept["layers"],
        "logits or the last layer's gradients": max(at_head, at_layer),
        "other": kept["rope tables"] + kept["a token's numbers"],
    }


def plain_peak_bytes(job: Job) -> int:
    """Of the same training in torch's own eager ops (gpu_contenders.MixedPrecision), about.

    18 bytes a parameter there too. A layer keeps input and norm twice, rotated q and k, v, attention's result, gate,
    its sigmoid product, up and the product. The loss takes fp32 logits: log-softmax, the gradient of its result and its
    own gradient are 12 bytes a logit.
    """
    tokens = job.tokens
    hidden = job.model.hidden_size
    narrow = job.intermediate_size
    layer = 2 * tokens * (4 * hidden + 2 * job.query_width + 2 * job.key_width + 4 * narrow)
    layers = job.model.num_hidden_layers
    kept = 2 * tokens * hidden * layers if job.recompute == "full" else layers * layer
    again = layer if job.recompute == "full" else 0
    return STATE_BYTES * job.parameters + kept + max(12 * tokens * job.model.vocab_size, again)
