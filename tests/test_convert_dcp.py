"""What is exported to torch.distributed.checkpoint loads into plain and sharded state dicts, bit for bit."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megapar_models.convert import stream
from megapar_models.convert.dcp import CONFIG as OPTIONS
from megapar_models.convert.dcp import export
from megapar_models.convert.stream import write_weights
from megapar_models.counts import WholeModel
from megapar_models.registry import weight_options
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megapar.base.errors import CheckpointError, ConfigError
from megapar.config.model_options import ModelConfig
from tests.support import tiny_models
from tests.support.distributed import run_ranks
from tools.convert_checkpoint import NativeToDcp, native_to_dcp

CONFIG = tiny_models.config(tiny_models.model("llama", num_key_value_heads=2, attention_bias=True))
MODEL = CONFIG.model


def native(folder: Path) -> dict[str, Tensor]:
    """Writes a checkpoint of several files; its tensors."""
    tensors = tiny_models.random_tensors(MODEL)
    folder.mkdir()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    write_weights(folder, CONFIG, shapes, tensors.__getitem__, shard_bytes=20_000)
    assert len(list(folder.glob("*.safetensors"))) > 3
    return tensors


def empty(model: ModelConfig) -> dict[str, Tensor]:
    return {name: torch.full(piece.shape, torch.nan) for name, piece in WholeModel(model).tensors().items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch: one process, as we mean it
def test_plain_tensors_load_bitwise_by_our_logical_names(tmp_path: Path) -> None:
    tensors = native(tmp_path / "native")
    assert sorted(export(tmp_path / "native", tmp_path / "dcp")) == sorted(tensors)
    state = empty(MODEL)
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor), name
    options = json.loads((tmp_path / "dcp" / OPTIONS).read_text())
    assert options == json.loads(json.dumps(weight_options(CONFIG)))


def load_sharded(folder: Path) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in empty(MODEL).items()}
    dcp.load(state, checkpoint_id=folder)
    for name, tensor in state.items():
        assert isinstance(tensor, DTensor)
        assert tensor.to_local().shape[0] < tensor.shape[0], name
    return {name: tensor.full_tensor() for name, tensor in state.items() if isinstance(tensor, DTensor)}


def test_dtensors_of_two_ranks_load_bitwise(tmp_path: Path) -> None:
    tensors = native(tmp_path / "native")
    native_to_dcp(NativeToDcp(tmp_path / "native", tmp_path / "dcp"))
    for found in run_ranks(2, load_sharded, tmp_path / "dcp"):
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor), name


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    """Fault non-finite-weights."""
    tensors = tiny_models.random_tensors(MODEL)
    tensors["layers.1.mlp.up.weight"][2, 3] = torch.inf
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    (tmp_path / "native").mkdir()
    with pytest.MonkeyPatch.context() as patched:  # as an older version would have written it
        patched.setattr(stream, "check_finite", lambda name, values: values)
        write_weights(tmp_path / "native", CONFIG, shapes, tensors.__getitem__, shard_bytes=20_000)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up\.weight.* not finite"):
        export(tmp_path / "native", tmp_path / "dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


def test_a_damaged_source_or_an_existing_target_leaves_nothing_behind(tmp_path: Path) -> None:
    """Fault flipped-bit: a flipped bit is an error here, although DCP itself would load it."""
    native(tmp_path / "native")
    file = sorted((tmp_path / "native").glob("*.safetensors"))[2]
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="CRC-32"):
        export(tmp_path / "native", tmp_path / "dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["native"]
    with pytest.raises(ConfigError, match="exists"):
        export(tmp_path / "native", tmp_path / "native")
