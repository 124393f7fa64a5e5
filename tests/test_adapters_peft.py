"""Adapters against PEFT's on a model of transformers, in one process."""

import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megapar_models.build import build_stages
from megapar_models.convert import adapters as files
from megapar_models.convert import peft_beside, peft_config, stacked_experts, typed_fields
from megapar_models.convert.saved import load_model, saved_config
from megapar_models.counts import WholeModel
from megapar_models.registry import validate
from safetensors.torch import load_file, save_file
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError
from megapar.checkpoint.format import read_manifest
from megapar.checkpoint.load import Reader
from megapar.config.options import AdapterConfig, CheckpointConfig, Config, DataConfig
from megapar.declare import context
from megapar.step.step import train_step
from megapar.train.saver import Saver
from megapar.train.trainer import start
from tests.support import adapters
from tests.support.distributed import run_ranks
from tests.support.grid import Layout, make_context, micro_batches
from tests.support.model_types import TYPES
from tests.support.options import load
from tests.support.published import (
    assert_equal_logits,
    converted,
    model_of,
    random_batch,
    random_model,
    training,
    weights_of,
)
from tools.convert_checkpoint import HfToNative, hf_to_native

pytestmark = pytest.mark.slow  # as all that needs the extra judges
peft = pytest.importorskip("peft", reason="not run: needs peft, pip install '.[judges]'")

# From our words to the last words of their modules.
THEIR_NAMES = {
    **{letter: f"self_attn.{letter}_proj" for letter in "qkvo"},
    **{word: f"mlp.{word}_proj" for word in ("gate", "up", "down")},
}


class Peft:
    """A model of transformers with adapters of PEFT."""

    def __init__(self, theirs: Any, adapter: AdapterConfig):
        targets = adapter.targets or tuple(THEIR_NAMES)
        config = peft.LoraConfig(
            r=adapter.rank,
            lora_alpha=adapter.alpha,
            use_rslora=adapter.rslora,
            use_dora=adapter.dora,
            target_modules=[THEIR_NAMES[word].partition(".")[2] for word in targets],
        )
        self.model = peft.get_peft_model(theirs, config)
        self.factors: dict[str, Tensor] = {}
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                number, _, rest = name.partition("layers.")[2].partition(".")
                module, _, kind = rest.removesuffix(".default.weight").removesuffix("_vector").rpartition(".")
                word = next(word for word, module_of in THEIR_NAMES.items() if module_of == module)
                part = module.partition(".")[0].replace("self_attn", "attention")
                self.factors[f"layers.{number}.{part}.{word}.{kind.lower()}"] = param

    def logits(self, tokens_bs: Tensor) -> Tensor:
        logits_bsv: Tensor = self.model(tokens_bs).logits
        return logits_bsv


@pytest.mark.parametrize(
    "adapter",
    [
        AdapterConfig(rank=3, alpha=7.0),
        AdapterConfig(rank=4, alpha=8.0, targets=("q", "v", "down"), rslora=True),
        AdapterConfig(rank=3, alpha=7.0, dora=True),
    ],
    ids=["all", "some, rslora", "dora"],
)
def test_adapters_are_those_of_peft(adapter: AdapterConfig, tmp_path: Path) -> None:
    case = TYPES["llama"]
    theirs = random_model(case.model_type, case.fields)
    theirs.save_pretrained(tmp_path / "theirs")
    base = converted(tmp_path / "theirs", tmp_path / "ours")
    other = Peft(theirs, adapter)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for factor in other.factors.values():
            noise = torch.randn(factor.shape, generator=generator) * 0.1
            # Their magnitudes begin as the norms of W's rows.
            factor.copy_(factor + noise if factor.ndim == 1 else noise)
    weights = weights_of(base)
    tensors = {**weights, **{name: factor.detach().clone() for name, factor in other.factors.items()}}
    for name in other.factors:
        if name.endswith(".lora_magnitude"):
            # Ours are what is added to those norms.
            tensors[name] -= weights[f"{name.removesuffix('.lora_magnitude')}.weight"].norm(dim=1)
    state = adapters.make_state(base.model, adapter, tensors)
    adapters.check(state, other)


