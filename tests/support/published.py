"""Compares tiny random models of transformers with their conversions: logits, every gradient, and the way back."""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megapar_models.build import build_stages
from megapar_models.convert.config_json import WITHOUT_EFFECT, from_hugging_face, names_of
from megapar_models.registry import validate
from megapar_models.stage import Stage
from torch import Tensor

from megapar import context
from megapar.batch import MicroBatch
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.load import Reader
from megapar.config.options import Config, ModelConfig, TrainConfig
from megapar.errors import ConfigError
from megapar.params import MAIN
from megapar.verify import logical
from tests.support import close
from tests.support.hugging_face import assert_same_tensors
from tests.support.rules import gradients
from tools.convert_checkpoint import HfToNative, NativeToHf, hf_to_native, native_to_hf

LENGTH = 24
VOCABULARY = 131
# Sizes that differ from each other, and an eps that shows.
SIZES: dict[str, Any] = {
    **{"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 76, "max_position_embeddings": 64, "vocab_size": VOCABULARY, "initializer_range": 0.1},
    "pad_token_id": None,  # transformers would not train the embedding of that token
}
# Fields that decide which tensors there are, of which shapes: a conversion has all of them, or fails.
OF_SIZE = {*SIZES, "head_dim", "model_type", "attention_bias", "mlp_bias", "tie_word_embeddings", "use_qk_norm"}
OF_SIZE |= {"num_experts", "num_local_experts", "shared_intermediate_size"}
# Those of the loss that balances experts.
OF_TRAINING = {"router_aux_loss_coef", "output_router_logits"}


class Published:
    """A model_type with the fields of a config.json: a model of transformers with random weights, and its conversion.

    Every tensor is random, also those that transformers starts at 0 or 1.
    """

    def __init__(self, folder: Path, kind: str, fields: Mapping[str, Any]):
        self.folder = folder
        self.theirs = transformers_model(kind, fields)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.theirs.parameters():
                noise = torch.randn(param.shape, generator=generator) * 0.15
                param.copy_(noise + param if param.ndim == 1 else noise)
        self.theirs.save_pretrained(folder / "theirs")
        self.raw: dict[str, Any] = json.loads((folder / "theirs/config.json").read_text())
        self.tensors = converted(folder / "theirs", folder / "ours")
        self.stage = self.built(self.raw)
        self.batch = random_batch()

    def built(self, raw: Mapping[str, Any]) -> Stage:
        """Our model of a config.json, with the converted weights."""
        stage = whole_stage(model_of(raw))
        logical.fill([stage], self.tensors)
        return stage

    def check_logits_and_gradients(self) -> None:
        """In fp32: logits differ by at most 1e-6 of their norm, and each gradient by 1e-5 of its own."""
        expected_bsv = self.theirs(self.batch.tokens_bs).logits
        assert expected_bsv.abs().max() > 0.5
        assert_equal_logits(self.stage, self.batch, expected_bsv)
        losses = F.cross_entropy(expected_bsv.flatten(0, 1), self.batch.targets_bs.flatten(), reduction="none")
        (losses * self.batch.weights_bs.flatten()).sum().backward()
        self.stage(None, self.batch).backward()
        # Gradients take the way of the weights.
        with torch.no_grad():
            weights = {name: param.clone() for name, param in self.theirs.named_parameters()}
            for param in self.theirs.parameters():
                assert param.grad is not None
                param.copy_(param.grad)
            self.theirs.save_pretrained(self.folder / "gradients")
            for name, param in self.theirs.named_parameters():
                param.copy_(weights[name])
        close.assert_close(gradients(self.stage), converted(self.folder / "gradients", self.folder / "ours_gradients"))

    def check_packed(self) -> None:
        """Documents in one sample compute what each computes alone."""
        lengths = (9, 1, LENGTH - 10)
        tokens_bs = self.batch.tokens_bs[:1]
        packed = MicroBatch.of_samples(tokens_bs, tokens_bs, self.batch.weights_bs[:1], torch.arange(1))
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        with torch.no_grad():
            alone = [self.theirs(tokens).logits for tokens in tokens_bs.split(lengths, 1)]
        assert_equal_logits(self.stage, replace(packed, starts=starts), torch.cat(alone, 1))

    def check_way_back(self) -> None:
        """Tensors come back bit by bit. transformers reads our config.json as the same model."""
        (self.folder / "ours/config.json").unlink()
        native_to_hf(NativeToHf(self.folder / "ours", self.folder / "again", verify=False))
        assert_same_tensors(self.folder / "again", self.folder / "theirs")
        options = {"dtype": torch.float32, "attn_implementation": "eager", "local_files_only": True}
        again = type(self.theirs).from_pretrained(self.folder / "again", **options)
        with torch.no_grad():
            expected_bsv = self.theirs(self.batch.tokens_bs).logits
            found_bsv = again.eval()(self.batch.tokens_bs).logits
        # Not bit by bit: products depend on where in memory the mapped weights begin.
        assert (found_bsv - expected_bsv).norm() <= 1e-6 * expected_bsv.norm()
        assert model_of(json.loads((self.folder / "again/config.json").read_text())) == self.stage.model

    def check_fields(self, changes: Sequence[Mapping[str, Any]], refused: Mapping[str, Any]) -> None:
        """Fields with other values give other logits, and those of transformers. Each of `refused` is refused by name.

        All other fields are sizes, of training, or listed as without effect.
        """
        listed = {*OF_SIZE, *OF_TRAINING, *WITHOUT_EFFECT, *names_of(self.stage.model).without_effect}
        unchanged = self.raw.keys() - listed - refused.keys() - {field for change in changes for field in change}
        assert not unchanged, unchanged
        for field, value in refused.items():
            with pytest.raises(ConfigError, match=field):
                from_hugging_face({**self.raw, field: value})
        with torch.no_grad():
            base_bsv = self.theirs(self.batch.tokens_bs).logits
            for change in changes:
                raw = {**self.raw, **change}
                theirs = transformers_model(raw.pop("model_type"), raw)
                theirs.load_state_dict(self.theirs.state_dict())
                other_bsv = theirs(self.batch.tokens_bs).logits
                assert (other_bsv - base_bsv).abs().max() > 1e-4, f"{change} has no effect in transformers"
                assert_equal_logits(self.built({**self.raw, **change}), self.batch, other_bsv)


def transformers_model(kind: str, fields: Mapping[str, Any]) -> Any:
    """A model of transformers in fp32 with its eager attention."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    config = transformers.AutoConfig.for_model(kind, **deepcopy(dict(fields)))  # it changes rope_parameters in place
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def model_of(raw: Mapping[str, Any]) -> ModelConfig:
    """The validated options of a config.json."""
    return validate(Config(from_hugging_face(raw), train=TrainConfig(seq_length=LENGTH)), 1).model


def whole_stage(model: ModelConfig) -> Stage:
    config = validate(Config(model, train=TrainConfig(seq_length=LENGTH)), 1)
    (stage,) = build_stages(config, context.single()).values()
    return stage


def converted(source: Path, native: Path) -> dict[str, Tensor]:
    """The logical tensors of a folder of Hugging Face, by way of a native checkpoint."""
    hf_to_native(HfToNative(source, native, verify=False))
    manifest = read_manifest(native)
    with Reader(native, manifest) as reader:
        return {name.removeprefix(f"{MAIN}."): reader.tensor(name) for name in manifest.tensors}


@cache
def random_batch() -> MicroBatch:
    """Two samples; every target has a weight of its own."""
    tokens_bs = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    weights_bs = 0.1 + torch.rand((2, LENGTH), generator=torch.Generator().manual_seed(2))
    return MicroBatch.of_samples(tokens_bs[:, :-1], tokens_bs[:, 1:], weights_bs, torch.arange(2))


def assert_equal_logits(stage: Stage, batch: MicroBatch, expected_bsv: Tensor) -> None:
    with torch.no_grad():
        found_sbv = stage.logits(stage.hidden_states(None, batch))
    difference = (found_sbv.transpose(0, 1)[..., :VOCABULARY] - expected_bsv).norm() / expected_bsv.norm()
    assert difference <= 1e-6, f"logits differ by {difference:.2g} of their norm"
