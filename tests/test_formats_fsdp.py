"""Training by torch's FSDP2 goes on here, and the other way round: the same losses and weights, moments included."""

import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.convert.config_json import from_hugging_face, names_of
from megapar_models.convert.exported import hf_recipes
from megapar_models.convert.formats.dcp_target import write_dcp
from megapar_models.convert.formats.fsdp import open_store, open_torch, read_fsdp
from megapar_models.convert.formats.native import write_native
from megapar_models.convert.formats.torch_export import OTHERWISE_IN_MEMORY, export_fsdp, in_memory, renamed
from megapar_models.convert.huggingface import their_tensor
from megapar_models.convert.saved import whole_config
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError
from megapar.checkpoint.format import read_manifest
from megapar.config.options import Config
from megapar.optimizer.schedule import learning_rate
from tests.support import foreign_folders, fsdp_run, going_on
from tests.support.distributed import run_ranks
from tests.support.foreign_folders import store_of
from tests.support.model_types import TYPES

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="not run: needs transformers, pip install '.[convert]'"
)
SAMPLES, LENGTH, VOCABULARY = 4, 10, 67
FIELDS: dict[str, Any] = {
    **{"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6},
    **{"intermediate_size": 40, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "rms_norm_eps": 1e-5},
}
LLAMA = {"model_type": "llama", **FIELDS, "tie_word_embeddings": False}
TIED = {**LLAMA, "tie_word_embeddings": True}
MIXTURE = {
    **{"model_type": "qwen3_moe", **FIELDS, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"norm_topk_prob": True, "router_aux_loss_coef": 0.0, "tie_word_embeddings": False},
}


def tokens_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)


def model_of(fields: Mapping[str, Any]) -> Any:
    model = from_hugging_face(fields)
    if model.num_experts:
        # Without the loss of balance, which counts over a step here and over a micro-batch there.
        moe: Any = model.moe  # type: ignore[attr-defined]
        coef = type(moe)().router_aux_loss_coef
        return replace(model, moe=replace(moe, balance="none", router_aux_loss_coef=coef))  # type: ignore[call-arg]
    return model


