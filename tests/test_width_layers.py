"""What a family may do with its layers without an edit of megapar: kinds of layers, and adapters beside matrices."""

from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import partial

import pytest
import torch
from einops import rearrange
from megapar_kernels.backend import Kernels
from megapar_models import reference as plain
from megapar_models.build import build_stages
from megapar_models.counts import WholeModel
from megapar_models.factory import Factory, Matrix
from megapar_models.families.llama import LLAMA as LLAMA_FAMILY
from megapar_models.families.llama import LlamaModel, LlamaStage
from megapar_models.forward import ForwardContext
from megapar_models.heads import deal_heads
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.reference import Tensors, attend, heads, linear
from megapar_models.rotary import Rotary
from megapar_tools.verify.batches import four_documents
from torch import Tensor, nn

from megapar.base.errors import ConfigError
from megapar.config.model_options import ModelConfig
from megapar.context_parallel.attention import CoreAttention
from megapar.declare import context
from megapar.declare.params import ZEROS, Init, shared_piece
from megapar.declare.sharding import Sharding
from megapar.launch.grid import grid_of
from megapar.tensor_parallel.layers import Columns
from tests.support import tiny_models
from tests.support.distributed import run_ranks
from tests.support.grid import LENGTH, LLAMA, Layout
from tests.support.width import in_each_layout, trains_as_one_process

WINDOW = 5

# Layers of four kinds


class KeysAreValues(nn.Module):
    """A mixer outside the tree: attention with its keys as values, without positions."""

    OVER_CP = True

    def __init__(self, number: int, kind: LayerKind, model: ModelConfig, factory: Factory):
        super().__init__()
        name = f"layers.{number}.attention"
        self.head_dim = model.head_dim
        num_heads = model.num_attention_heads
        width = num_heads * model.head_dim
        tp = factory.sharding.tp
        columns = [Columns.even(f"{name}.{letter}", width, tp) for letter in "qk"]
        self.qk = factory.column_parallel(model.hidden_size, columns)
        self.out = factory.row_parallel(f"{name}.o", width, model.hidden_size)
        self.attend = factory.core_attention(
            deal_heads(num_heads, num_heads, tp).kv_heads, model.head_dim, model.head_dim
        )

    def forward(self, x_sbh: Tensor, context: ForwardContext) -> Tensor:
        q, k = (rearrange(y, "s b (n d) -> s b n d", d=self.head_dim) for y in self.qk(x_sbh).chunk(2, dim=-1))
        return self.out(self.attend(q, k, k, context.batch, None))


class FourKindsStage(LlamaStage):
    """Llama's layer; one as Gemma's local layers, with a window and a table of its own; a mixer of its own; no rope."""

    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        gemma = NormRule(model.rms_norm_eps, offset=1)
        local = Rotary(500.0, model.head_dim, inside_documents=True)
        kinds = [
            kind,
            replace(kind, window=WINDOW, rotary=local, norms="both", norm=gemma),
            replace(kind, mixer="tests.test_width_layers:KeysAreValues", rotary=None, qk_norm=False),
            replace(kind, rotary=None, norms="after"),
        ]
        return kinds[number % 4]


FOUR_KINDS = replace(LLAMA_FAMILY, name="four kinds", stage=FourKindsStage)
FOUR_KINDS_MODEL = replace(LLAMA, family="tests.test_width_layers:FOUR_KINDS", attention_bias=False)


@in_each_layout
def test_layers_of_four_kinds_train_as_in_one_process(sizes: dict[str, object]) -> None:
    """On samples of several documents. Windows need whole samples, and ulysses gives them to each rank."""
    if "cp" in sizes:
        sizes = {**sizes, "cp_attention": "ulysses"}
    trains_as_one_process(FOUR_KINDS_MODEL, {**sizes, "packed": True})


