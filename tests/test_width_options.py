"""A family outside the tree with options of its own: flags, files, help, refusals, checkpoints and training."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest
import torch
from megapar_models.families.llama import LLAMA as LLAMA_FAMILY
from megapar_models.families.llama import LlamaModel, LlamaStage
from megapar_models.forward import ForwardContext
from megapar_models.layer_kind import LayerKind
from megapar_models.registry import FAMILIES, FOR_OPTIONS, validate, weight_options
from torch import Tensor

from megapar.base.errors import ConfigError
from megapar.config.compatible import function_changes
from megapar.config.files import Resolved, load, to_toml
from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION, ModelConfig
from megapar.config.model_rules import Families
from megapar.config.options import Config, default_config, flatten
from megapar.declare import context
from tests.support import program, tiny_models
from tests.support.grid import LLAMA
from tests.support.width import in_each_layout, trains_as_one_process

TOY = f"{__name__}:FAMILY"


@dataclass(frozen=True)
class Scales:
    """Numbers that parts of the model are multiplied by."""

    embedding: float = field(default=1.0, metadata=OF_FUNCTION)
    """Multiplies the embeddings of tokens."""


@dataclass(frozen=True)
class ScaledModel(LlamaModel):
    scales: Scales = field(default_factory=Scales)
    norms_after: tuple[int, ...] = ()
    """Numbers of the layers with norms behind their branches."""


class ScaledStage(LlamaStage[ScaledModel]):
    @classmethod
    def layer_kind(cls, model: ScaledModel, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        return replace(kind, norms="after" if number in model.norms_after else "before")

    def embed(self, context: ForwardContext) -> Tensor:
        return super().embed(context) * self.model.scales.embedding


def scale_problems(config: Config, model: ScaledModel) -> Iterator[str]:
    if model.scales.embedding > 100:
        yield problem(config, "model.scales.embedding", "embeddings would overflow in fp16; use at most 100")


FAMILY = replace(LLAMA_FAMILY, name="scaled", stage=ScaledStage, options=ScaledModel, problems=scale_problems)

MODEL = ScaledModel(**{f.name: getattr(LLAMA, f.name) for f in fields(LLAMA)})
MODEL = replace(MODEL, family=TOY, scales=Scales(3.0), norms_after=(1, 2))
FLAGS = ("--model.family", TOY, "--model.scales.embedding", "3", "--model.norms_after", "1", "2")


def test_options_of_a_family_change_what_it_computes() -> None:
    batch = tiny_models.batch(MODEL)
    embedded = []
    for scale in (1.0, 3.0):
        config = tiny_models.config(replace(MODEL, scales=Scales(scale)))
        stage = tiny_models.build(config, context.single())
        embedded.append(stage.embed(ForwardContext(batch, {}, 0, stage.layers.rule.attention())))
    assert torch.equal(embedded[1], embedded[0] * 3)


@in_each_layout
def test_options_of_a_family_reach_its_layers(sizes: dict[str, object]) -> None:
    trains_as_one_process(MODEL, sizes)


def refusal(*argv: str, families: Families = FOR_OPTIONS) -> str:
    with pytest.raises(ConfigError) as refused:
        load(argv, families=families)
    return str(refused.value)


def test_flags_and_files_set_options_of_the_family_and_config_toml_keeps_them(tmp_path: Path) -> None:
    """In any order: the family is found first, in the flags or in a base of the file."""
    config = load([*FLAGS[2:], *FLAGS[:2]], families=FOR_OPTIONS).config
    assert config.model == ScaledModel(family=TOY, scales=Scales(3.0), norms_after=(1, 2))
    (tmp_path / "base.toml").write_text(f'[model]\nfamily = "{TOY}"\n')
    (tmp_path / "run.toml").write_text(
        'base = "base.toml"\n[model]\nnorms_after = [1, 2]\n[model.scales]\nembedding = 3\n'
    )
    assert load(["--config", str(tmp_path / "run.toml")], families=FOR_OPTIONS).config == config
    text = to_toml(Resolved(config, dict.fromkeys(flatten(config), "flag")))
    assert "[model.scales]\nembedding = 3.0  # flag\n" in text
    (tmp_path / "again.toml").write_text(text)
    assert load(["--config", str(tmp_path / "again.toml")], families=FOR_OPTIONS).config == config


def test_help_prints_the_options_of_the_family(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(["--help", *FLAGS], families=FOR_OPTIONS)
    out = capsys.readouterr().out
    assert "--model.scales.embedding" in out
    assert "Multiplies the embeddings of tokens." in out
    with pytest.raises(SystemExit):
        load(["--help"], families=FOR_OPTIONS)
    assert "--model.scales.embedding" not in capsys.readouterr().out


def test_wrong_values_are_refused_in_one_line(tmp_path: Path) -> None:
    assert refusal(*FLAGS[:2], "--model.norms_after", "x") == "--model.norms_after x: expected whole numbers"
    (tmp_path / "c.toml").write_text(f'[model]\nfamily = "{TOY}"\nscales = 3\n')
    said = "model.scales: is a section, not an option: write [model.scales]"
    assert refusal("--config", str(tmp_path / "c.toml")).endswith(said)
    assert refusal("--model.norms_after", "1").startswith("--model.norms_after: no such flag")  # without the family
    lines = []
    for wrong in (Scales(-1.0), Scales(101.0)):
        with pytest.raises(ConfigError) as refused:
            validate(Config(replace(MODEL, scales=wrong)), 1)
        lines.append(str(refused.value))
    assert lines == [
        "model.scales.embedding=-1.0: must be above 0, such as 1.0",
        "model.scales.embedding=101.0: embeddings would overflow in fp16; use at most 100",
    ]
    with pytest.raises(ConfigError, match="family scaled has options of its own; make it a ScaledModel"):
        validate(Config(LlamaModel(family=TOY)), 1)
    assert validate(Config(ModelConfig(family=TOY)), 1) == validate(Config(ScaledModel(family=TOY)), 1)


def test_an_option_of_another_family_is_refused_by_its_name_and_dropped_at_its_default(tmp_path: Path) -> None:
    """As in the config.toml of a run that states it."""
    families = Families({**FAMILIES, "scaled": FAMILY}, lambda name: {**FAMILIES, "scaled": FAMILY}[name])
    said = "family llama does not read it; scaled does"
    assert refusal("--model.norms_after", "1", families=families) == f"--model.norms_after: {said}"
    file = tmp_path / "c.toml"
    file.write_text("[model.scales]\nembedding = 2.0\n")
    assert refusal("--config", str(file), families=families) == f"{file}:2: model.scales.embedding = 2.0: {said}"
    file.write_text("[model]\nnorms_after = []\n[model.scales]\nembedding = 1\n")
    assert load(["--config", str(file)], families=families).config == Config(LlamaModel())


def test_an_option_that_decides_the_function_is_no_reason_to_refuse_the_weights() -> None:
    config = validate(Config(MODEL), 1)
    assert weight_options(config)["norms_after"] == (1, 2)
    assert "scales.embedding" not in weight_options(config)
    saved = flatten(validate(Config(replace(MODEL, scales=Scales(2.0))), 1))
    assert function_changes(saved, config) == ["model.scales.embedding (2.0 | 3.0)"]
    # A checkpoint from before the option had its default.
    assert function_changes({}, default_config(ScaledModel)) == []


def test_a_run_saves_and_resumes_with_options_of_its_family(tmp_path: Path) -> None:
    """From its own config.toml. With another value of the option it is refused."""
    ended = program.run(*FLAGS, "--train.steps", "2", "--checkpoint.every", "1", cwd=tmp_path)
    assert ended.code == 0, ended.err
    ended = program.run("--config", "run/config.toml", "--train.steps", "3", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "resumed step 2" in ended.out
    ended = program.run(*FLAGS[:4], "--model.norms_after", "1", "--train.steps", "4", cwd=tmp_path)
    assert ended.code == 4
    assert "model.norms_after: [1, 2] | [1]" in ended.err


def test_options_that_are_no_dataclass_are_refused() -> None:
    """Its fields would otherwise be no options, in silence."""

    class Plain(ModelConfig):
        norms_after: tuple[int, ...] = ()

    with pytest.raises(ValueError, match="Plain: the options of family scaled must be a frozen dataclass"):
        replace(FAMILY, options=Plain)
