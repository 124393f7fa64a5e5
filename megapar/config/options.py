"""The options of a run, as dataclasses. `--help` prints the sentence under each field.

files.py fills the dataclasses from TOML files and flags. validate.py says which configurations cannot run. Neither
imports torch. In TOML, in flags and in messages an option is named by its dotted path, such as `model.hidden_size`.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_type_hints

from megapar.base.precision import Precision
from megapar.config.model_options import ModelConfig


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks and layers are laid out."""

    tp: int = 1
    """Tensor-parallel ranks: each holds a slice of every matrix. Keep them inside a node."""
    pp: int = 1
    """Pipeline-parallel ranks: each holds vpp stages. A stage is a run of consecutive layers."""
    dp: int = 0
    """Data-parallel replicas; 0 means the world size divided by tp * cp * pp."""
    cp: int = 1
    """Context-parallel ranks: each holds a part of every sample's positions. train.seq_length must be a multiple of
    2 * cp."""
    cp_attention: Literal["gather", "ring", "ulysses"] = "gather"
    """How attention sees the positions of other cp ranks. gather: all keys and values of a layer are gathered. ring:
    they are passed from rank to rank. ulysses: ranks exchange positions for heads; the query heads of a tp rank must be
    a multiple of cp."""
    ep: int = 1
    """Expert-parallel ranks: each holds some of the experts. They are the ranks of tp, cp and dp, not further ones."""
    etp: int = 0
    """Expert-tensor-parallel ranks: they share an expert, and each holds a slice of it; 0 means tp. tp * cp * dp must
    be a multiple of ep * etp."""
    vpp: int = 0
    """Pipeline stages on each rank; 0 means 2 for interleaved, zb-interleaved, zb-v, v-half, v-min and dualpipe-v, else
    1."""
    schedule: str = "1f1b"
    """Order of forwards and backwards: 1f1b, interleaved, gpipe, breadth, zb-h1, zb-2p, zb-interleaved, zb-v, v-half,
    v-min, dualpipe-v (docs/strategies.md compares them). auto measures layers, and takes the schedule with the shortest
    step. FILE.txt and FILE.csv hold a schedule. MODULE:NAME is one of your own, a
    megapar.pipeline.schedules.Schedule."""
    schedule_memory_gb: float = 0.0
    """GiB that a rank may keep for its backward passes; 0: as many micro-batches as docs/strategies.md says of the
    schedule, for most as many as 1f1b."""
    schedule_costs: tuple[float, ...] = ()
    """Times of the forward, of the gradient of inputs and of the gradients of weights, in any unit, that zero-bubble
    schedules are made for, such as 1 1.3 0.7; empty: not known. With schedule auto they are measured, and kept in the
    run folder's config.toml."""
    sequence_parallel: bool = False
    """Split the activations between matrices, such as those of norms, over tp along the sequence. train.seq_length must
    be a multiple of tp, and with cp of cp * tp."""
    tp_overlap_chunks: int = 1
    """Cut the tokens of a linear layer into so many chunks, and exchange one over tp while another is computed; 1: do
    not cut; 0: pretrain.py takes the number, at most 8, with the shortest step predicted for the machine of --gpu."""
    tp_symmetric_memory: bool = False
    """With sequence_parallel, on the GPUs of one node: gather and sum activations over tp by copies from the memory of
    other GPUs, without a kernel of NCCL beside the products. Takes memory for the largest of these tensors."""
    ep_overlap_chunks: int = 1
    """Cut the experts of a rank into so many chunks, and exchange the rows of one over ep while those of another are
    computed; 1: do not cut; 0: pretrain.py takes the number with the shortest step predicted for the machine of
    --gpu, of 1 to 8 and one for each expert."""
    partition: tuple[int, ...] = ()
    """Number of layers of each of the pp * vpp stages, such as 3 4 4 2; empty: stages get equal costs, as far as
    possible. The embedding and the head count too."""
    balance: Literal["flops", "measured"] = "flops"
    """What an empty partition takes as the cost of a layer. flops: computed operations. measured: seconds, measured at
    the first start and kept in the run folder's config.toml."""
    order: str = "tp-cp-dp-pp"
    """Order of the axes in the numbers of ranks, the one of neighboring ranks first, such as dp-tp-cp-pp."""