def plain_logits(model: ModelConfig, tensors: Tensors, tokens_bs: Tensor) -> Tensor:
    """The four layers in plain PyTorch."""
    x = tensors["embedding.weight"][tokens_bs]
    for number in range(4):
        # As Gemma has it: one is added to the weights of norms.
        raised = {name: value + (number == 1 and name.endswith("norm.weight")) for name, value in tensors.items()}

        def norm(
            name: str, y: Tensor, layers: tuple[int, ...], number: int = number, raised: Tensors = raised
        ) -> Tensor:
            if number not in layers:
                return y
            return plain.rms_norm(model, raised, f"layers.{number}.{name}", y)

        mixed = mixed_plainly(model, raised, number, norm("attention_norm", x, (0, 1, 2)))
        x = x + norm("attention_output_norm", mixed, (1, 3))
        y = plain.mlp(model, raised, f"layers.{number}.mlp", norm("mlp_norm", x, (0, 1, 2)))
        x = x + norm("mlp_output_norm", y, (1, 3))
    return plain.rms_norm(model, tensors, "norm", x) @ tensors["head.weight"].t()


def mixed_plainly(model: ModelConfig, tensors: Tensors, number: int, x_bsh: Tensor) -> Tensor:
    name = f"layers.{number}.attention"
    if number == 0:
        return plain.attention(model, tensors, name, x_bsh)
    if number == 1:
        # The last positions of pieces of the sample, each of which is as long as the window.
        local = replace(model, rope_theta=500.0)
        ends = range(1, x_bsh.shape[1] + 1)
        pieces = [x_bsh[:, max(0, end - WINDOW) : end] for end in ends]
        return torch.cat([plain.attention(local, tensors, name, piece)[:, -1:] for piece in pieces], dim=1)
    if number == 2:
        q, k = (heads(model, tensors, f"{name}.{letter}", x_bsh) for letter in "qk")
        return linear(tensors, f"{name}.o", attend(q, k, k))
    q, k, v = (heads(model, tensors, f"{name}.{letter}", x_bsh) for letter in "qkv")
    q = plain.rms_norm(model, tensors, f"{name}.q_norm", q)
    k = plain.rms_norm(model, tensors, f"{name}.k_norm", k)
    return linear(tensors, f"{name}.o", attend(q, k, v))


def test_layers_of_four_kinds_compute_what_they_say() -> None:
    config = tiny_models.config(FOUR_KINDS_MODEL)
    batch = tiny_models.batch(config.model)
    stage = tiny_models.build(config, context.single()).double()
    tensors = {name: x.double() for name, x in tiny_models.random_tensors(config.model).items()}
    found = stage.logits(stage.hidden_states(None, batch)).transpose(0, 1)[..., : config.model.vocab_size]
    # The angles of the tables are fp32.
    torch.testing.assert_close(found, plain_logits(config.model, tensors, batch.tokens_bs), rtol=1e-4, atol=1e-5)


def test_positions_inside_documents_begin_again_and_change_no_attention() -> None:
    """A table has a row for each position of each sample; distances are those of positions running on."""
    config = tiny_models.config(FOUR_KINDS_MODEL)
    batch = tiny_models.batch(config.model, length=24)
    batch = replace(batch, starts=four_documents(torch.arange(batch.size), LENGTH))
    stage = tiny_models.build(config, context.single()).double()
    found = stage(None, batch)
    attention = stage.layers["1"].attention
    inside = attention.kind.rotary
    cos, _ = inside.tables(batch)
    assert len(cos) == 2 * 24
    assert torch.equal(cos.view(24, 2, -1)[:, 1], inside.tables(replace(batch, starts=None))[0]) is False
    assert torch.equal(cos.view(24, 2, -1)[5, 1], cos.view(24, 2, -1)[0, 1]), "the third document of sample 1 begins"
    running = replace(inside, inside_documents=False)
    attention.kind = replace(attention.kind, rotary=running)
    stage.layers.rotary.append(running)
    torch.testing.assert_close(stage(None, batch), found, rtol=1e-6, atol=0.0)


