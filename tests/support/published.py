"""Compares a tiny random model of transformers with its conversion: logits, gradients, training, fields, way back."""

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from megapar_models.build import build_stages
from megapar_models.convert.config_json import WITHOUT_EFFECT, from_hugging_face, names_of
from megapar_models.convert.exported import hf_recipes
from megapar_models.convert.parity import causal_class
from megapar_models.convert.saved import load_model
from megapar_models.registry import validate
from megapar_models.stage import Stage
from megapar_tools.verify import logical
from torch import Tensor

from megapar.base.errors import ConfigError
from megapar.config.model_options import ModelConfig, MoEConfig
from megapar.config.options import Config, OptimizerConfig, TrainConfig
from megapar.declare import context
from megapar.declare.batch import MicroBatch
from megapar.step.state import TrainState
from megapar.step.step import train_step
from megapar.train.trainer import assemble
from tests.support import close, judges
from tests.support.config_fields import OF_FILES, others
from tests.support.hugging_face import assert_same_tensors
from tests.support.model_types import LENGTH, VOCABULARY
from tests.support.rules import gradients
from tools.convert_checkpoint import HfToNative, NativeToHf, hf_to_native, native_to_hf

DOCUMENTS = (9, 1, LENGTH - 10)
STEPS = 5
# An update of AdamW is about g / (|g| + eps). With an eps above the rounding of gradients it is well-conditioned.
ADAMW = OptimizerConfig(lr=5e-2, schedule="constant", eps=1e-2, clip_grad=0.5, zero_stage=0)
# Fields that change the loss or the first weights, and no logits.
OF_TRAINING = {"router_aux_loss_coef", "output_router_logits", "initializer_range", "router_jitter_noise"}
# What transformers raises for a value that it does not have itself.
THEIR_REFUSALS: tuple[type[Exception], ...] = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, ZeroDivisionError, ImportError),
    StrictDataclassError,
)