def trained(folder: Path, base: Path, adapter: AdapterConfig, trainable: tuple[str, ...] = (), **moe: Any) -> Path:
    """A checkpoint of two steps of adapters on the native checkpoint `base`. `moe` are options of model.moe."""
    model = saved_config(read_manifest(base)).model
    if moe:
        model = replace(model, moe=replace(model.experts, **moe))
    options = {"train": replace(training(), trainable=trainable), "optimizer": adapters.ADAMW, "adapter": adapter}
    config = validate(
        Config(model, run_dir=str(folder), checkpoint=CheckpointConfig(init_from=str(base)), **options), 1
    )
    ctx = context.single()
    state, _ = start(config, ctx, build_stages(config, ctx))
    for step in range(2):
        train_step(state, [random_batch(step)])
    (path,) = Saver(state, folder).save(state)
    return path


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("kind", ["llama", "glm4"])
def test_files_go_to_peft_and_back_bit_by_bit_and_merge_as_peft_merges(kind: str, dora: bool, tmp_path: Path) -> None:
    """Fault merge-rounded-twice: the sum is made in fp32, and PEFT's own in fp32 is the same.

    PEFT's magnitudes have the norms of W's rows in them, so ours come back as precise as those.
    """
    case = TYPES[kind]
    adapter = AdapterConfig(rank=3, alpha=7.0, targets=("q", "v", "o"), dora=dora)
    theirs = random_model(case.model_type, case.fields)
    theirs.save_pretrained(tmp_path / "theirs")
    hf_to_native(HfToNative(tmp_path / "theirs", tmp_path / "base", verify=False))
    ours = trained(tmp_path / "run", tmp_path / "base", adapter)
    files.native_to_peft(files.NativeToPeft(ours, tmp_path / "peft", str(tmp_path / "theirs"), tmp_path / "base"))
    model = peft.PeftModel.from_pretrained(theirs, tmp_path / "peft")
    assert all(param.any() for name, param in model.named_parameters() if ".lora_B." in name)
    # Back from our own files, and from those that PEFT writes.
    model.save_pretrained(tmp_path / "saved")
    for number, source in enumerate(("peft", "saved")):
        back = tmp_path / f"back{number}"
        files.peft_to_native(files.PeftToNative(tmp_path / source, tmp_path / "base", back))
        found, expected = read_manifest(back), read_manifest(ours)
        names = files.factors_of(expected)
        assert files.factors_of(found) == names
        with Reader(back, found) as reader, Reader(ours, expected) as wanted:
            for name in names:
                one, other = (each.tensor(f"main.{name}") for each in (reader, wanted))
                assert torch.equal(one, other) or ((one - other).abs().max() < 1e-6 and name.endswith("magnitude")), (
                    name
                )
        files.native_to_peft(files.NativeToPeft(back, tmp_path / f"again{number}", "", tmp_path / "base"))
        first, second = (load_file(tmp_path / of / files.PEFT_WEIGHTS) for of in ("peft", f"again{number}"))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
    files.merge(files.Merge(ours, tmp_path / "base", tmp_path / "merged"))
    files.merge(files.Merge(tmp_path / "back1", tmp_path / "base", tmp_path / "again"))
    stage = load_model(tmp_path / "merged")[1]
    batch = random_batch()
    with torch.no_grad():
        assert_equal_logits(stage, batch, model(batch.tokens_bs).logits)
    model.merge_and_unload().save_pretrained(tmp_path / "their_merge")
    expected_weights = weights_of(converted(tmp_path / "their_merge", tmp_path / "their_native"))
    for name, weight in weights_of(stage).items():
        torch.testing.assert_close(weight, expected_weights[name], rtol=0, atol=1e-7, msg=name)
    again = weights_of(load_model(tmp_path / "again")[1])
    rounding = 1e-6 if dora else 0.0
    assert all((weight - again[name]).abs().max() <= rounding for name, weight in weights_of(stage).items())


