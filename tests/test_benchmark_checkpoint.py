"""tools/benchmark.py checkpoint at a size of seconds."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from benchmarks import checkpoint, harness


def test_every_contender_moves_the_same_bytes_and_each_figure_is_there(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    sizes = {"hidden": 64, "num_hidden_layers": 2, "vocab_size": 256, "rounds": 2}
    harness.run(checkpoint.measure, checkpoint.Options(**sizes, folder=tmp_path, json=file))
    found = json.loads(file.read_text())
    parameters = 2 * 256 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 256 + 2 * 64) + 64
    assert found["bytes"] == 12 * parameters
    for name, plain in (("save", "copy"), ("DCP save", "copy"), ("load", "read"), ("DCP load", "read")):
        figure = found["summary"][name]
        assert figure["gb_per_second"] * figure["median"] * 1e9 == pytest.approx(found["bytes"])
        ratios = [one[plain] / one[name] for one in found["rounds"]]
        assert figure[f"speed_over_{plain}"]["max"] == max(ratios)
    assert {"pause, synchronous", "pause, asynchronous", "step meanwhile, CPU time"} < set(found["summary"])
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"], "nothing is left behind"


def test_a_load_of_other_bits_is_an_error() -> None:
    options = checkpoint.Options(hidden=64, num_hidden_layers=1, vocab_size=128)
    state = checkpoint.make_trainer(options, torch.device("cpu")).state
    saved = {name: tensor.clone() for name, tensor in checkpoint.tensors(state).items()}
    checkpoint.require_equal(state, saved, "load")
    with pytest.raises(checkpoint.BenchmarkError, match=r"^load: .* is not what was saved$"):
        checkpoint.require_equal(state, saved, "load")  # as nothing was loaded into what was spoiled
