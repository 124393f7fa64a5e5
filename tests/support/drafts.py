"""Drafts of families (`megapar new-family`), compared with transformers as they are written."""

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from megapar_models.convert.saved import load_model
from megapar_models.convert.sketch import Sketch, sketch

from megapar.base.errors import CheckpointError, ConfigError
from tests.support.published import assert_equal_logits, random_batch
from tools import new_family
from tools.convert_checkpoint import HfToNative, hf_to_native


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Modules in `folder` can be imported, and are forgotten at the end."""
    before = {*sys.modules}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in {*sys.modules} - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == folder:
                del sys.modules[name]


def sketch_of(source: Path) -> Sketch:
    return sketch(new_family.read_config(source), new_family.read_shapes(source))


def written(source: Path, drafts: Path) -> str:
    """Write the draft of a folder of Hugging Face; returns its MODULE:FAMILY."""
    list(new_family.write_draft(sketch_of(source), new_family.Options(source, drafts)))
    (file,) = drafts.glob("*.py")
    return f"{file.stem}:FAMILY"


def outcome_of_draft(source: Path, folder: Path) -> str:
    """ "trains", "incomplete", or what the conversion refuses the draft with. Fails if logits are wrong.

    The conversion allows logits to differ by more than a test does, and has other tokens.
    """
    if not sketch_of(source).complete:
        return "incomplete"
    name = written(source, folder / "drafts")
    with importable(folder / "drafts"):
        try:
            hf_to_native(HfToNative(source, folder / "native", family=name))
        except (ConfigError, CheckpointError) as error:
            return str(error)
        _, stage = load_model(folder / "native", family=name)
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    batch = random_batch()
    with torch.no_grad():
        assert_equal_logits(stage, batch, theirs(batch.tokens_bs).logits)
    assert json.loads((folder / "native/parity.json").read_text())["prompts"]
    return "trains"