def losses_of(config: Config) -> list[float]:
    ctx = make_context(config)
    state, _ = start(config, ctx, build_stages(config, ctx))
    return [train_step(state, micro_batches(config, ctx, step)).loss for step in range(3)]


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_run_starts_from_an_adapter_of_peft(dora: bool, tmp_path: Path) -> None:
    """Fault adapters-started-stale: loss, gradients and steps of a new AdamW are PEFT's, then the same in layouts."""
    case = TYPES["llama"]
    adapter = AdapterConfig(rank=3, alpha=7.0, targets=("q", "v", "o"), dora=dora)
    theirs = random_model(case.model_type, case.fields)
    theirs.save_pretrained(tmp_path / "theirs")
    hf_to_native(HfToNative(tmp_path / "theirs", tmp_path / "base", verify=False))
    other = Peft(theirs, adapter)
    with torch.no_grad():
        for factor in other.factors.values():
            noise = torch.randn(factor.shape, generator=torch.Generator().manual_seed(factor.numel())) * 0.1
            factor.copy_(factor + noise if factor.ndim == 1 else noise)
    other.model.save_pretrained(tmp_path / "peft")
    files.peft_to_native(files.PeftToNative(tmp_path / "peft", tmp_path / "base", tmp_path / "start"))
    begin = replace(adapter, init_from=str(tmp_path / "start"))
    options = CheckpointConfig(init_from=str(tmp_path / "base"))
    layout = Layout(saved_config(read_manifest(tmp_path / "base")).model, micro_batch_size=3, adapter=begin)
    config = replace(layout.config(), checkpoint=options)
    losses = losses_of(config)
    for split in (replace(layout, tp=2, sequence_parallel=True), replace(layout, pp=2, zero_stage=2)):
        found, *_ = run_ranks(2, losses_of, replace(split.config(), checkpoint=options))
        assert found == pytest.approx(losses, rel=1e-6)
    whole = Config(layout.model, train=training(), optimizer=adapters.ADAMW, adapter=begin, checkpoint=options)
    whole = validate(whole, 1)
    ctx = context.single()
    state, notes = start(whole, ctx, build_stages(whole, ctx))
    assert notes[-1] == f"started from the adapters of {tmp_path / 'start'}, step 0"
    adapters.check(state, other)


STACKED = AdapterConfig(rank=3, alpha=7.0, targets=("q", "gate", "up", "down"))
EXPERTS = [
    ("qwen3_moe", STACKED),
    ("olmoe", replace(STACKED, rslora=True, targets=("gate", "up"))),
    ("mixtral", replace(STACKED, targets=("o", "down"))),
    ("deepseek_v3", replace(STACKED, targets=("o", "gate", "up", "down"))),
]


@pytest.mark.parametrize(("kind", "adapter"), EXPERTS)
def test_adapters_of_experts_go_to_stacks_of_peft_and_back(kind: str, adapter: AdapterConfig, tmp_path: Path) -> None:
    """Bit by bit, from our files and from those that PEFT writes; its logits are those of our merged weights."""
    case = TYPES[kind]
    theirs = random_model(case.model_type, case.fields)
    theirs.save_pretrained(tmp_path / "theirs")
    hf_to_native(HfToNative(tmp_path / "theirs", tmp_path / "base", verify=False))
    # A bias that moves would have no place in PEFT's files.
    moe = {"router_bias_update_rate": 0.0} if kind == "deepseek_v3" else {}
    ours = trained(tmp_path / "run", tmp_path / "base", adapter, **moe)
    files.native_to_peft(files.NativeToPeft(ours, tmp_path / "peft", stacked_experts=True))
    model = peft.PeftModel.from_pretrained(theirs, tmp_path / "peft")
    assert all(param.any() for name, param in model.named_parameters() if ".lora_B." in name)
    model.save_pretrained(tmp_path / "saved")
    expected = read_manifest(ours)
    names = files.factors_of(expected)
    for source in ("peft", "saved"):
        back = tmp_path / f"from_{source}"
        files.peft_to_native(files.PeftToNative(tmp_path / source, tmp_path / "base", back))
        found = read_manifest(back)
        assert files.factors_of(found) == names
        with Reader(back, found) as reader, Reader(ours, expected) as wanted:
            assert all(torch.equal(reader.tensor(f"main.{name}"), wanted.tensor(f"main.{name}")) for name in names)
    files.merge(files.Merge(tmp_path / "from_saved", tmp_path / "base", tmp_path / "merged"))
    batch = random_batch()
    with torch.no_grad():
        assert_equal_logits(load_model(tmp_path / "merged")[1], batch, model(batch.tokens_bs).logits)