class Published:
    """A model_type with the fields of a config.json: a model of transformers with random weights, and its conversion.

    Every tensor is random, also those that transformers starts at 0 or 1, and the bias of a router. All of it is fp32.
    """

    def __init__(self, folder: Path, kind: str, fields: Mapping[str, Any]):
        self.folder = folder
        self.theirs = random_model(kind, fields)
        self.theirs.save_pretrained(folder / "theirs")
        self.raw: dict[str, Any] = json.loads((folder / "theirs/config.json").read_text())
        self.stage = converted(folder / "theirs", folder / "ours")
        self.batch = random_batch()
        with torch.no_grad():
            self.logits_bsv = self.theirs(self.batch.tokens_bs).logits

    def built(self, raw: Mapping[str, Any]) -> Stage:
        """Our model of a config.json, with the converted weights."""
        stage = whole_stage(model_of(raw))
        take_over(stage, self.stage)
        return stage

    def check_logits_and_gradients(self) -> None:
        """In fp32: logits differ by at most 1e-6 of their norm, the loss by 1e-6, each gradient by 1e-5 of its norm."""
        expected_bsv = self.theirs(self.batch.tokens_bs).logits
        assert expected_bsv.abs().max() > 0.5
        assert_equal_logits(self.stage, self.batch, expected_bsv)
        expected = (losses_of(expected_bsv, self.batch) * self.batch.weights_bs.flatten()).sum()
        expected.backward()
        loss = self.stage(None, self.batch)
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        # Gradients take the way of the weights.
        with torch.no_grad():
            weights = {name: param.clone() for name, param in self.theirs.named_parameters()}
            for name, param in self.theirs.named_parameters():
                assert param.grad is not None or not param.requires_grad, name
                param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
                param.grad = None
            self.theirs.save_pretrained(self.folder / "gradients")
            for name, param in self.theirs.named_parameters():
                param.copy_(weights[name])
        wanted = weights_of(converted(self.folder / "gradients", self.folder / "ours_gradients"))
        close.assert_close(gradients(self.stage), wanted)
        # An expert that no token chose has none.
        nothing = [name for name, gradient in wanted.items() if not gradient.any() and ".experts." not in name]
        assert not nothing, nothing

    def check_packed(self) -> None:
        """Documents in one sample compute what each computes alone."""
        tokens_bs = self.batch.tokens_bs[:1]
        packed = MicroBatch.of_samples(tokens_bs, tokens_bs, self.batch.weights_bs[:1], torch.arange(1))
        starts = torch.tensor([0, *DOCUMENTS]).cumsum(0).int()
        with torch.no_grad():
            alone = [self.theirs(tokens).logits for tokens in tokens_bs.split(DOCUMENTS, 1)]
        assert_equal_logits(self.stage, replace(packed, starts=starts), torch.cat(alone, 1))

    def check_way_back(self, written_as: str = "", saved_as: Mapping[str, str] = MappingProxyType({})) -> None:
        """Tensors come back bit by bit, with the config.json of the import and with our own.

        transformers reads our config.json as the same model, and so do we. It has the same model_type, or `written_as`.
        Parts of names are as in `saved_as`.
        """
        native_to_hf(NativeToHf(self.folder / "ours", self.folder / "copied", verify=False))
        assert_same_tensors(self.folder / "copied", self.folder / "theirs", saved_as)
        (self.folder / "ours/config.json").unlink()
        native_to_hf(NativeToHf(self.folder / "ours", self.folder / "again", verify=False))
        assert_same_tensors(self.folder / "again", self.folder / "theirs", saved_as)
        raw = json.loads((self.folder / "again/config.json").read_text())
        assert raw["model_type"] == (written_as or self.raw["model_type"])
        assert model_of(raw) == self.stage.model
        again = loaded(self.folder / "again", torch.float32)
        with torch.no_grad():
            found_bsv = again(self.batch.tokens_bs).logits
        # Not bit by bit: products depend on where in memory the mapped weights begin.
        assert (found_bsv - self.logits_bsv).norm() <= 1e-6 * self.logits_bsv.norm()

    def check_adamw(self) -> None:
        """Some steps of our optimizer and of torch's: each tensor has moved alike.

        Their gradients agree to 1e-5 of their norm, and so does the first move. The gradients of later steps are of
        weights that differ by a little: 1e-4 of the move leaves room for that, and a wrong rate of decay, moment, clip
        or divisor is a thousand times as much.
        """
        config = validate(Config(without_balance(self.stage.model), train=training(), optimizer=ADAMW), 1)
        stage, state = state_of(config, self.stage)
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, param in self.theirs.named_parameters():
            # Matrices and embeddings decay; norms, biases, sinks and A_log do not, also with two axes or more. The name
            # of a module above (DBRX's norm_attn_norm) says nothing.
            own = ".".join(name.split(".")[-2:])
            groups[param.ndim > 1 and not re.search("norm|bias|A_log", own)].append(param)
        rates = [{"params": params, "weight_decay": ADAMW.weight_decay * decays} for decays, params in groups.items()]
        before = {name: param.detach().clone() for name, param in self.theirs.named_parameters()}
        theirs = torch.optim.AdamW(rates, lr=ADAMW.lr, betas=ADAMW.betas, eps=ADAMW.eps)
        for step in range(STEPS):
            batch = random_batch(step)
            train_step(state, [batch])
            theirs.zero_grad()
            losses = losses_of(self.theirs(batch.tokens_bs).logits, batch) * batch.weights_bs.flatten()
            (losses.sum() / batch.weights_bs.sum()).backward()
            torch.nn.utils.clip_grad_norm_(self.theirs.parameters(), ADAMW.clip_grad)
            theirs.step()
        self.theirs.save_pretrained(self.folder / "trained")
        with torch.no_grad():
            for name, param in self.theirs.named_parameters():
                param.copy_(before[name])
        started = weights_of(self.stage)
        expected = weights_of(converted(self.folder / "trained", self.folder / "ours_trained"))
        moves = {name: weights - started[name] for name, weights in weights_of(stage).items()}
        close.assert_close(moves, {name: weights - started[name] for name, weights in expected.items()}, rtol=1e-4)

    def check_bf16(self) -> None:
        """In bf16 our logits are as near to those of fp32 as the logits of transformers are.

        They are not the same bit by bit: we round less often, such as after a norm's weight and not before it too. A
        token near the border of two experts may go to the other one, which the median over tokens does not see.
        """
        rounded = loaded(self.folder / "theirs", torch.bfloat16)
        config = validate(Config(self.stage.model, train=training(precision="bf16")), 1)
        (stage,) = build_stages(config, context.single()).values()
        take_over(stage, self.stage)
        batches = [random_batch(seed) for seed in range(8)]
        with torch.no_grad():
            found_bsv = torch.cat([logits_of(stage, batch) for batch in batches])
            theirs_bsv = torch.cat([rounded(batch.tokens_bs).logits for batch in batches])
            # Some of its models make fp32 of rounded logits.
            assert torch.equal(theirs_bsv.bfloat16(), theirs_bsv)
            rounded.float()
            exact_bsv = torch.cat([rounded(batch.tokens_bs).logits for batch in batches])
        assert found_bsv.dtype == torch.bfloat16
        ours_bs, noise_bs = ((logits_bsv - exact_bsv).norm(dim=-1) for logits_bsv in (found_bsv, theirs_bsv))
        assert ours_bs.median() <= 1.1 * noise_bs.median(), f"{ours_bs.median() / noise_bs.median()} of their error"
        assert ours_bs.norm() <= 1.5 * noise_bs.norm(), f"{ours_bs.norm() / noise_bs.norm()} of their error"

    def check_fields(self, changes: Sequence[Mapping[str, Any]], refused: Mapping[str, Any]) -> None:
        """Fields with other values give other logits, and those of transformers. `refused` ones are refused by name."""
        for field, value in refused.items():
            with pytest.raises(ConfigError, match=field):
                from_hugging_face({**self.raw, field: value})
        for change in changes:
            assert self._outcome({**self.raw, **change}, 1e-6) == "changed", f"{change} has no effect in transformers"

    def check_every_field(self, unread: Sequence[str], unlike: Sequence[str] = ()) -> None:
        """Each field with other values is refused in words, or gives the logits of transformers.

        Fields that never change them are `unread`, of training, or listed as without effect. Those that are `unlike`
        change logits of transformers alone.
        """
        same = set()
        seen: set[str] = set()
        for field in sorted(self.raw.keys() - OF_FILES - {*unlike}):
            outcomes = set()
            for value in others(self.raw[field]):
                raw = {**self.raw, field: value}
                said = refusal(raw)
                # Automatic values may be extreme, such as scores a dozen times as large: then rounding grows.
                outcomes.add("refused" if said else self._outcome(raw, 1e-5))
                # A line may name another field that contradicts this one, or our option.
                named = {field, *self.raw, *names_in(value), *vars(self.stage.model)}
                assert not said or named & {*re.findall(r"\w+", said)}, (field, value, said)
            seen |= outcomes
            if outcomes == {"same"}:
                same.add(field)
        assert {"refused", "changed"} <= seen
        listed = {*OF_TRAINING, *WITHOUT_EFFECT, *names_of(self.stage.model).without_effect}
        listed |= {"max_position_embeddings", "model_max_length"}  # a bound that no sample here reaches
        assert not {*unread} ^ (same - listed), (unread, same - listed)

    def _outcome(self, raw: Mapping[str, Any], tolerance: float) -> str:
        """What another config.json gives: other tensors, none in transformers, the same logits or changed ones.

        Raises AssertionError if our logits differ from those of transformers by more than `tolerance` of their norm.
        """
        model = model_of(raw)
        if shapes_of(model) != shapes_of(self.stage.model):
            return "other tensors"
        fields = dict(raw)
        try:
            theirs = transformers_model(fields.pop("model_type"), fields)
            theirs.load_state_dict(self.theirs.state_dict())
            with torch.no_grad():
                expected_bsv = theirs(self.batch.tokens_bs).logits
        except THEIR_REFUSALS:
            return "transformers refuses"
        stage = whole_stage(model)
        take_over(stage, self.stage)
        assert_equal_logits(stage, self.batch, expected_bsv, tolerance)
        return "changed" if (expected_bsv - self.logits_bsv).abs().max() > 1e-4 else "same"


