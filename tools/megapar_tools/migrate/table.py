"""The table: flags of other frameworks by framework, and the sources of the comparison."""

from collections.abc import Mapping
from dataclasses import dataclass

from megapar_tools.migrate.flag_files import read_flags
from megapar_tools.migrate.rows import OtherFlag, read_rows

FILES = {
    "Megatron-LM": "megatron",
    "torchtitan": "torchtitan",
    "DeepSpeed": "deepspeed",
    "Hugging Face": "hugging_face",
    "torchrun": "torchrun",
}
TABLE: Mapping[str, tuple[OtherFlag, ...]] = {framework: read_rows(file) for framework, file in FILES.items()}


@dataclass(frozen=True)
class Source:
    """The state of a framework at its comparison: a commit, or the tag of a release."""

    address: str
    state: str
    date: str


SOURCES: Mapping[str, Source] = {framework: Source(**read_flags(file)["source"]) for framework, file in FILES.items()}
