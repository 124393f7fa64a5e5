"""Files of models at Hugging Face by name: ORG/MODEL, or ORG/MODEL@REVISION for a branch, a tag or a commit.

The package huggingface_hub (the extra `hub`) downloads them into its cache, goes on with interrupted downloads, and
locks a file while a process writes it. `fetch` alone downloads, and programs call it for a name that the user typed:
all others, such as ranks and readers of a manifest, call `cached`. Only files asked for by name are downloaded, and
none of them is run.
"""

import errno
import glob
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from megapar.base.errors import ConfigError, DataError, MegaparError, StorageError, reason_of
from megapar.system.apart import apart

LOG_IN = "log in by `hf auth login`, or set HF_TOKEN"
# As the hub has them. Letters of other alphabets are none, and a part that begins with a dash would be a flag.
_PART = r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9_][\w./-]{{0,250}}))?", re.ASCII)
_COMMIT = re.compile("[0-9a-f]{40}")
_OF_FILES = (".json", ".toml", ".model", ".git")  # whoever mistypes data/tokenizer.json means no model
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Of a file: a firewall refuses connections with the same numbers.
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


class ModelName(NamedTuple):
    """A model at the hub, and the branch, tag or commit of it; "" for its main branch."""

    repo: str
    revision: str = ""

    @classmethod
    def parse(cls, text: str) -> "ModelName | None":
        """Return the name in `text`, or None if `text` is the path of something here, or can be no name."""
        found = _NAME.fullmatch(text)
        # A path that is there wins, be it a link to nowhere.
        if found is None or os.path.lexists(text):
            return None
        repo, revision = found["repo"], found["revision"] or ""
        if ".." in text or "--" in repo or "//" in revision or repo.endswith(_OF_FILES) or revision.endswith("/"):
            return None
        return cls(repo, revision)

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


class Snapshot(NamedTuple):
    """Files of one commit of a model, in a folder of the cache."""

    repo: str
    commit: str
    folder: Path

    @property
    def pinned(self) -> ModelName:
        """The name that stands for these files for ever."""
        return ModelName(self.repo, self.commit)


def fetch(name: ModelName, files: Collection[str], *, needed: Collection[str] = ()) -> Snapshot:
    """Download those of `files` that the model has, unless the cache has them.

    The branch is looked up at the hub; without a network the commit that the cache has of it is taken. Raises
    ConfigError without huggingface_hub, or if there is no such model or revision, or one that this user may not read;
    DataError if the hub cannot be reached, or one of the files `needed` is not there; StorageError if the cache cannot
    be written. For a process that forks ranks afterwards, the library runs in a fork of its own: its threads stay.
    """
    return apart(_download, name, files, needed)


def _download(name: ModelName, files: Collection[str], needed: Collection[str]) -> Snapshot:
    library = _library(name)
    try:
        folder = library.snapshot_download(
            name.repo,
            revision=name.revision or None,
            allow_patterns=[glob.escape(file) for file in files],
            library_name="megapar",
        )
    except Exception as error:  # the library's, those of the HTTP client of its version, and the system's
        raise _everywhere(_in_one_line(name, error, library)) from error
    snapshot = Snapshot(name.repo, Path(folder).name, Path(folder))
    if not _COMMIT.fullmatch(snapshot.commit):
        raise _everywhere(DataError(f"{name}: {folder} is named by no commit: remove {snapshot.folder.parents[1]}"))
    missing = [file for file in needed if not (snapshot.folder / file).is_file()]
    if missing:
        where = f"{library.constants.ENDPOINT} gives none"
        if _is_offline(library):
            where = f"the cache ({folder}) has none, and HF_HUB_OFFLINE is set: unset it once"
        raise _everywhere(DataError(f"{snapshot.pinned}: has no {' and no '.join(missing)}: {where}"))
    _require_inside(snapshot, files)
    return snapshot


def cached(name: ModelName, file: str) -> Path | None:
    """Return the `file` of a model in the cache, None if the cache has none. Nothing is downloaded.

    Raises ConfigError without huggingface_hub, and DataError for a link out of the cache.
    """
    found = _library(name).try_to_load_from_cache(name.repo, file, revision=name.revision or None)
    if not isinstance(found, str):  # None, or an object that stands for a file that the model does not have
        return None
    folder = Path(found).parents[file.count("/")]
    _require_inside(Snapshot(name.repo, folder.name, folder), [file])
    return Path(found)


def _library(name: ModelName) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise ConfigError(
            f"{name}: nothing here has this name, and models by name need the package huggingface_hub (extra hub): "
            "pip install huggingface_hub"
        ) from error
    return huggingface_hub


def _is_offline(library: Any) -> bool:
    return bool(library.constants.HF_HUB_OFFLINE)


def _require_inside(snapshot: Snapshot, files: Iterable[str]) -> None:
    """Raise DataError if a file of the snapshot is a link out of the model's folder in the cache."""
    model = snapshot.folder.resolve().parents[1]
    inside = model, model.parent / "blobs"  # newer versions share large files among models
    for file in files:
        target = (snapshot.folder / file).resolve()
        if not any(target.is_relative_to(place) for place in inside):
            raise _everywhere(
                DataError(f"{snapshot.folder / file}: is a link to {target}, out of the cache of {snapshot.repo}")
            )


def _in_one_line(name: ModelName, error: Exception, library: Any) -> MegaparError:
    """The error of ours for one of the library's."""
    errors, hub, cache = library.errors, library.constants.ENDPOINT, library.constants.HF_HUB_CACHE
    if isinstance(error, errors.GatedRepoError):  # one of RepositoryNotFoundError
        return ConfigError(f"{name}: {hub} gives it to users who were granted access: ask there, then {LOG_IN}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ConfigError(
            f"{name}: nothing here has this name, nor a public model at {hub}; if it is private, {LOG_IN}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(
            f"{name}: {hub} has {name.repo}, and no branch, tag or commit {name.revision or 'main'} of it"
        )
    if isinstance(error, errors.HFValidationError):
        return ConfigError(f"{name}: {_words(error)}")
    if cause := next(filter(_cannot_write, _causes(error)), None):
        text = f"{name}: cannot be written to {cache} ({reason_of(cause)}): set HF_HOME to a folder with room for it"
        return StorageError(text)
    absent = f"{name}: nothing here has this name"
    if _is_offline(library):
        text = f"the cache {cache} lacks files of it, and HF_HUB_OFFLINE is set: unset it once, or name a folder"
        return DataError(f"{absent}, {text}")
    text = "start again to go on with the download, set HF_ENDPOINT to a mirror, or name a folder"
    return DataError(f"{absent}, and {hub} cannot be read ({_words(error.__cause__ or error)}): {text}")


def _causes(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _cannot_write(error: BaseException) -> bool:
    if not isinstance(error, OSError):
        return False
    return error.errno in _FULL or (error.errno in _REFUSED and error.filename is not None)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _everywhere(error: MegaparError) -> MegaparError:
    """`error`, which all ranks of a host have alike: one of them tells it."""
    error.everywhere = True
    return error