def transformers_model(kind: str, fields: Mapping[str, Any]) -> Any:
    """A model of transformers in fp32 with its eager attention."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    config = transformers.AutoConfig.for_model(kind, **deepcopy(dict(fields)))  # it changes rope_parameters in place
    if kind in judges.JUDGES:
        return judges.JUDGES[kind](config).eval()
    found = causal_class(config)
    make = getattr(found, "from_config", None) or found._from_config
    return make(config, attn_implementation="eager").eval()


def random_model(kind: str, fields: Mapping[str, Any]) -> Any:
    """A model of transformers with noise on every tensor: a dropped, swapped or constant one would show."""
    model = transformers_model(kind, fields)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in tensors_of(model).items():
            noise = torch.randn(tensor.shape, generator=generator) * 0.1
            tensor.copy_(noise + tensor if tensor.ndim == 1 else noise)
            if name.endswith("A_log"):
                # States that last. With decays up to e^-16 a token, transformers' sums of them lose half their digits.
                tensor.copy_(noise - 2)
    return model


def config_of(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that transformers writes for these fields."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    raw: dict[str, Any] = json.loads(transformers.AutoConfig.for_model(kind, **deepcopy(dict(fields))).to_json_string())
    return raw


def published_model(kind: str, fields: Mapping[str, Any]) -> ModelConfig:
    """Our options of the config.json that transformers writes for these fields."""
    return model_of(config_of(kind, fields))


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    """The model of a folder as transformers loads it. In bf16 its grouped experts would need round sizes."""
    transformers = pytest.importorskip("transformers", reason="not run: needs transformers, pip install '.[convert]'")
    if (judge := judges.judge_of(folder)) is not None:
        return judge.from_pretrained(folder, dtype)
    options = {"dtype": dtype, "attn_implementation": "eager", "experts_implementation": "eager"}
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    return causal_class(config).from_pretrained(folder, local_files_only=True, **options).eval()


def tensors_of(theirs: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters of their model, the biases by which its routers choose, and the factors of layers."""
    ends = ("e_score_correction_bias", ".expert_bias", ".layer_scalar")
    routers = {name: x for name, x in theirs.named_buffers() if name.endswith(ends)}
    return {**dict(theirs.named_parameters()), **routers}


