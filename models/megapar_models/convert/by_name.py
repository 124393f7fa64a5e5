"""Folders of Hugging Face, given as a path or as the name of a model there: which of its files a conversion reads.

Of a model by name safetensors, JSON and texts are downloaded: no pickle, and no Python.
"""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from megapar.base.errors import CheckpointError
from megapar.system.hub import ModelName, Snapshot, fetch
from megapar_models.convert.chat_files import GENERATION
from megapar_models.convert.safetensors_folder import INDEX, SINGLE, listed_files
from megapar_models.convert.tokenizer_files import CODE

HF_CONFIG = "config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", GENERATION, CODE),
)
_DATA = tuple(file for file in TOKENIZER_FILES if file != CODE)


class SourceFolder(NamedTuple):
    """A folder of Hugging Face; `snapshot` is None unless it was given by the name of a model."""

    folder: Path
    snapshot: Snapshot | None = None

    @property
    def origin(self) -> dict[str, str]:
        """What a manifest says of the model (`megapar.checkpoint.origin`): nothing if it was given as a folder."""
        return {} if self.snapshot is None else {"repo": self.snapshot.repo, "commit": self.snapshot.commit}


def open_source(given: str | Path, files: Collection[str], needed: Collection[str] = ()) -> SourceFolder:
    """Return the folder `given`; or if that is ORG/MODEL[@REVISION], the cache's with those of `files` that there are.

    Raises what `hub.fetch` raises.
    """
    name = ModelName.parse(str(given))
    if name is None:
        return SourceFolder(Path(given))
    snapshot = fetch(name, files, needed=needed)
    return SourceFolder(snapshot.folder, snapshot)


def open_description(given: str | Path) -> SourceFolder:
    """Open a model for its config.json, its tokenizer and its settings of generation, without weights."""
    return open_source(given, (HF_CONFIG, *_DATA), [HF_CONFIG])


def open_outline(given: str | Path) -> SourceFolder:
    """Open a model for its config.json, and the names of its tensors if it has an index."""
    return open_source(given, (HF_CONFIG, INDEX), [HF_CONFIG])


def open_weights(given: str | Path) -> SourceFolder:
    """Open a whole model. Raises CheckpointError if its index names files that hold no safetensors."""
    source = open_source(given, (HF_CONFIG, INDEX, *_DATA), [HF_CONFIG])
    if source.snapshot is not None:
        # By their names: a repository may have the same weights a second time, in other formats and shards.
        files = sorted({*listed_files(source.folder).values()}) or [SINGLE]
        others = [file for file in files if not file.endswith(".safetensors")]
        if others:
            raise CheckpointError(f"{source.snapshot.pinned}: {INDEX} names {others[0]}, which is no safetensors file")
        fetch(source.snapshot.pinned, files, needed=files)
    return source
