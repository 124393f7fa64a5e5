"""tools/benchmark.py checkpoint and manifest at a size of seconds."""

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parent.parent / "tools/benchmark.py"
SIZES = ("--hidden", "64", "--num_hidden_layers", "2", "--vocab_size", "256", "--rounds", "2")


def test_every_contender_moves_the_same_bytes_and_each_figure_is_there(tmp_path: Path) -> None:
    """The tool itself ends with 70 if a load is not bitwise what was saved."""
    file = tmp_path / "out.json"
    command = [sys.executable, str(TOOL), "checkpoint", *SIZES, "--folder", str(tmp_path), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    parameters = 2 * 256 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 256 + 2 * 64) + 64
    assert found["bytes"] == 12 * parameters
    for name in ("save", "copy", "DCP save"):
        figure = found["summary"][name]
        assert figure["gb_per_second"] * figure["median"] * 1e9 / found["bytes"] > 0.999
        assert len(figure["speed_over_copy"]) == 3
    assert {"load", "read", "DCP load", "pause, synchronous", "pause, asynchronous"} < set(found["summary"])
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"], "nothing is left behind"


def test_the_cost_of_a_manifest_is_measured_for_each_number_of_ranks(tmp_path: Path) -> None:
    """A rank that uses a manifest takes less memory than all of it as text."""
    file = tmp_path / "out.json"
    command = [sys.executable, str(TOOL), "manifest", "--ranks", "64", "512", "--layers", "8", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [row["ranks"] for row in rows] == [64, 512]
    assert rows[1]["manifest_bytes"] > 4 * rows[0]["manifest_bytes"]
    for row in rows:
        for who in ("publish", "verify", "use", "retain"):
            assert row[who]["seconds"] > 0
            assert row[who]["bytes"] >= 0
