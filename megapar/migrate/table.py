"""The table: flags of other frameworks by framework, and the sources of the comparison."""

from collections.abc import Mapping
from dataclasses import dataclass

from megapar.migrate import deepspeed, earlier, hugging_face, megatron, scripts, torchrun, torchtitan
from megapar.migrate.rows import OtherFlag

TABLE: Mapping[str, tuple[OtherFlag, ...]] = {
    "Megatron-LM": (*megatron.FLAGS, *earlier.MEGATRON),
    "torchtitan": (*torchtitan.FLAGS, *earlier.TORCHTITAN),
    "DeepSpeed": deepspeed.FLAGS,
    "Hugging Face": (*hugging_face.FLAGS, *scripts.FLAGS),
    "torchrun": torchrun.FLAGS,
}


@dataclass(frozen=True)
class Source:
    """The state of a framework at its comparison: a commit, or the tag of a release."""

    address: str
    state: str
    date: str


SOURCES: Mapping[str, Source] = {
    "Megatron-LM": Source(
        "https://github.com/NVIDIA/Megatron-LM", "d98e8a64ddf34856e74b24714e3bedb2f5a39553", "2026-08-22"
    ),
    "torchtitan": Source(
        "https://github.com/pytorch/torchtitan", "b5bcd76c66d0acb1a08b176d9639425bc55e0b2a", "2026-08-21"
    ),
    "DeepSpeed": Source(
        "https://github.com/deepspeedai/DeepSpeed", "edaa7221267243c7be7fb49c5d5f5c4fb97b4641", "2026-08-22"
    ),
    "Hugging Face": Source("https://github.com/huggingface/transformers", "v5.23.0", ""),
    "torchrun": Source("https://github.com/pytorch/pytorch", "v2.13.0", ""),
}
