"""What a checkpoint of any framework is to megapar: named tensors, of which boxes are read, and named plain values.

Each format has a module beside this one that opens its folders as a `TensorStore`. A store knows its framework's files,
and nothing of models. `megapar_models.convert.formats.contents` says which of ours each tensor holds.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megapar.declare.params import Box
from megapar_models.convert.stream import TensorInfo


class TensorStore(Protocol):
    """An opened checkpoint of some framework. Opening it reads an index; nothing of a file is executed.

    A store may be read again and again. It holds no tensor in memory that it was not asked for.
    """

    @property
    def folder(self) -> Path:
        """The folder that was opened."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of each tensor by its stored name, those of optimizer states included."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Plain values that are no tensors (step counts, arguments, positions of schedules) by their stored names.

        They are numbers, texts, None, lists and dicts of these, and small tensors. What was an object of another class
        is left out.
        """

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, or the whole tensor, in its stored dtype, on the CPU. No more of the file is kept.

        Raises CheckpointError, with the file and the tensor's name, if the file is cut, changed or not as its index
        says.
        """