def of_app(
    fields: Mapping[str, Any], world: int, steps: range, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a training by FSDP2."""
    train = partial(fsdp_run.train, fields, steps, tokens_of, nested=fsdp_run.of_app, **options)
    found: tuple[list[float], dict[str, Tensor]] = run_ranks(world, train)[0]
    return found


def require_equal(checkpoint: Path, theirs: Mapping[str, Tensor], model: Any) -> None:
    """The weights of a native checkpoint are those of a model of transformers in memory."""
    manifest = read_manifest(checkpoint)
    names = in_memory(hf_recipes(model), names_of(model))
    copies = {"lm_head.weight"} if model.tie_word_embeddings else set()
    assert names.keys() | copies == theirs.keys()
    for name, parameter in names.items():
        for box, recipe in parameter.parts:
            ours = their_tensor(checkpoint, manifest, recipe)
            torch.testing.assert_close(theirs[name][box.slices].reshape(ours.shape), ours, rtol=0, atol=1e-6)


CASES = [
    pytest.param(LLAMA, 2, False, {"tp": 2}, id="untied"),
    pytest.param(TIED, 1, True, {"pp": 2}, id="tied-flat"),
    pytest.param(MIXTURE, 2, True, {"dp": 2}, id="mixture-flat"),
]


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize(("fields", "world", "flat", "layout"), CASES)
def test_training_of_fsdp2_goes_on_here(
    fields: dict[str, Any], world: int, flat: bool, layout: dict[str, int], tmp_path: Path
) -> None:
    of_app(fields, world, range(3), save=tmp_path / "dcp", flat=flat)
    wanted, weights = of_app(fields, 1, range(3, 13), load=tmp_path / "dcp", flat=flat)
    config = going_on.config_of(model_of(fields), SAMPLES, LENGTH, 0.1 if flat else 0.0, **layout)
    contents = read_fsdp(open_store(tmp_path / "dcp"), config.model)
    assert contents.title == "FSDP2 with Hugging Face's names, names behind 'app.model.'"
    assert contents.position.updates == 3
    write_native(contents, config, tmp_path / "native")
    losses, end = going_on.go_on(config, tmp_path / "native", tmp_path / "run", 10, tokens_of)
    torch.testing.assert_close(losses, wanted, rtol=0, atol=1e-6)
    require_equal(end, weights, config.model)


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize(("fields", "world", "flat", "layout"), CASES)
def test_training_here_goes_on_with_fsdp2(
    fields: dict[str, Any], world: int, flat: bool, layout: dict[str, int], tmp_path: Path
) -> None:
    config = going_on.config_of(model_of(fields), SAMPLES, LENGTH, 0.1 if flat else 0.0, **layout)
    _, begun = going_on.go_on(config, None, tmp_path / "begun", 3, tokens_of)
    wanted, end = going_on.go_on(config, begun, tmp_path / "run", 10, tokens_of)
    export_fsdp(begun, tmp_path / "dcp")
    train = partial(fsdp_run.train, fields, range(3, 13), tokens_of, load=tmp_path / "dcp", flat=flat)
    losses, weights = run_ranks(world, train)[0]
    torch.testing.assert_close(losses, wanted, rtol=0, atol=1e-6)
    require_equal(end, weights, config.model)


@pytest.mark.slow
@needs_transformers
def test_muon_of_torch_goes_on_here_and_back(tmp_path: Path) -> None:
    """Its momentum is the mean of the gradients, where ours is their sum."""
    of_app(LLAMA, 1, range(3), save=tmp_path / "dcp", flat=True, muon=True)
    wanted, weights = of_app(LLAMA, 1, range(3, 13), load=tmp_path / "dcp", flat=True, muon=True)
    config = going_on.config_of(model_of(LLAMA), SAMPLES, LENGTH, name="muon", tp=2)
    write_native(open_torch(tmp_path / "dcp", config.model), config, tmp_path / "native")
    losses, end = going_on.go_on(config, tmp_path / "native", tmp_path / "run", 10, tokens_of)
    torch.testing.assert_close(losses, wanted, rtol=0, atol=1e-6)
    require_equal(end, weights, config.model)
    export_fsdp(end, tmp_path / "back")  # with the rates of the run
    train = partial(fsdp_run.train, LLAMA, range(13, 23), tokens_of, load=tmp_path / "back", flat=True, muon=True)
    losses, weights = run_ranks(1, train)[0]
    wanted, end = going_on.go_on(config, end, tmp_path / "later", 10, tokens_of)
    torch.testing.assert_close(losses, wanted, rtol=0, atol=1e-6)
    require_equal(end, weights, config.model)


@pytest.mark.slow
@needs_transformers
def test_names_in_memory_are_those_of_transformers() -> None:
    """Of every model type that a folder is written for, and read of in these names."""
    import transformers

    transformers.logging.set_verbosity_error()
    compared = 0
    for row, case in TYPES.items():
        fields = {"model_type": case.model_type, **case.fields}
        model = whole_config(from_hugging_face(fields)).model
        try:
            with torch.device("meta"):
                config = transformers.AutoConfig.for_model(case.model_type, **case.fields)
                made = transformers.AutoModelForCausalLM.from_config(config)
        except ValueError:
            continue  # transformers has the class for images too, and none for the text alone
        theirs = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
        if model.family in OTHERWISE_IN_MEMORY:
            continue
        names = names_of(model)
        ours = {name: parameter.shape for name, parameter in in_memory(hf_recipes(model), names).items()}
        copies = {renamed(name, names) for name in names.tied} if model.tie_word_embeddings else set()
        assert ours == {name: shape for name, shape in theirs.items() if name not in copies}, row
        contents = read_fsdp(store_of({f"model.{name}": shape for name, shape in theirs.items()}), model)
        contents.check()
        compared += 1
    assert compared > 130


def config_of(fields: Mapping[str, Any]) -> Config:
    return whole_config(model_of(fields))


@pytest.mark.parametrize("fields", [TIED, MIXTURE], ids=["tied", "mixture"])
@pytest.mark.parametrize("matrices", ["adamw", "muon"])
def test_a_native_checkpoint_comes_back(fields: dict[str, Any], matrices: str, tmp_path: Path) -> None:
    """Bit for bit; but torch's Muon keeps the mean of gradients, and ours the sum, so two numbers are rounded."""
    config = config_of(fields)
    native = foreign_folders.random_native(config, tmp_path, matrices)
    assert export_fsdp(native, tmp_path / "dcp") == []
    store = open_store(tmp_path / "dcp")
    rate = learning_rate(4, 16, config.optimizer, config.train)
    assert store.values["optim.param_groups.0.lr"] == rate < config.optimizer.lr
    assert store.values["optim.param_groups.0.initial_lr"] == config.optimizer.lr
    assert store.values["optim.param_groups.model.norm.weight.weight_decay"] == 0.0
    contents = read_fsdp(store, config.model)
    assert set(contents.states) == {"exp_avg", "exp_avg_sq"} | ({"momentum"} if matrices == "muon" else set())
    write_native(contents, config, tmp_path / "again")
    foreign_folders.require_equal(native, tmp_path / "again", rtol=2e-7 if matrices == "muon" else 0.0)


def test_a_mixture_goes_on_with_the_loss_of_balance(tmp_path: Path) -> None:
    """Its counts of the step before are in no other framework: they begin at 0, as in a first step."""
    model = from_hugging_face({**MIXTURE, "router_aux_loss_coef": 0.01})
    config = going_on.config_of(model, SAMPLES, LENGTH)
    assert config.model.moe.balance == "global"  # type: ignore[attr-defined]
    held = with_moments(shapes(fields=MIXTURE))
    write_native(read_fsdp(store_of(held), config.model), config, tmp_path / "native")
    losses, _ = going_on.go_on(config, tmp_path / "native", tmp_path / "run", 1, tokens_of)
    assert losses == pytest.approx([math.log(VOCABULARY)])  # of weights that are all 0


def test_a_checkpoint_without_moments_is_written_without_an_optimizer(tmp_path: Path) -> None:
    config = config_of(LLAMA)
    native = foreign_folders.random_native(config, tmp_path)
    export_fsdp(native, tmp_path / "dcp", moments=False)
    contents = read_fsdp(open_store(tmp_path / "dcp"), config.model)
    assert (contents.states, contents.position.updates, contents.left_out) == ([], 0, [])


def test_rates_that_a_checkpoint_does_not_state_are_told(tmp_path: Path) -> None:
    """Such as one that was converted itself."""
    config = config_of(LLAMA)
    write_native(read_fsdp(store_of(with_moments(shapes())), config.model), config, tmp_path / "native")
    (note,) = export_fsdp(tmp_path / "native", tmp_path / "dcp")
    assert note.endswith("does not state optimizer.lr: rates, betas and decay in param_groups are megapar's defaults")


def test_what_torch_cannot_go_on_with_is_refused(tmp_path: Path) -> None:
    config = config_of(LLAMA)
    spectral = replace(config, optimizer=replace(config.optimizer, muon_scale="spectral"))
    native = foreign_folders.random_native(spectral, tmp_path, "muon")
    with pytest.raises(ConfigError, match=r"optimizer\.muon_scale=spectral: torch's Muon has adam_rms, keller"):
        export_fsdp(native, tmp_path / "dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["native"]


def shapes(prefix: str = "model.", fields: Mapping[str, Any] = LLAMA, **changes: Any) -> dict[str, Any]:
    """The tensors of a folder without an optimizer: shapes or values."""
    model = config_of(fields).model
    return {**{f"{prefix}{name}": recipe.shape for name, recipe in hf_recipes(model).items()}, **changes}


def with_moments(of: Mapping[str, Any], step: int = 5, *, prefix: str = "model.", **changes: Any) -> dict[str, Any]:
    states = {}
    for name, shape in of.items():
        inside = name.removeprefix(prefix)
        states |= {f"optim.state.{inside}.{kind}": shape for kind in ("exp_avg", "exp_avg_sq")}
        states[f"optim.state.{inside}.step"] = torch.tensor(float(step))
    return {**of, **states, **changes}


@pytest.mark.parametrize("prefix", ["", "model.", "app.model.", "pytorch_model_fsdp_0.model.", "a.b.c."])
def test_any_prefix_is_found(prefix: str) -> None:
    contents = read_fsdp(store_of(with_moments(shapes(prefix), prefix=prefix)), config_of(LLAMA).model)
    contents.check()
    assert contents.position.updates == 5
    assert contents.title.endswith(f"names behind '{prefix}'" if prefix else "no prefix")


def test_two_folders_are_one_checkpoint(tmp_path: Path) -> None:
    """As accelerate writes them: the model in one, the optimizer in another."""
    config = config_of(LLAMA)
    native = foreign_folders.random_native(config, tmp_path)
    export_fsdp(native, tmp_path / "both")
    whole = open_store(tmp_path / "both")
    parts: dict[str, dict[str, Tensor]] = {"pytorch_model_fsdp_0": {}, "optimizer_0": {}}
    for name in whole.tensors:
        folder = "pytorch_model_fsdp_0" if name.startswith("model.") else "optimizer_0"
        parts[folder][name.replace("optim.", "optimizer.", 1)] = whole.read(name)
    for folder, tensors in parts.items():
        write_dcp(tmp_path / "checkpoint" / folder, tensors, {})
    contents = open_torch(tmp_path / "checkpoint", config.model)
    write_native(contents, config, tmp_path / "again")
    foreign_folders.require_equal(native, tmp_path / "again")


@pytest.mark.parametrize(
    ("tensors", "values", "message"),
    [
        ({f"{name}_": shape for name, shape in shapes().items()}, {}, "no tensor has a name of the model, such as lm_"),
        ({**shapes(), **shapes("ema.")}, {}, "holds the model more than once: behind 'ema.' and behind 'model.'"),
        (
            shapes(**{"model.model.layers.0.self_attn.q_proj.bias": (24,)}),
            {},
            "holds model.model.layers.0.self_attn.q_proj.bias, which the model of --config does not have",
        ),
        (
            with_moments(shapes(), **{"optim.state.lm_head.weight.step": torch.tensor(7.0)}),
            {},
            "5 by optim.state.model.embed_tokens.weight.step",
        ),
        (
            with_moments(shapes(), **{"optim.state.lm_head.weight.max_exp_avg_sq": (67, 24)}),
            {},
            "its optimizer has states max_exp_avg_sq, and is neither AdamW nor Muon",
        ),
        (
            with_moments(shapes(), **{"optim.state.lm_head.weight.step": torch.tensor(2.5)}),
            {},
            "optim.state.lm_head.weight.step is 2.5, and no count of steps",
        ),
        (
            with_moments(shapes(), **{"optim.state.lm_head.weight.step": torch.tensor(torch.inf)}),
            {},
            "optim.state.lm_head.weight.step is inf, and no count of steps",
        ),
        (
            shapes(**{"optim.state.lm_head.weight.momentum_buffer": (67, 24)}),
            {},
            "Muon's momentum has the factors of no group: one number from 0 to below 1",
        ),
        (
            shapes(**{"optim.state.lm_head.weight.momentum_buffer": (67, 24)}),
            {"optim.param_groups.0.momentum": 0.9, "optim.param_groups.1.momentum": [0.9]},
            "Muon's momentum has the factors 0.9, [0.9]",
        ),
        (
            shapes(**{"optim.state.lm_head.weight.momentum_buffer": (67, 24)}),
            {"optim.param_groups.0.momentum": 0.9, "optim.param_groups.0.dampening": 0},
            "its momentum is that of SGD",
        ),
    ],
    ids=["names", "twice", "unexpected", "steps", "states", "half", "infinite", "muon", "factor", "sgd"],
)
def test_other_folders_are_refused_by_name(tensors: dict[str, Any], values: dict[str, Any], message: str) -> None:
    model = config_of(LLAMA).model
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_fsdp(store_of(tensors, values), model)


def test_states_that_are_not_understood_are_left_where_they_are_with_weights_only() -> None:
    held = with_moments(shapes(), **{"optim.state.lm_head.weight.max_exp_avg_sq": (67, 24)})
    contents = read_fsdp(store_of(held), config_of(LLAMA).model, weights_only=True)
    contents.check()
    assert contents.left_out == ["the state of the optimizer, if there is one"]


def test_a_tied_copy_must_be_equal() -> None:
    held = shapes(fields=TIED)
    table = torch.rand(67, 24)
    held["model.model.embed_tokens.weight"] = table
    model = config_of(TIED).model
    read_fsdp(store_of({**held, "model.lm_head.weight": table.clone()}), model).check()
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings, but model\.lm_head\.weight differs"):
        read_fsdp(store_of({**held, "model.lm_head.weight": table + 1}), model)


def test_a_stack_of_more_experts_than_the_model_has_takes_no_memory() -> None:
    """A shape of no elements needs no bytes in a file, whatever it says of experts."""
    held = shapes(fields=MIXTURE, **{"model.model.layers.0.mlp.experts.gate_up_proj": torch.empty(1 << 40, 2, 0)})
    with pytest.raises(CheckpointError, match=r"holds model\.model\.layers\.0\.mlp\.experts\.gate_up_proj, which the"):
        read_fsdp(store_of(held), config_of(MIXTURE).model)
