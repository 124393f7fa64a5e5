"""Writing a native checkpoint of a foreign one, moments included, so that a run resumes from the written folder.

A conversion that was broken off goes on: the folder beside the target keeps the files that are whole, and a journal of
them.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megapar.base.errors import ConfigError, StorageError
from megapar.checkpoint.format import Manifest, dtype_of, sync_folder
from megapar.config.files import part_toml
from megapar.config.options import Config
from megapar.system.regular_files import open_regular
from megapar_models.convert.formats.contents import Contents, ContentsReader
from megapar_models.convert.progress import progress
from megapar_models.convert.stream import TensorInfo, WrittenFiles, write_checkpoint

CONFIG = "config.toml"
JOURNAL = "journal.jsonl"
_FILE_BYTES = 1_000_000_000  # of a file; what is lost when a conversion is broken off


def write_native(contents: Contents, config: Config, target: Path, *, file_bytes: int = _FILE_BYTES) -> Manifest:
    """Write `contents`, of the validated model of `config`, to the folder `target`; returns the manifest.

    The folder must not exist. It appears complete or not at all, with config.toml, which has the section [model]. Files
    have at most `file_bytes` bytes, or one larger tensor. The manifest has files and chunks only on disk.
    Raises CheckpointError if the contents are not of the model or a file is damaged, ConfigError if the target exists,
    and StorageError if it cannot be written or another process writes it.
    """
    contents.check()
    manifest = contents.manifest(config)
    infos = [TensorInfo(entry.shape, dtype_of(entry.dtype)) for entry in manifest.tensors.values()]
    with continued_folder(target, _fingerprint(contents, manifest, file_bytes), _bytes(infos)) as (folder, journal):
        with ContentsReader(contents, manifest) as reader, progress(len(infos)) as advance:
            write_checkpoint(
                folder,
                manifest,
                lambda name: advance(reader.tensor(name)),
                shard_bytes=file_bytes,
                written=journal,
            )
        (folder / CONFIG).write_text(part_toml(config, ("model",)))
    return manifest


def _bytes(infos: list[TensorInfo]) -> int:
    return sum(info.nbytes for info in infos)


def _fingerprint(contents: Contents, manifest: Manifest, file_bytes: int) -> str:
    """What must be equal for files of an earlier conversion to be files of this one."""
    source = contents.store.folder
    files = sorted(
        (str(path.relative_to(source)), status.st_size, status.st_mtime_ns)
        for path in source.rglob("*")
        for status in [path.lstat()]
    )
    described = [contents.title, str(source.resolve()), files, manifest.header(), manifest.kinds(), file_bytes]
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()


class Journal(WrittenFiles):
    """The files of a broken-off conversion that are whole, a line of JSON each, behind a line about the source."""

    def __init__(self, descriptor: int, folder: Path, source: str):
        self._descriptor = descriptor
        lines = os.pread(descriptor, os.fstat(descriptor).st_size, 0).splitlines()
        kept: list[dict[str, Any]] = []
        for line in lines:
            try:
                kept.append(json.loads(line))
            except ValueError:
                break  # the line of which a kill left a part
        self.files = {}
        if kept and kept[0] == {"source": source}:
            self.files = {entry["file"]: entry for entry in kept[1:] if _is_whole(folder, entry)}
        os.ftruncate(descriptor, 0)
        self._write({"source": source})
        for entry in self.files.values():
            self._write(entry)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Note a file that is whole and on the disk."""
        self.files[entry["file"]] = entry
        self._write(entry)

    def _write(self, entry: Mapping[str, Any]) -> None:
        text = json.dumps(entry).encode() + b"\n"
        os.pwrite(self._descriptor, text, os.fstat(self._descriptor).st_size)
        os.fsync(self._descriptor)


def _is_whole(folder: Path, entry: Mapping[str, Any]) -> bool:
    try:
        return (folder / entry["file"]).lstat().st_size == entry["bytes"]
    except OSError:
        return False


@contextmanager
def continued_folder(final: Path, source: str, needed_bytes: int) -> Iterator[tuple[Path, Journal]]:
    """Yield the folder `.partial-NAME` beside `final`, and the journal of the files in it that are of `source`.

    The folder becomes `final` when the block ends, and stays if the block fails: the next call goes on in it.
    Raises ConfigError if `final` exists, StorageError if there is no room for `needed_bytes` in all, if another user
    made the folder, or if another process holds it.
    """
    if final.exists():
        raise ConfigError(f"{final}: exists; name a folder that does not, nothing is overwritten")
    folder = final.parent / f".partial-{final.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.is_symlink() or folder.lstat().st_uid != os.getuid():
            raise StorageError(f"{folder}: is not this user's: remove it, or name another target")
        descriptor = open_regular(folder / JOURNAL, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StorageError(f"{folder}: another process converts to {final}: wait for its end") from None
            journal = Journal(descriptor, folder, source)
            for path in folder.iterdir():
                if path.name != JOURNAL and path.name not in journal.files:
                    path.unlink()
            there = sum(entry["bytes"] for entry in journal.files.values())
            free = shutil.disk_usage(folder).free
            if free < needed_bytes - there:
                text = f"needs {needed_bytes - there:,} bytes, {free:,} are free: free some space"
                raise StorageError(f"{final}: {text}")
            yield folder, journal
            (folder / JOURNAL).unlink()
            sync_folder(folder)
            folder.rename(final)
            sync_folder(final.parent)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"{final}: {error}") from error