BY_LAYER: tuple[Literal["all_but_attention", "full"], ...] = ("all_but_attention", "full")
"""The values of train.recompute that recompute whole layers (train.recompute_layers)."""


@dataclass(frozen=True)
class TrainConfig:
    """The run: number of steps, batch sizes, precision, evaluation."""

    steps: int = 100
    """Optimizer steps."""
    global_batch_size: int = 8
    """Samples of a step over all ranks; a multiple of micro_batch_size. The replicas of dp may have different numbers
    of them."""
    batch_ramp: tuple[int, ...] = ()
    """START INCREMENT SAMPLES: the global batch begins at START, and grows by INCREMENT up to global_batch_size during
    the first SAMPLES samples, at equal distances. As Megatron-LM's --rampup-batch-size."""
    micro_batch_size: int = 1
    """Samples that one forward pass holds on one data-parallel rank."""
    seq_length: int = 128
    """Tokens of a sample: the length of a sequence."""
    seed: int = 1234
    """Decides initial weights, dropout and sample order; no layout changes them."""
    precision: Precision = "fp32"
    """Dtype of weights and activations. Gradients and main weights are fp32 in any case. fp16 has a dynamic loss
    scale."""
    fp8: str = "none"
    """blocks: matrices of layers are multiplied in FP8 (e4m3), with scales that are powers of two: of 1 x 128 for
    activations and gradients, 128 x 128 for weights. Equal inputs have equal codes in every layout. It needs precision
    bf16 or fp32; head, embedding, norms, routers and adapters stay in it. none: nothing is."""
    fp8_skip: tuple[str, ...] = ()
    """What stays out of FP8: numbers of layers (-1: the last), and patterns of matrices, such as 0 -1 *.mlp.down."""
    recompute: Literal["none", "selective", "light", "all_but_attention", "full"] = "none"
    """Activation checkpointing. selective: the backward pass recomputes the core of attention, from queries, keys and
    values to its output. light: it recomputes norms, activations of MLPs and copies of rows for experts, but no product
    and no communication. full: it recomputes whole layers. all_but_attention: whole layers but for core attention."""
    recompute_layers: tuple[str, ...] = ()
    """With recompute full or all_but_attention: the layers that are recomputed, in order, such as 0-9 16, or ::2 for
    every second; empty: all. The others keep their activations."""
    offload: float = 0.0
    """Share of the recomputed layers, 0 to 1, whose inputs are in host memory from the forward pass of a micro-batch to
    its backward pass. It needs recompute full or all_but_attention."""
    memory_gb: float = 0.0
    """GiB that a rank may need by plan. Of what saves memory (recompute, its layers by pipeline stage, offload,
    optimizer.offload), the fastest that fits is taken, by the model of --gpu, and kept in config.toml; what is set
    stays. 0: nothing is chosen."""
    eval_every: int = 0
    """Steps between evaluations on data.validation; 0 evaluates after the last step only."""
    eval_samples: int = 64
    """Samples of each validation set that an evaluation reads; all, if the set has fewer."""
    eval_weights: Literal["trained", "average"] = "trained"
    """Weights that evaluations use: those trained, or their average (optimizer.ema)."""
    objective: str = "cross_entropy"
    """What the steps minimize. cross_entropy: that of the next tokens. dpo, dpo_norm (by length), ipo: preferences of
    pairs of answers, beside a reference model. reward: a reward model of such pairs, with model.head score. MODULE:NAME
    is one of your own, a megapar_models.objectives.Objective."""
    beta: float = 0.1
    """dpo, dpo_norm, ipo: how strongly the model is held to its reference. DPO's rewards are log-ratios times it."""
    references: Literal["stored", "adapters_off"] = "stored"
    """dpo, dpo_norm, ipo: what says the log-probabilities by the reference model. stored: a column beside the pairs,
    which megapar score writes. adapters_off: the frozen base of the adapters, in one further forward pass a step."""
    label_smoothing: float = 0.0
    """dpo: the share of pairs thought to have the wrong answer chosen, below 0.5 (robust DPO, arXiv 2403.00409)."""
    z_loss: float = 0.0
    """Weight of log(sum exp(logits))^2 in the loss. It keeps logits small (PaLM, arXiv 2204.02311, uses 1e-4)."""
    loss_mean: Literal["token", "sample"] = "token"
    """What the loss of conversations is the mean of: trained tokens, or conversations. With sample each conversation
    counts alike, however many of its tokens are trained."""
    trainable: tuple[str, ...] = ()
    """Patterns of the names of parameters that are trained, such as layers.1?.mlp.*; the others are frozen. Empty: all
    are trained, and with adapter.rank the adapters alone, or with the head of model.head score."""
    memory_report: bool = False
    """Count the bytes that the second step holds, by kind, print them beside those of the plan, and write
    memory.json. Of a mixture write expert_rows too: how often each rank chose each expert in this step."""
    deterministic: bool = False
    """Ask torch for deterministic kernels on GPUs (slower); on a CPU runs repeat bitwise anyhow."""

    def batch_size(self, consumed_samples: int) -> int:
        """Number of samples of the step that starts after `consumed_samples` samples.

        It grows as with Megatron's --rampup-batch-size.
        """
        if not self.batch_ramp:
            return self.global_batch_size
        first, increment, samples = self.batch_ramp
        # How many increments have been reached. Multiply first: a quotient rounded down would delay the growth.
        grown = consumed_samples * ((self.global_batch_size - first) // increment) // samples
        return min(first + grown * increment, self.global_batch_size)

    def samples(self, step: int = 0, consumed: int = 0) -> int:
        """Number of samples of the whole run, the first `step` steps of which took `consumed` samples."""
        left = max(self.steps - step, 0)
        # Only the steps of the ramp are walked through. The batch size never changes after it.
        while left:
            size = self.batch_size(consumed)
            if size == self.global_batch_size:
                break
            consumed += size
            left -= 1
        return consumed + left * self.global_batch_size


@dataclass(frozen=True)
class AdapterConfig:
    """Low-rank adapters (LoRA, arXiv 2106.09685). The weights of the model are frozen, and a product of two small
    matrices is added to each: y = W x + s B A x. docs/adapters.md shows them."""

    rank: int = 0
    """Rows of A and columns of B; 0: no adapter."""
    alpha: float = 0.0
    """s is alpha / rank; 0 means rank, and so s = 1."""
    targets: tuple[str, ...] = ()
    """Matrices with an adapter, by the last word of their names, such as q k v o gate up down, or by patterns of whole
    names, such as layers.1?.attention.*; empty: all matrices of the layers, without those of routers."""
    rslora: bool = False
    """s is alpha / sqrt(rank) (arXiv 2312.03732)."""
    dropout: float = 0.0
    """Probability with which an input of A is dropped in training. Adapters of experts take none."""
    dora: bool = False
    """Train the norms of the rows of W + s B A too (DoRA, arXiv 2402.09353). Without dropout, and not of experts."""
    init_from: str = "none"
    """Folder of a checkpoint of adapters on the same base. If nothing is resumed, the run starts from them, at step 0
    and with a new optimizer state. megapar convert peft-to-native makes one of PEFT's files."""

    @property
    def scale(self) -> float:
        """s, by which B A x is multiplied."""
        divisor = math.sqrt(self.rank) if self.rslora else self.rank
        return (self.alpha or self.rank) / divisor

    def is_target(self, matrix: str) -> bool:
        """Whether the matrix of this name, such as layers.3.attention.q, has an adapter if there are any."""
        return not self.targets or any(_names(target, matrix) for target in self.targets)

    def unmatched(self, matrices: Collection[str]) -> list[str]:
        """The targets that name none of these matrices."""
        return [target for target in self.targets if not any(_names(target, matrix) for matrix in matrices)]


def _names(target: str, matrix: str) -> bool:
    return matrix.rpartition(".")[2] == target or fnmatchcase(matrix, target)


NO_ADAPTER = AdapterConfig()
ADAPTERS = "*.lora_*"
"""The pattern of train.trainable that names the factors of all adapters."""
SCORE = "score.weight"
"""The matrix of a head with model.head score."""


OPTIMIZER_NAMES = ("adamw", "muon", "lion", "sgd")
"""The keys of `megapar.optimizer.table.OPTIMIZERS`."""


Length = int | str
"""A number of steps, or a text such as 2000 samples or 3e9 tokens (megapar/config/lengths.py)."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate."""

    name: str = "adamw"
    """adamw (arXiv 1711.05101); muon (arXiv 2502.16982) for the matrices of attention, MLPs and experts, and adamw for
    the rest; lion (arXiv 2302.06675); sgd with momentum; or MODULE:NAME for one of your own."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of cosine, linear and wsd decay; inverse_sqrt does not fall below it."""
    schedule: str = "cosine"
    """Shape after warm-up: cosine, linear, constant, inverse_sqrt; wsd (warm-up, stable, decay) holds lr and decays
    linearly over the last decay_steps; or MODULE:NAME for one of your own (megapar.config.rate_schedules)."""
    warmup_steps: Length = 0
    """Steps of linear warm-up from 0 to lr. '2000 samples' or '3e9 tokens' count what the run has consumed, as
    Megatron-LM does: with a train.batch_ramp early steps then move the rate less."""
    decay_steps: Length = 0
    """cosine, linear: length of the decay after warm-up; 0 means to the end of train.steps. A run that stops before, or
    goes on after it at min_lr, keeps its schedule. wsd: length of the final decay; 0 means a tenth of train.steps. In
    steps, or as optimizer.warmup_steps in samples or tokens."""
    betas: tuple[float, float] = (0.9, 0.95)
    """adamw: decay of the first and second moments. lion: weights of the momentum in a step, and in the next
    momentum."""
    eps: float = 1e-8
    """adamw: added to the square root of the second moment."""
    momentum: float = 0.95
    """muon, sgd: factor of the momentum before a gradient is added to it."""
    nesterov: bool = True
    """muon, sgd: look ahead, and step by the gradient and the momentum with it."""
    muon_scale: Literal["adam_rms", "spectral", "keller"] = "adam_rms"
    """muon: factor of the orthogonal matrix. adam_rms: 0.2 sqrt(max(rows, columns)), with which rate and decay of AdamW
    fit. spectral: sqrt(rows / columns). keller: sqrt(max(1, rows / columns))."""
    muon_per_head: bool = False
    """muon: make the rows of each attention head of queries, keys and values orthogonal apart, as a matrix of their
    own. Norm and factor are then those of a head."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and embeddings. Weights of norms and biases never decay."""
    groups: tuple[str, ...] = ()
    """Factors of learning rate and weight decay by the names of tensors, such as *.experts.*:lr=0.5,decay=0 or
    embedding.*:lr=0.1. The first pattern that matches decides."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Dtype of AdamW's moments. bf16 takes 4 bytes a parameter fewer. Updates compute in fp32, and round stochastically
    with the same random bits in every layout."""
    main_weights: Literal["fp32", "remainder"] = "fp32"
    """How AdamW keeps the fp32 weights of a bf16 model. remainder: as the bf16 weights and the 16 bits that they lack.
    This is exact, and takes 2 bytes a parameter fewer. A weight halfway between two bf16 numbers is then rounded away
    from zero, not to even."""
    clip_grad: float = 1.0
    """Largest norm of the whole gradient. A larger gradient is scaled down to it. 0 never clips."""
    qk_clip: float = 0.0
    """Largest attention logit: after an update, queries and keys of heads that had a larger one in the step are scaled
    down (MuonClip, arXiv 2507.20534, takes 100). 0 never scales, and measures no logits."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What is sharded over the ranks of dp x cp (ZeRO, arXiv 1910.02054). 0: nothing. 1: optimizer state (ZeRO-1). 2:
    gradients too, which are reduced layer by layer in every micro-batch. 3: weights too, which are gathered layer by
    layer for their use."""
    shard_ranks: int = 0
    """Shard over groups of so many neighboring ranks of dp x cp, and keep a copy in each group; 0: shard over all of
    dp x cp. If a group is a node, weights are gathered inside nodes only. An expert that fewer ranks hold is sharded
    over all of them."""
    bucket_mb: float = 0.0
    """MiB of gradients that are reduced together, in one bucket; 0: 4 for each rank of dp x cp, and at least 64. With
    zero_stage 2 and 3 it must be 0: a bucket is then the gradients of a layer."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which ranks send gradients that are summed over dp x cp. bf16 sends half the bytes, and rounds each
    rank's part once. Gradients of micro-batches are added, and parts of ranks are summed, in fp32 in any case. bf16
    needs zero_stage 1 or more."""
    offload: float = 0.0
    """Share of the optimizer's main weights and moments in host memory, from 0 to 1. The CPU updates them, piece by
    piece, while gradients and weights travel. Changes no bit on CPUs."""
    ema: float = 0.0
    """Decay of an average of the weights over the steps, such as 0.999; 0: none. It takes 4 bytes for each parameter,
    in checkpoints too. train.eval_weights evaluates it, and megapar convert average makes a checkpoint of it."""
    overlap_param_gather: bool = False
    """With zero_stage 1 and 2: gather updated weights layer by layer, while the next forward pass runs. Changes no
    bit."""
    overlap_grad_reduce: bool = True
    """Reduce complete buckets during the last backward pass of a step, not after it. With zero_stage 2 and 3: reduce
    the gradients of a layer while those of the next layer are computed. Changes no bit."""


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from. A source is the prefix of a .bin/.idx pair, hf:KIND:FILES for a Hugging Face dataset, or
    synthetic."""

    train: tuple[str, ...] = ("synthetic",)
    """A source; or a blend by weights, such as 0.7:A 0.3:B; or a blend by tokens, such as 2e9tokens:A B, where the run
    takes 2e9 tokens from A and the rest from B."""
    stages: tuple[str, ...] = ()
    """Later weights of the blend, in the order of data.train. 1000000:0.2,0.8 are the weights from sample 1,000,000 of
    the run on."""
    split: tuple[float, ...] = ()
    """Shares of the documents of each source for training, validation and test, such as 969 30 1; empty trains on all.
    A validation set of several sources is their blend, by the weights of data.train."""
    validation: tuple[str, ...] = ()
    """Sources, each a validation set. NAME=SOURCE names it. The set named test is evaluated after the last step
    only."""
    documents: Literal["joined", "apart"] = "joined"
    """apart: the documents of a sample do not attend to each other, positions begin anew in each document, and the
    first token of a document is no target. joined: a sample is read as one document."""
    fim_rate: float = 0.0
    """Share of training documents whose middle is moved to the end, for fill-in-the-middle (arXiv 2207.14255)."""
    fim_tokens: tuple[int, ...] = ()
    """Ids of the three tokens that mark prefix, suffix and middle. Needed with fim_rate."""
    workers: int = 0
    """Processes of each rank that read ahead. Of use for hf: sources, which tokenize while they are read; 0: one
    thread, which is enough for token files."""
    tokenizer: str = "bytes"
    """bytes (a token is a byte), spm:FILE for a sentencepiece model, hf:FILE for a tokenizer.json, hf:ORG/MODEL for
    that of a model at Hugging Face (ORG/MODEL@REVISION for a branch, tag or commit), or tiktoken:FILE."""
    accept_changed: bool = False
    """Resume although the data files of the checkpoint's run, or options that decide its samples, have changed since.
    Samples may then come again or be left out. By default this is refused."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming, in run_dir/checkpoints."""

    every: int = 0
    """Steps between checkpoints; 0 saves none, or with save_last only the last."""
    save_last: bool = True
    """Save after the last step."""
    resume: str = "auto"
    """auto: resume the newest complete checkpoint of the run folder, if there is one. none: start anew. Or the folder
    of the checkpoint to resume."""
    init_from: str = "none"
    """Folder of a checkpoint of any run. If nothing is resumed, the run starts from its weights, at step 0 and with a
    new optimizer state. With a larger model.vocab_size, new rows begin as the mean of the old ones."""
    strict: bool = True
    """The checkpoint of init_from must hold this model's tensors and no others. With no_strict, tensors that fit are
    loaded, and the others are listed: those of the checkpoint are thrown away."""
    async_save: bool = False
    """Train on while a copy of the state is written. Host memory holds up to two copies, of 12 bytes a parameter
    each."""
    on_failure: Literal["go_on", "stop"] = "go_on"
    """What to do when a checkpoint cannot be written. go_on: a line and an alert; the run trains on to the next
    checkpoint, and only a failure of its last one ends it. stop: end the run."""
    keep_last: int = 0
    """Number of complete checkpoints that are kept, the newest ones; 0 means all."""
    keep_every: int = 0
    """With keep_last: checkpoints of every n-th step are kept too, for ever; 0 means none."""
    memory_every: int = 0
    """Steps between snapshots in host memory, for restarts by launch.max_restarts; 0: none. The memory holds up to two,
    of 12 bytes a parameter each."""
    local_dir: str = "none"
    """Folder on a fast disk for further checkpoints, the newest two of which are kept. If each host has a disk of its
    own, it also keeps a copy of another host's part."""
    local_every: int = 0
    """Steps between checkpoints in local_dir; 0: none."""
    mtbf_hours: float = 0.0
    """Mean time between failures of one rank, such as 50000. Intervals then become those multiples of every,
    memory_every and local_every that lose the least time by the measured time of a save; 0: they stay."""


@dataclass(frozen=True)
class LogConfig:
    """What a run logs. metrics.jsonl is always written."""

    every: int = 1
    """Steps between lines on the console."""
    view: Literal["live", "lines"] = "live"
    """What a terminal shows below these lines. live: progress, loss, speed and memory, renewed all the time. lines:
    nothing. Without a terminal there are lines alone."""
    tensorboard: bool = True
    """Write the numbers of metrics.jsonl to run_dir/tensorboard too."""
    wandb: str = "none"
    """Project of Weights & Biases that gets the numbers of metrics.jsonl too; none: no project. Needs pip install
    wandb."""
    mlflow: str = "none"
    """URI of an MLflow server or folder that gets the numbers of metrics.jsonl too; none: nothing. Needs pip install
    mlflow-skinny."""
    prometheus_port: int = 0
    """Serve the newest numbers to Prometheus at http://127.0.0.1:PORT/metrics of rank 0's host; 0: do not."""
    straggler_every: int = 20
    """Steps between comparisons of the ranks' own time. A rank with more than 1.1 times the median of the ranks with
    its layers is named after three of them; 0: never."""
    fp8_every: int = 0
    """With train.fp8, steps between looks at what FP8 loses in each product: shares of numbers that become zero, and
    the noise of a sample. A watched step takes longer; what grows is an alert; 0: never."""
    alert_command: str = "none"
    """Command that gets an event as JSON on its standard input: a loss that spikes or is not finite, a stall, a slow
    rank, a disk nearly full, a fault, the end. It is called without a shell; none: no command."""
    profile: str = "none"
    """Steps A-B, such as 10-12: every rank writes what it did in them to run_dir/profile. megapar profile shows where
    their time went. none: no steps."""
    observers: tuple[str, ...] = ()
    """What else sees each step: MODULE:NAME of subclasses of megapar.observe.observer.Observer."""
    peak_tflops: float = 0.0
    """Peak TFLOP/s of one device at train.precision, for MFU; 0: that of the GPU's data sheet. Where that is not known,
    MFU is left out. With train.fp8 too it is the peak of bf16 or fp32, so that runs with and without FP8 compare."""


@dataclass(frozen=True)
class GuardConfig:
    """What a run watches for."""

    check_replicas_every: int = 0
    """Steps between comparisons of what several ranks hold as copies: parameters of replicas, norms of tensor ranks,
    tied embeddings. Unlike copies end the run, with their names; 0: none."""
    on_spike: Literal["warn", "skip", "rewind"] = "warn"
    """What to do at a loss or gradient norm far above those of the last steps. warn: a line. skip: a step with such a
    norm updates no weight. rewind: end the run; its next start goes on from a checkpoint at least 10 steps older, with
    the samples after this step."""


@dataclass(frozen=True)
class KernelsConfig:
    """Implementations of fused ops: norms, activations, rotary embedding, dropout, cross entropy, AdamW."""

    backend: Literal["auto", "triton", "torch", "apex"] = "auto"
    """triton: megapar's Triton kernels. torch: torch's ops. apex: NVIDIA's norms, AdamW and weight gradients. auto:
    triton on GPUs, torch elsewhere."""
    loss_chunk: int = 0
    """Compute the loss for so many tokens at a time, which saves the memory of the other logits and computes logits
    twice; 0: all tokens of a micro-batch at once, and logits once."""
    compile: bool = False
    """Let torch.compile make one pass of each norm, activation and rotation of torch's ops, forward and backward. It is
    done before the first step. The activation of experts stays torch's: their rows vary in number."""
    products: str = "torch"
    """The number format in which linear layers multiply. torch: that of train.precision. MODULE:NAME of a class of your
    own: see `megapar.linear.products.MatrixProducts`."""
    linear_attention: Literal["auto", "torch", "triton", "fla"] = "auto"
    """Delta rules and their convolutions. fla: flash-linear-attention, if installed. auto: as kernels.backend says."""


@dataclass(frozen=True)
class LaunchConfig:
    """How ranks start. Under torchrun or Slurm leave nproc at 0: ranks are then those that torchrun or Slurm
    started."""

    nproc: int = 0
    """Start this many ranks on this machine; 0 starts none: the program is the only rank, or one of torchrun or
    Slurm."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where torch sees GPUs, else cpu. Fewer GPUs than ranks on a node are refused."""
    timeout_seconds: float = 300.0
    """A collective that takes longer ends the run, and names the rank that did not arrive."""
    time_limit: float = 0.0
    """Minutes until the run saves at the end of a step and exits with 75, as after SIGTERM or SIGUSR1; 0: no limit."""
    threads: int = 0
    """CPU threads of each rank; 0: OMP_NUM_THREADS. If that is not set, each rank gets an equal share of the usable
    cores of its node."""
    max_restarts: int = 0
    """With nproc: start all ranks again so many times after one was lost or has failed. They go on from the newest
    snapshot or checkpoint. A failure repeated at one step ends the run."""
    min_dp: int = 0
    """Fewest replicas to go on with, when fewer ranks than parallel asks for are left; 0: all of them. The global batch
    stays."""
    preflight: bool = False
    """Before the first step, test every group of ranks and name the host that cannot be reached. Measure the bandwidth
    of each axis and the matrix products of each rank, and mark slow ones."""
    cpu_exchange: Literal["shared_memory", "gloo"] = "shared_memory"
    """How ranks on the CPUs of one host exchange tensors. CPUs of several hosts always use gloo, GPUs always NCCL."""
    gradient_ctas: int = 0
    """Most thread blocks (CTAs, one an SM) that NCCL takes for sums of gradients and gathers of weights. These run
    beside products; 0: NCCL chooses."""
    numa: Literal["auto", "none"] = "auto"
    """auto: on a host with several memory nodes a rank runs on the cores of its GPU's node, and takes memory there,
    unless its launcher has chosen its cores already."""


@dataclass(frozen=True)
class Config:
    """Pretrain a transformer with data, tensor and pipeline parallelism."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    run_dir: str = "runs/default"
    """Folder of everything that the run writes: config.toml, metrics.jsonl, checkpoints/, tensorboard/."""
    dry_run: bool = False
    """Print the parameters and the memory that each rank would have, and the numbers of a step. Then stop, without
    training."""
    gpu: str = "auto"
    """The machine: a name such as h100-80g, or a TOML file of tools/calibrate.py. With dry_run: say whether the layout
    fits, and what would. In a run: log the predicted time of a step beside the measured one. auto: a GPU is known by
    its name, and for CPUs nothing is predicted."""


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """The value of every option, by dotted path, in the order of the fields."""
    values: dict[str, Any] = {}
    # A search for layouts validates thousands of configs, and each time reads all values several times. `fields` would
    # take four times as long as `vars`, which has them in the same order.
    for name, value in vars(config).items():
        if is_dataclass(value):
            values |= flatten(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = value
    return values


def default_config(model: type[ModelConfig] = ModelConfig) -> Config:
    """The configuration with every option at its default, for families with these options of `model`."""
    return Config(model=model())


def option_types(model: type[ModelConfig] = ModelConfig) -> dict[str, Any]:
    """The type annotation of every option, by dotted path, in the order of the fields."""
    return _types(default_config(model), "")


def _types(section: Any, prefix: str) -> dict[str, Any]:
    types: dict[str, Any] = {}
    annotations = get_type_hints(type(section))
    for f in fields(section):
        value = getattr(section, f.name)
        # The value has the fields of the family, and the annotation only those of ModelConfig.
        if is_dataclass(value):
            types |= _types(value, f"{prefix}{f.name}.")
        else:
            types[prefix + f.name] = annotations[f.name]
    return types


def unflatten(values: Mapping[str, Any], model: type[ModelConfig] = ModelConfig) -> Config:
    """Make a Config from a value for every option, by dotted path. The inverse of `flatten`.

    `model` is the class of the family's options. Values of other options are left out.
    """
    config: Config = _build(default_config(model), values, "")
    return config


def _build(section: Any, values: Mapping[str, Any], prefix: str) -> Any:
    arguments = {}
    for f in fields(section):
        value = getattr(section, f.name)
        if is_dataclass(value):
            arguments[f.name] = _build(value, values, f"{prefix}{f.name}.")
        else:
            arguments[f.name] = values[prefix + f.name]
    return type(section)(**arguments)
