"""A cache of keys and values and a batch of prompts change nothing in what is generated, for every model type."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.generation import Sampling, decoding, generate, next_logits, probabilities, why_no_cache
from megapar_models.stage import Stage
from torch import Tensor, nn

from megapar.base.errors import ConfigError
from megapar.declare import context
from tests.support import tiny_models
from tests.support.close import assert_close
from tests.support.grid import LLAMA
from tests.support.model_types import TYPES, VOCABULARY
from tests.support.published import Published
from tests.support.sweeps import slow_but

EOD = 0
GREEDY = Sampling(temperature=0.0)
PROMPTS = [[5, 99, 130, 7, 7, 23, 61], [12], [77, 3, 18, 18, 50, 2, 9, 44, 120, 31, 6]]
ROWS = list(TYPES)
# A rule of attention each: grouped heads, windows, caps, sinks, layers without positions, latents, learned positions,
# a temperature by position, convolutions, chunks, ALiBi.
RULES = ("llama", "gemma2", "gemma3_text", "gpt_oss", "smollm3", "deepseek_v3", "gpt2", "opt", "ministral3", "lfm3")
RULES += ("llama4_text", "bloom, six heads")


def stage_of(name: str, folder: Path) -> Stage:
    case = TYPES[name]
    # The logits of 0.1 are close to each other, and a rounding would choose another token.
    return Published(folder, case.model_type, case.fields).stage.eval()


@pytest.mark.parametrize("name", slow_but([ROWS.index(name) for name in RULES][::2], ROWS))
def test_a_cache_changes_no_logit_of_any_prompt(name: str, tmp_path: Path) -> None:
    """Prompts of unequal lengths: as whole forward passes of each alone."""
    stage = stage_of(name, tmp_path)
    # longrope turns keys in one way alone where all rows are longer than the context it began with.
    check_cache(stage, [prompt for prompt in PROMPTS if name != "phi3, long samples" or len(prompt) > 1])


@pytest.mark.parametrize("name", slow_but([ROWS.index(name) for name in RULES][::3], ROWS))
def test_a_cache_changes_no_logit_of_prompts_of_one_length(name: str, tmp_path: Path) -> None:
    """No column fills a row, so attention has no mask."""
    longest = max(PROMPTS, key=len)
    check_cache(stage_of(name, tmp_path), [longest, longest[::-1]])


def check_cache(stage: Stage, prompts: Sequence[Sequence[int]]) -> None:
    rows = [list(prompt) for prompt in prompts]
    assert not why_no_cache(stage, rows, 12)
    found = {}
    with decoding(stage, rows, 12) as decoder:
        for step in range(12):
            found |= {f"step {step} {number}": logits_v for number, logits_v in enumerate(decoder.logits_bv)}
            for number, row in enumerate(rows):
                row.append((17 * step + 29 * number) % VOCABULARY)
            decoder.append([row[-1] for row in rows])
    expected = {}
    with torch.no_grad():
        for name in found:
            step, number = (int(part) for part in name.split()[1:])
            expected[name] = next_logits(stage, [rows[number][: len(prompts[number]) + step]])[0]
    assert_close(found, expected, 5e-6)


@pytest.mark.parametrize("name", slow_but([ROWS.index(name) for name in RULES][::3], ROWS))
def test_no_bit_of_a_logit_depends_on_whether_gradients_are_recorded(name: str, tmp_path: Path) -> None:
    """Without them the functions of layers are called in another way (`dispatch.apply_function`)."""
    stage = stage_of(name, tmp_path)
    found = next_logits(stage, PROMPTS)
    assert found.requires_grad
    with torch.no_grad():
        assert torch.equal(next_logits(stage, PROMPTS), found)


def test_what_is_drawn_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    stage = stage_of("llama", tmp_path)
    for sampling in (GREEDY, Sampling(seed=3, top_p=0.9, top_k=50)):
        together = generate(stage, PROMPTS, 20, EOD, sampling, samples=2)
        alone = [row for prompt in PROMPTS for row in generate(stage, [prompt], 20, EOD, sampling, samples=2)]
        assert together == alone
        assert [row[: len(PROMPTS[number // 2])] for number, row in enumerate(together)] == [
            prompt for prompt in PROMPTS for _ in range(2)
        ]
        assert (together[0] == together[1]) == (sampling is GREEDY), "samples of one prompt differ"
    other = generate(stage, PROMPTS, 20, EOD, Sampling(seed=4, top_p=0.9, top_k=50), samples=2)
    assert other != together


def test_prompts_with_seeds_of_their_own_are_drawn_apart(tmp_path: Path) -> None:
    """Else equal prompts, and the errors of unequal ones, would be alike."""
    stage = stage_of("llama", tmp_path)
    prompts = [PROMPTS[0]] * 3
    sampling = Sampling(temperature=1.0)
    rows = generate(stage, prompts, 20, EOD, sampling, 2, seeds=[3, 4, 3])
    assert rows[:2] == rows[4:] == generate(stage, prompts[:1], 20, EOD, Sampling(1.0, seed=3), 2)
    assert len({tuple(row) for row in rows}) == 4


def test_a_row_ends_before_the_end_of_a_document(tmp_path: Path) -> None:
    stage = stage_of("llama", tmp_path)
    (whole,) = generate(stage, PROMPTS[:1], 12, -1, GREEDY)
    eod = whole[len(PROMPTS[0]) + 4]
    first = whole.index(eod, len(PROMPTS[0]))
    assert generate(stage, PROMPTS, 12, eod, GREEDY)[0] == whole[:first]


def test_what_exceeds_the_positions_is_seen_through_the_last_ones(tmp_path: Path) -> None:
    stage = stage_of("gpt2", tmp_path)
    most = stage.model.max_position_embeddings
    reason = why_no_cache(stage, PROMPTS, most)
    assert (
        reason == f"{most + 11} tokens are more than model.max_position_embeddings={most}; the model sees the last ones"
    )
    (row,) = generate(stage, PROMPTS[:1], most, -1, GREEDY)
    for end in (most - 1, len(row) - 1):
        assert row[end] == next_logits(stage, [row[max(end - most, 0) : end]])[0].argmax()


def test_what_keeps_no_keys_is_told(tmp_path: Path) -> None:
    stage = stage_of("phi3, short samples", tmp_path)
    assert why_no_cache(stage, PROMPTS, 40) == "longrope turns keys in another way beyond 40 tokens"
    assert not why_no_cache(stage, PROMPTS, 20)
    stage.layers["1"] = nn.Identity()
    assert why_no_cache(stage, PROMPTS, 2) == "the mixer of layer 1 has no cache"


class RunningSum(nn.Module):
    """A recurrence in place of attention: the sum of the columns so far. Its cache is the last sum, [b, h]."""

    def forward(self, x_sbh: Tensor, *_: Any) -> Tensor:
        return x_sbh.cumsum(0)

    def with_cache(self, first_b: Tensor, capacity: int) -> nn.Module:
        assert not first_b.any(), "prompts of one length"
        return CachedSum()


class CachedSum(nn.Module):
    total_bh: Tensor | float = 0.0

    def forward(self, x_sbh: Tensor, *_: Any) -> Tensor:
        sums_sbh = self.total_bh + x_sbh.cumsum(0)
        self.total_bh = sums_sbh[-1]
        return sums_sbh


def test_layers_of_other_sizes_have_caches_of_their_own() -> None:
    """Of other numbers of heads, of values wider or narrower than keys, with windows and sinks."""
    model = replace(LLAMA, family="tests.test_width_heads:WINDOW_FAMILY", qk_norm=False)
    check_cache(tiny_models.build(tiny_models.config(model), context.single()).eval(), PROMPTS)


def test_a_mixer_without_keys_brings_a_cache_of_its_own(tmp_path: Path) -> None:
    stage = stage_of("llama", tmp_path)
    for layer in stage.layers.values():
        layer.attention = RunningSum()
    rows = [PROMPTS[0], PROMPTS[0][::-1]]
    assert not why_no_cache(stage, rows, 12)
    check_cache(stage, rows)


@pytest.mark.parametrize("changes", [{"top_k": 7}, {"top_p": 0.6}, {"top_p": 0.05}, {"top_k": 9, "top_p": 0.5}])
def test_draws_are_among_the_tokens_of_transformers(changes: dict[str, Any]) -> None:
    warpers = pytest.importorskip("transformers.generation.logits_process", reason="not run: needs transformers")
    logits = 3 * torch.randn(5, 200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    theirs = logits / 0.7
    if "top_k" in changes:
        theirs = warpers.TopKLogitsWarper(changes["top_k"])(None, theirs)
    if "top_p" in changes:
        theirs = warpers.TopPLogitsWarper(changes["top_p"])(None, theirs)
    ours = probabilities(logits, Sampling(temperature=0.7, **changes))
    torch.testing.assert_close(ours, theirs.softmax(-1))


def test_meaningless_values_are_told() -> None:
    lines = Sampling(temperature=-1.0, top_k=-2, top_p=0.0).problems()
    assert [line.partition(":")[0] for line in lines] == ["--temperature -1.0", "--top_k -2", "--top_p 0.0"]
    assert not Sampling().problems()


def test_the_program_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tools import generate as program

    monkeypatch.setattr("sys.argv", ["generate.py", "nowhere", "--prompt", "a", "b", "--top_p", "2"])
    with pytest.raises(SystemExit):
        program.main()
    assert "--top_p 2.0: must be above 0" in capsys.readouterr().err
    assert issubclass(program.Arguments, Sampling)
    assert ConfigError
