"""Files that a conversion copies as they are: of tokenizers, settings of generation, and config.json.

In a folder that somebody else has made, a link may lead to any file of the user, who would then publish a copy of it.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from megapar.base.errors import CheckpointError
from megapar.system.regular_files import read_regular


def files_inside(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """The files of these `names` that are in `folder`, behind all links.

    In Hugging Face's cache the files of a folder snapshots/REVISION are links to the folder blobs of the same model,
    and large ones on to that of all models. No code is taken out of the cache: somebody else has written it.
    Raises CheckpointError for any other link out of `folder`.
    """
    root = folder.resolve()
    models = [parent.parent for parent in root.parents if parent.name == "snapshots"]
    blobs = [place / "blobs" for model in models for place in (model, model.parent)]
    found = {
        name: (root / name).resolve()
        for name in names
        if (folder / name).is_file() and not (models and name.endswith(".py"))
    }
    for name, file in found.items():
        if not any(file.is_relative_to(place) for place in (root, *blobs)):
            raise CheckpointError(
                f"{folder / name}: is a link to {file}, out of the folder, and the result would hold a copy: remove "
                f"the link, or if you know the file: cp --remove-destination {file} {folder / name}"
            )
    return found


def copy_files(files: Mapping[str, Path], to: Path) -> None:
    """Write the files of `files_inside` to the folder `to`. Raises OSError, also if one has become a link meanwhile."""
    for name, file in files.items():
        (to / name).write_bytes(read_regular(file, None, os.O_RDONLY | os.O_NOFOLLOW))