def test_gate_and_up_of_peft_may_share_a(tmp_path: Path) -> None:
    """An adapter that PEFT itself made has one A of rank r for both. With another scale than the rest it is refused."""
    case = TYPES["qwen3_moe"]
    theirs = random_model(case.model_type, case.fields)
    theirs.save_pretrained(tmp_path / "theirs")
    hf_to_native(HfToNative(tmp_path / "theirs", tmp_path / "base", verify=False))
    options = {"target_modules": ["v_proj"], "target_parameters": [*stacked_experts.PARAMETERS], "lora_alpha": 6}
    model = peft.get_peft_model(theirs, peft.LoraConfig(r=3, **options))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".lora_B." in name:
                param.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(tmp_path / "peft")
    files.peft_to_native(files.PeftToNative(tmp_path / "peft", tmp_path / "base", tmp_path / "ours"))
    files.merge(files.Merge(tmp_path / "ours", tmp_path / "base", tmp_path / "merged"))
    batch = random_batch()
    with torch.no_grad():
        assert_equal_logits(load_model(tmp_path / "merged")[1], batch, model(batch.tokens_bs).logits)
    document = {"r": 3, "lora_alpha": 6, "target_parameters": ["mlp.experts.gate_up_proj"]}
    for pattern, said in (
        ({"rank_pattern": {"gate_up_proj": 6}}, "alpha_pattern=None (another scale than of the other matrices)"),
        (
            {"rank_pattern": {"gate_up_proj": 4}},
            r"rank_pattern={'gate_up_proj': 4} (r, or 2 r of gate and up, is read)",
        ),
        ({"rank_pattern": {"q_proj": 6}}, "rank_pattern of q_proj"),
        ({"target_parameters": ["feed_forward.w"]}, "target_parameters=feed_forward.w"),
    ):
        with pytest.raises(ConfigError) as caught:
            peft_config.adapter_from_peft({**document, **pattern})
        assert str(caught.value) == f"adapter_config.json: not read: {said}"