class WindowsStage(LlamaStage):
    """Every second layer has a window, and the same tensors as the others."""

    @classmethod
    def layer_kind(cls, model: ModelConfig, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        return replace(kind, window=WINDOW * (number % 2))


class DroppingStage(WindowsStage):
    @classmethod
    def layer_kind(cls, model: "DroppingModel", number: int) -> LayerKind:
        return replace(super().layer_kind(model, number), attention_dropout=model.attention_dropout)


WINDOWS = replace(LLAMA_FAMILY, name="windows", stage=WindowsStage)


@dataclass(frozen=True)
class DroppingModel(LlamaModel):
    attention_dropout: float = 0.0


DROPPING_WINDOWS = replace(WINDOWS, stage=DroppingStage, options=DroppingModel)


def test_a_window_counts_the_keys_that_it_reads() -> None:
    """Two FLOPs a key, head and column. As without a window (s/2 keys of s), half a key at the diagonal is left out."""
    ctx = context.single()
    for window in (1, 5, 11, 12, 40):
        core = CoreAttention(ctx.cp, "gather", range(3), Kernels(), ctx.device, 8, 6, window)
        read = sum(min(position + 1, window) for position in range(12))
        keys = read / 12 - min(window, 12) / 24
        assert core.flops_per_token(12) == pytest.approx(2 * keys * 3 * (8 + 6), abs=0.51), window


def test_layers_of_other_kinds_are_measured_apart() -> None:
    model = replace(LLAMA, family="tests.test_width_layers:WINDOWS")
    assert WholeModel(tiny_models.config(model).model).layer_kinds(LENGTH) == [0, 1, 0, 1]


def test_windows_are_refused_where_ranks_hold_parts_of_samples() -> None:
    with pytest.raises(ConfigError, match=r"cp=2, parallel.cp_attention=gather: .* read 5 keys; use cp_attention ulys"):
        Layout(FOUR_KINDS_MODEL, cp=2).config()


def test_attention_drops_the_same_in_windows_and_documents_on_every_rank() -> None:
    model = DroppingModel(**{f.name: getattr(LLAMA, f.name) for f in fields(LLAMA)})
    model = replace(model, family="tests.test_width_layers:DROPPING_WINDOWS", attention_dropout=0.3)
    trains_as_one_process(model, {"cp": 2, "cp_attention": "ulysses", "packed": True})


def test_a_mixer_that_cannot_be_imported_is_told_with_its_layer() -> None:
    kind = replace(LlamaStage.layer_kind(LLAMA, 0), mixer="tests.nowhere:Mixer")
    with pytest.raises(ConfigError, match=r"^the mixer of layer 3=tests.nowhere:Mixer: cannot be imported"):
        LlamaStage.make_layer(tiny_models.build(tiny_models.config(LLAMA), context.single()), 3, kind)


# An adapter


class Lora(nn.Module):
    """LoRA (arXiv 2106.09685): B A x. B [out, r] is cut by its outputs or A [r, in] by its inputs, as the matrix is."""

    def __init__(self, factory: Factory, matrix: Matrix, rank: int):
        super().__init__()
        normal = Init("normal", 0.1)
        a = f"{matrix.name}.lora_a"
        b = f"{matrix.name}.lora_b"
        if matrix.columns is not None:
            self.down = Replicated(factory, a, (rank, matrix.in_features), normal)
            self.up = factory.column_parallel(rank, [replace(matrix.columns, name=b)], init=ZEROS)
        else:
            self.down = factory.row_parallel(a, matrix.in_features, rank, init=normal)
            self.up = Replicated(factory, b, (matrix.out_features, rank), ZEROS)

    def forward(self, x_sbi: Tensor) -> Tensor:
        return self.up(self.down(x_sbi))


class Replicated(nn.Module):
    """x W^T with W on every tp rank. Under sequence parallelism each rank has its own tokens."""

    def __init__(self, factory: Factory, name: str, shape: tuple[int, int], init: Init):
        super().__init__()
        sharding = factory.sharding
        piece = shared_piece(f"{name}.weight", shape, sharding.tp, partial=sharding.sequence_parallel)
        self.weight = sharding.parameter((piece,), shape, init, decay=True)

    def forward(self, x_sbi: Tensor) -> Tensor:
        return nn.functional.linear(x_sbi, self.weight)


BESIDE = {"*.attention.[qo]*": partial(Lora, rank=4)}
LORA = replace(LLAMA_FAMILY, name="lora", factory=partial(Factory, beside=BESIDE))
LORA_MODEL = replace(LLAMA, family="tests.test_width_layers:LORA")
TRAINED = ("*.lora_?.weight",)


@in_each_layout
def test_an_adapter_beside_two_matrices_trains_alone_as_in_one_process(sizes: dict[str, object]) -> None:
    trains_as_one_process(LORA_MODEL, {**sizes, "trainable": TRAINED, "sequence_parallel": "tp" in sizes})


def test_an_adapter_adds_its_product_to_its_matrix_alone() -> None:
    config = tiny_models.config(LORA_MODEL)
    batch = tiny_models.batch(config.model)
    stage = tiny_models.build(config, context.single())
    tensors = tiny_models.random_tensors(config.model)
    merged = dict(tensors)
    for name in (f"layers.{number}.attention.{letter}" for number in range(4) for letter in "qo"):
        merged[f"{name}.weight"] = (
            tensors[f"{name}.weight"] + tensors[f"{name}.lora_b.weight"] @ tensors[f"{name}.lora_a.weight"]
        )
    found = stage.logits(stage.hidden_states(None, batch)).transpose(0, 1)[..., : config.model.vocab_size]
    torch.testing.assert_close(found, plain.llama_logits(config.model, merged, batch.tokens_bs), rtol=1e-4, atol=1e-4)


UNMATCHED = replace(LORA, factory=partial(Factory, beside=BESIDE | {"*.attention.out": partial(Lora, rank=4)}))
LAST_LAYER = replace(LORA, factory=partial(Factory, beside={"layers.3.attention.q": partial(Lora, rank=4)}))


def build_family(family: str) -> str:
    """What a pipeline rank says when it builds its part."""
    config = Layout(replace(LLAMA, family=f"tests.test_width_layers:{family}"), pp=2).config()
    try:
        build_stages(config, context.create(grid_of(config)))
    except ConfigError as error:
        return str(error) if error.everywhere else "by one rank"
    return ""


def test_a_pattern_that_matches_no_matrix_is_refused_on_all_ranks() -> None:
    """A pattern may match matrices of another pipeline rank alone."""
    family = "tests.test_width_layers:UNMATCHED"
    text = f"model.family {family}: Factory.beside *.attention.out: matches no matrix of the model"
    assert run_ranks(2, build_family, "UNMATCHED") == [text, text]
    assert run_ranks(2, build_family, "LAST_LAYER") == ["", ""]


def test_an_adapter_beside_an_expert_is_refused() -> None:
    factory = partial(Factory, beside={"*.mlp.*.up": partial(Lora, rank=4)})
    with pytest.raises(ValueError, match=r"^Factory.beside \*.mlp.\*.up: matches layers.0.mlp.experts.0.up"):
        factory(Sharding.of(context.single(), torch.float32), ZEROS, ZEROS).experts(
            "layers.0.mlp.experts", 2, 8, 8, activation=abs, token_share=Fraction(1)
        )


# Norms


@pytest.mark.parametrize(("name", "offset"), [("llama", 0), ("gemma3", 1)])
def test_norms_round_as_those_of_transformers(name: str, offset: int) -> None:
    """In bf16: Llama rounds before the product with the weight, Gemma after it and adds one to the weight."""
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}", reason="not run: needs transformers")
    theirs = getattr(module, f"{name.capitalize()}RMSNorm")(64, eps=1e-5).bfloat16()
    torch.manual_seed(0)
    nn.init.normal_(theirs.weight)
    x = torch.randn(3, 5, 64).bfloat16()
    rule = NormRule(1e-5, offset=offset, cast_first=name == "llama")
    assert torch.equal(rule.rms(x, theirs.weight, "torch"), theirs(x))
    total = x + x[0]
    assert torch.equal(rule.add_rms(x, x[0].expand_as(x), theirs.weight, "torch")[0], theirs(total))


def test_a_norm_that_rounds_first_adds_its_offset_after() -> None:
    """In bf16, by the formula: the normed x is rounded, then multiplied by one plus the weight."""
    torch.manual_seed(0)
    x = torch.randn(3, 5, 64).bfloat16()
    weight = (0.1 * torch.randn(64)).bfloat16()
    rule = NormRule(1e-5, offset=1, cast_first=True)
    total = x + x[0]
    for values in (x, total):
        normed = values.float() * (values.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        expected = normed.bfloat16() * (weight + 1)
        assert torch.equal(rule.rms(values, weight, "torch"), expected)
    assert torch.equal(rule.add_rms(x, x[0].expand_as(x), weight, "torch")[0], expected)
