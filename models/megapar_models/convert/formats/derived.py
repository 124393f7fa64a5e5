"""Stores with tensors made of others: parts of a fused one, moments times a factor, two folders as one."""

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megapar.base.errors import CheckpointError
from megapar.declare.params import Box
from megapar_models.convert.formats.store import TensorStore
from megapar_models.convert.stream import TensorInfo


class Derived(NamedTuple):
    """A tensor that is made when a box of it is read."""

    info: TensorInfo
    read: Callable[[Box], Tensor]


class _Listed:
    """A store of another folder's tensors, or of some of them, under the names of `infos`."""

    def __init__(self, folder: Path, infos: Mapping[str, TensorInfo]):
        self._folder = folder
        self._infos = infos

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos


class WithDerived(_Listed):
    """A store without the tensors `hidden`, and with further ones, which may replace stored ones of their names."""

    def __init__(self, store: TensorStore, derived: Mapping[str, Derived], hidden: Collection[str] = ()):
        self._store = store
        self._derived = derived
        kept = {name: info for name, info in store.tensors.items() if name not in hidden}
        super().__init__(store.folder, kept | {name: tensor.info for name, tensor in derived.items()})

    @property
    def values(self) -> Mapping[str, Any]:
        return self._store.values

    def read(self, name: str, box: Box | None = None) -> Tensor:
        if name not in self._derived:
            return self._store.read(name, box)
        shape, dtype = self._infos[name]
        return self._derived[name].read(box or Box((0,) * len(shape), shape)).to(dtype)


class JoinedStore(_Listed):
    """Stores of folders below one, such as model and optimizer apart. Names begin with that of their folder."""

    def __init__(self, folder: Path, stores: Mapping[str, TensorStore]):
        self._stores = stores
        parts = [{f"{part}.{name}": info for name, info in store.tensors.items()} for part, store in stores.items()]
        super().__init__(folder, dict(chain.from_iterable(part.items() for part in parts)))

    @property
    def values(self) -> Mapping[str, Any]:
        return _JoinedValues(self._stores)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        for part, store in self._stores.items():
            if name.startswith(f"{part}."):
                return store.read(name.removeprefix(f"{part}."), box)
        raise CheckpointError(f"{self._folder}: holds no tensor {name}")


class _JoinedValues(Mapping[str, Any]):
    """Values of several stores, each read when it is asked for."""

    def __init__(self, stores: Mapping[str, TensorStore]):
        self._places = {f"{part}.{name}": (store, name) for part, store in stores.items() for name in store.values}

    def __getitem__(self, name: str) -> Any:
        store, inside = self._places[name]
        return store.values[inside]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class RenamedStore(_Listed):
    """A store with other names for some of its tensors, and without the rest. `stored` has the stored names by ours."""

    def __init__(self, store: TensorStore, stored: Mapping[str, str]):
        self._store = store
        self._stored = stored
        infos = store.tensors
        super().__init__(store.folder, {name: infos[key] for name, key in stored.items()})

    @property
    def values(self) -> Mapping[str, Any]:
        return {}

    def read(self, name: str, box: Box | None = None) -> Tensor:
        return self._store.read(self._stored[name], box)
