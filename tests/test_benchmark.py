"""tools/benchmark.py at a size of seconds."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SIZES = {"num_hidden_layers": 2, "vocab_size": 256, "seq_length": 32, "global_batch_size": 4, "hidden": 256, "steps": 1}
SMALL = [text for name, value in SIZES.items() for text in (f"--{name}", str(value))]


def benchmark(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/benchmark.py"), *SMALL, *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_contenders_compute_the_same_and_bytes_equal_the_formulas(tmp_path):
    """Every peer agrees with plain PyTorch in loss and gradient norm, and what megapar sends is what the formulas say,
    to the byte, on every rank and in every layout."""
    file = tmp_path / "out.json"
    done = benchmark("--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads(file.read_text())["runs"]
    assert [run["layout"] for run in runs] == ["single", "dp2", "tp2", "tp2+sp", "pp2"]
    for run in runs:
        for contender in run["contenders"]:
            assert contender["errors"]["loss"] < 1e-5
            assert contender["errors"]["grad_norm"] < 1e-3
            assert contender.get("sent") == contender.get("formula")


def test_the_first_word_chooses_the_benchmark():
    """It must be one of those that --help of the door lists."""
    command = [sys.executable, str(ROOT / "tools/benchmark.py")]
    done = subprocess.run([*command, "speed"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("ConfigError: speed: no such benchmark; layouts, checkpoint,")
    helped = subprocess.run([*command, "manifest", "--help"], capture_output=True, text=True, timeout=120, check=False)
    assert helped.returncode == 0, helped.stderr
    assert "--ranks" in helped.stdout


def test_a_width_that_dtensor_cannot_cut_is_refused():
    done = benchmark("--hidden", "384")
    assert done.returncode == 2
    assert done.stderr.startswith("ConfigError: --hidden 384")