def model_of(raw: Mapping[str, Any]) -> ModelConfig:
    """The validated options of a config.json."""
    return validate(Config(from_hugging_face(raw), train=training()), 1).model


def training(**options: Any) -> TrainConfig:
    return TrainConfig(seq_length=LENGTH, steps=STEPS, global_batch_size=2, micro_batch_size=2, **options)


def whole_stage(model: ModelConfig) -> Stage:
    config = validate(Config(model, train=training()), 1)
    (stage,) = build_stages(config, context.single()).values()
    return stage


def refusal(raw: Mapping[str, Any]) -> str:
    """What a config.json is refused with; "" if it is not."""
    try:
        model_of(raw)
    except ConfigError as error:
        return str(error)
    return ""


def shapes_of(model: ModelConfig) -> dict[str, Any]:
    """The shape of each tensor of their files."""
    return {name: recipe.shape for name, recipe in hf_recipes(model).items()}


def names_in(value: Any) -> list[str]:
    """The names of fields inside an object of a config.json."""
    if not isinstance(value, dict):
        return []
    return [name for key, item in value.items() for name in (key, *names_in(item))]


def converted(source: Path, native: Path) -> Stage:
    """Our model of a folder of Hugging Face, by way of a native checkpoint."""
    hf_to_native(HfToNative(source, native, verify=False))
    return load_model(native)[1]


def weights_of(stage: Stage) -> dict[str, Tensor]:
    """Every logical tensor of a whole model."""
    return logical.assemble([logical.held([stage], context.single())])


@torch.no_grad()
def take_over(stage: Stage, source: Stage) -> None:
    """Give a model the weights of another, and the biases of its routers."""
    logical.fill([stage], weights_of(source))
    for name, buffer in stage.named_buffers():
        buffer.copy_(source.get_buffer(name))


def without_balance(model: ModelConfig) -> ModelConfig:
    """The model without what evens out the load of experts: transformers adds no loss for it unless asked."""
    experts = model.experts
    if experts is None:
        return model
    # A bias moves by less than any score differs from the next.
    quiet = {"router_bias_update_rate": 1e-30} if experts.has_selection_bias else {"balance": "none"}
    defaults = MoEConfig()
    experts = replace(experts, router_aux_loss_coef=defaults.router_aux_loss_coef, **quiet)
    return replace(model, moe=experts)  # type: ignore[call-arg]


def state_of(config: Config, source: Stage) -> tuple[Stage, TrainState]:
    """A model with the weights of another, and its state of training in one process."""
    ctx = context.single()
    stages = build_stages(config, ctx)
    (stage,) = stages.values()
    take_over(stage, source)
    return stage, assemble(config, ctx, stages)


def losses_of(logits_bsv: Tensor, batch: MicroBatch) -> Tensor:
    return F.cross_entropy(logits_bsv.flatten(0, 1), batch.targets_bs.flatten(), reduction="none")


@cache
def random_batch(seed: int = 0) -> MicroBatch:
    """Two samples; every target has a weight of its own."""
    tokens_bs = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(2 * seed + 1))
    weights_bs = 0.1 + torch.rand((2, LENGTH), generator=torch.Generator().manual_seed(2 * seed + 2))
    return MicroBatch.of_samples(tokens_bs[:, :-1], tokens_bs[:, 1:], weights_bs, torch.arange(2))


def logits_of(stage: Stage, batch: MicroBatch) -> Tensor:
    """Logits [b, s, v], without those of padding."""
    logits_sbv: Tensor = stage.logits(stage.hidden_states(None, batch))
    return logits_sbv.transpose(0, 1)[..., :VOCABULARY]


def assert_equal_logits(stage: Stage, batch: MicroBatch, expected_bsv: Tensor, tolerance: float = 1e-6) -> None:
    with torch.no_grad():
        difference = (logits_of(stage, batch) - expected_bsv).norm() / expected_bsv.norm()
    assert difference <= tolerance, f"logits differ by {difference:.2g} of their norm"