@pytest.mark.parametrize(
    ("kind", "targets", "said"),
    [
        ("granitemoe", ("gate", "up"), "transformers keeps these experts in another form; merge the adapters instead"),
        ("qwen3_moe", ("gate",), "PEFT has one adapter for gate and up, and only one of them has one"),
    ],
)
def test_experts_without_a_stack_in_peft_are_refused(
    kind: str, targets: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    case = TYPES[kind]
    random_model(case.model_type, case.fields).save_pretrained(tmp_path / "theirs")
    hf_to_native(HfToNative(tmp_path / "theirs", tmp_path / "base", verify=False))
    ours = trained(tmp_path / "run", tmp_path / "base", AdapterConfig(rank=2, targets=targets))
    with pytest.raises(ConfigError, match=said):
        files.native_to_peft(files.NativeToPeft(ours, tmp_path / "peft", stacked_experts=True))


def test_an_adapter_of_a_tied_head_is_refused(tmp_path: Path) -> None:
    """Fault merge-changes-tied-head."""
    case = TYPES["llama, scaled rotary"]
    assert case.fields["tie_word_embeddings"]
    random_model(case.model_type, case.fields).save_pretrained(tmp_path / "theirs")
    hf_to_native(HfToNative(tmp_path / "theirs", tmp_path / "base", verify=False))
    for word in ("lm_head", "embed_tokens"):
        theirs = random_model(case.model_type, case.fields)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", word])
        peft.get_peft_model(theirs, config).save_pretrained(tmp_path / word, save_embedding_layers=False)
        with pytest.raises(CheckpointError, match=r"does not fit .*base: .*the head is the embedding"):
            files.peft_to_native(files.PeftToNative(tmp_path / word, tmp_path / "base", tmp_path / "never"))


def test_what_peft_has_in_another_form_is_refused(tmp_path: Path) -> None:
    case = TYPES["phi3"]
    theirs = random_model(case.model_type, case.fields)
    theirs.save_pretrained(tmp_path / "theirs")
    hf_to_native(HfToNative(tmp_path / "theirs", tmp_path / "base", verify=False))
    ours = trained(tmp_path / "run", tmp_path / "base", AdapterConfig(rank=2))
    with pytest.raises(ConfigError, match=r"keeps layers.0.attention.\w with others in .*qkv_proj; merge it instead"):
        files.native_to_peft(files.NativeToPeft(ours, tmp_path / "peft"))
    files.merge(files.Merge(ours, tmp_path / "base", tmp_path / "merged"))
    with pytest.raises(CheckpointError, match=r"were not trained on .*merged"):
        files.merge(files.Merge(ours, tmp_path / "merged", tmp_path / "twice"))
    with pytest.raises(CheckpointError, match=r"base: holds no adapters"):
        files.merge(files.Merge(tmp_path / "base", tmp_path / "base", tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"adapter_config.json: not read: bias='all', target_parameters=a"):
        peft_config.adapter_from_peft({"r": 2, "lora_alpha": 4, "bias": "all", "target_parameters": ["a"]})


# What is trained beside the factors

SOME = AdapterConfig(rank=2, alpha=5.0, targets=("q", "v"))
WITH_ALL_ELSE = ("*.lora_*", "*norm*", "head*", "embedding*", "layers.1.attention.o.*")


def on_a_base(kind: str, folder: Path) -> Any:
    """A model of transformers, in `folder`/theirs, and its native checkpoint, `folder`/base."""
    theirs = random_model(TYPES[kind].model_type, TYPES[kind].fields)
    theirs.save_pretrained(folder / "theirs")
    hf_to_native(HfToNative(folder / "theirs", folder / "base", verify=False))
    return theirs


def stored(path: Path) -> dict[str, Tensor]:
    manifest = read_manifest(path)
    with Reader(path, manifest) as reader:
        return {name: reader.tensor(name) for name in manifest.tensors if name.startswith("main.")}


@pytest.mark.parametrize(
    ("kind", "trainable"),
    [
        ("llama", WITH_ALL_ELSE),
        ("llama, scaled rotary", ("*.lora_*", "*norm*", "embedding*")),
        pytest.param("gemma2", ("*.lora_*", "embedding*", "layers.*.mlp.down.weight"), marks=pytest.mark.slow),
        pytest.param("qwen2", ("*.lora_*", "head*"), marks=pytest.mark.slow),
    ],
)
def test_what_is_trained_beside_the_factors_is_in_the_files_of_peft(
    kind: str, trainable: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault adapters-trained-extras-lost: PEFT's model is the trained one. The files come back bit by bit."""
    theirs = on_a_base(kind, tmp_path)
    ours = trained(tmp_path / "run", tmp_path / "base", SOME, trainable)
    files.native_to_peft(files.NativeToPeft(ours, tmp_path / "peft"))
    files.merge(files.Merge(ours, tmp_path / "base", tmp_path / "merged"))
    batch = random_batch()
    model = peft.PeftModel.from_pretrained(theirs, tmp_path / "peft")
    with torch.no_grad():
        assert_equal_logits(load_model(tmp_path / "merged")[1], batch, model(batch.tokens_bs).logits)
    model.save_pretrained(tmp_path / "saved")
    expected = stored(ours)
    assert len(expected) > len(files.factors_of(read_manifest(ours)))
    for source in ("peft", "saved"):
        files.peft_to_native(files.PeftToNative(tmp_path / source, tmp_path / "base", tmp_path / f"from_{source}"))
        found = stored(tmp_path / f"from_{source}")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
    _, _, line = capsys.readouterr().out.partition("train on from them:\n")
    assert_starts(line.splitlines()[0], tmp_path)


def assert_starts(line: str, folder: Path) -> None:
    """A run with the options of the line starts from adapters."""
    flags = shlex.split(line)
    said = load(["--config", str(folder / "base/config.toml"), *flags]).config
    config = validate(replace(said, train=replace(training(), trainable=said.train.trainable), data=DataConfig()), 1)
    ctx = context.single()
    _, notes = start(config, ctx, build_stages(config, ctx))
    assert notes[-1].startswith("started from the adapters of")


@pytest.mark.parametrize(
    ("kind", "names", "said"),
    [
        ("llama", ["layers.0.attention.q.weight"], "PEFT keeps .*q_proj or adapts it, not both"),
        ("starcoder2", ["layers.0.mlp.down.weight"], "PEFT keeps all of .*c_proj, of which only a part was trained"),
        ("mixtral", ["layers.0.mlp.router.weight"], "PEFT keeps no router"),
        ("qwen3_moe", ["layers.1.mlp.experts.2.down.weight"], "PEFT keeps no router and no expert"),
        ("gpt_oss", ["layers.0.attention.sinks"], "PEFT would keep all of model.layers.0.self_attn"),
    ],
)
def test_what_no_module_of_peft_holds_alone_is_refused(kind: str, names: list[str], said: str) -> None:
    model = model_of({"model_type": TYPES[kind].model_type, **TYPES[kind].fields})
    assert names[0] in WholeModel(model).tensors()
    with pytest.raises(ConfigError, match=f"^native-to-peft: {names[0]} was trained .*{said}.*merge instead$"):
        peft_beside.modules_to_save(model, {*names}, {"layers.0.attention.q"})


def test_biases_that_moved_are_refused(tmp_path: Path) -> None:
    on_a_base("deepseek_v3", tmp_path)
    base = read_manifest(tmp_path / "base")
    model = saved_config(base).model
    with pytest.raises(ConfigError, match=r"router.bias moves in training .*merge instead"):
        peft_beside.trained_beside(base, model, base.tensors)
    still = replace(model, moe=replace(model.experts, router_bias_update_rate=0.0))
    assert peft_beside.trained_beside(base, still, []) >= {"head.weight"}


def test_modules_to_save_of_which_the_base_is_no_part_are_refused(tmp_path: Path) -> None:
    """An embedding trained without the head that is tied to it, and a tensor of another base."""
    theirs = on_a_base("llama, scaled rotary", tmp_path)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    model = peft.get_peft_model(theirs, config)
    model.save_pretrained(tmp_path / "peft")
    with pytest.raises(CheckpointError, match=r"one matrix here, and only one of them was trained"):
        files.peft_to_native(files.PeftToNative(tmp_path / "peft", tmp_path / "base", tmp_path / "never"))
    tensors = load_file(tmp_path / "peft" / files.PEFT_WEIGHTS)
    save_file(tensors | {"base_model.model.model.norm.weight": torch.ones(40)}, tmp_path / "peft" / files.PEFT_WEIGHTS)
    with pytest.raises(CheckpointError, match=r"does not fit .*model.norm.weight"):
        files.peft_to_native(files.PeftToNative(tmp_path / "peft", tmp_path / "base", tmp_path / "never"))


def test_an_adapter_of_a_head_is_merged_as_peft_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PEFT adds the head of the base to such files. That of another base is refused."""
    theirs = on_a_base("llama", tmp_path)
    model = peft.get_peft_model(theirs, peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".lora_B." in name:
                param.normal_(std=0.1)
    model.save_pretrained(tmp_path / "peft")
    name = "base_model.model.lm_head.base_layer.weight"
    tensors = load_file(tmp_path / "peft" / files.PEFT_WEIGHTS)
    assert name in tensors
    files.peft_to_native(files.PeftToNative(tmp_path / "peft", tmp_path / "base", tmp_path / "ours"))
    assert "a run trains no adapter of head" in capsys.readouterr().out
    files.merge(files.Merge(tmp_path / "ours", tmp_path / "base", tmp_path / "merged"))
    batch = random_batch()
    with torch.no_grad():
        assert_equal_logits(load_model(tmp_path / "merged")[1], batch, model(batch.tokens_bs).logits)
    tensors[name][3, 4] += 1
    save_file(tensors, tmp_path / "peft" / files.PEFT_WEIGHTS)
    with pytest.raises(CheckpointError, match=r"does not fit .*lm_head.*: it differs from the base"):
        files.peft_to_native(files.PeftToNative(tmp_path / "peft", tmp_path / "base", tmp_path / "never"))


def test_the_printed_command_trains_on_adapters_of_some_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = on_a_base("llama", tmp_path)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], layers_to_transform=[1], init_lora_weights="gaussian"
    )
    peft.get_peft_model(theirs, config).save_pretrained(tmp_path / "peft")
    files.peft_to_native(files.PeftToNative(tmp_path / "peft", tmp_path / "base", tmp_path / "start"))
    _, _, line = capsys.readouterr().out.partition("train on from them:\n")
    assert line.strip().endswith("--adapter.targets layers.1.attention.q layers.1.attention.v")
    assert_starts(line, tmp_path)


# Fields of adapter_config.json


def test_every_field_of_peft_is_read_or_known_to_have_no_effect() -> None:
    tables = {*peft_config.READ, *peft_config.UNCHANGED, *peft_config.WITHOUT_EFFECT}
    theirs = {field.name for field in fields(peft.LoraConfig)}
    assert theirs == tables
    # What PEFT writes of itself is read.
    document = {**peft.LoraConfig(r=2, lora_alpha=3).to_dict(), "peft_type": "LORA"}
    assert peft_config.adapter_from_peft(document) == AdapterConfig(rank=2, alpha=3.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("alora_invocation_tokens", [5, 6]), ("use_qalora", True), ("arrow_config", {"top_k": 2})),
        *(("init_lora_weights", "pissa_niter_4"), ("layer_replication", [[0, 1]]), ("a_new_field", 1)),
    ],
)
def test_a_field_that_changes_the_adapter_is_refused_by_name(name: str, value: object) -> None:
    """Fault adapter-config-field-ignored."""
    with pytest.raises(ConfigError, match=rf"adapter_config.json: not read: {name}="):
        peft_config.adapter_from_peft({"r": 2, "lora_alpha": 4, name: value})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"r": None}, "r is missing; it should be a whole number from 1 on"),
        ({"lora_alpha": "8"}, "lora_alpha='8' should be a number other than 0"),
        ({"lora_alpha": None}, "lora_alpha is missing; it should be a number other than 0"),
        ({"target_parameters": 3}, "target_parameters=3 should be a list of texts"),
        ({"rank_pattern": ["q"]}, "rank_pattern=['q'] should be an object of fields"),
        ({"use_dora": "yes"}, "use_dora='yes' should be true or false"),
    ],
)
def test_a_field_of_another_type_is_one_line(changes: dict[str, Any], said: str) -> None:
    """Fault json-field-of-another-type."""
    with pytest.raises(ConfigError) as caught:
        peft_config.adapter_from_peft({"r": 2, "lora_alpha": 4, **changes})
    assert str(caught.value) == f"adapter_config.json: {said}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "[1] should be an object of fields"),
        ('{"r": ', "not readable as JSON"),
        ("[" * 100_000, "thousands deep"),
    ],
    ids=["list", "cut short", "deep"],
)
def test_a_file_that_is_no_object_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        typed_fields.read_object(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)
