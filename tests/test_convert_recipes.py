"""Recipes of conversion by tiny tensors: each against a plain reading of the layout, and back bitwise."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megapar_models.convert.config_json import canonical_name
from megapar_models.convert.huggingface import HFWeights, native_tensor
from megapar_models.convert.quantized import mxfp4
from megapar_models.convert.recipes import places, recipes
from megapar_models.families.llama import LLAMA
from megapar_models.tensor_layouts import Packing, Pairs
from safetensors.torch import save_file
from torch import Tensor

from megapar.base.errors import CheckpointError, ConfigError
from megapar.declare.params import Box

SIZES = SimpleNamespace(num_attention_heads=6, num_key_value_heads=2)
D = 4
H = 5


class FromMemory:
    """Stands for the reader of a native checkpoint."""

    def __init__(self, tensors: dict[str, Tensor]):
        self.tensors = tensors

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name.removeprefix("main.")].clone()

    def fill(self, name: str, offset: tuple[int, ...], out: Tensor) -> None:
        box = Box(offset, tuple(out.shape))
        out.copy_(self.tensor(name)[box.slices])


def there_and_back(stored, made):
    """Ours from `stored`; asserts that theirs made of ours are `stored`, bit for bit."""
    assert {name: recipe.shape for name, recipe in made.items()} == {n: tuple(t.shape) for n, t in stored.items()}
    ours = {}
    for name, found in places(made).items():
        parts = []
        for source, part in found:
            parts.append(part.read(stored[source] if part.expert is None else stored[source][part.expert]))
            cut_anywhere(stored[source], part, parts[-1])
        ours[name] = torch.cat(parts)
    for name, recipe in made.items():
        out = torch.full(recipe.shape, torch.nan)
        for part in recipe.parts:
            part.write(FromMemory(ours), out)
        assert torch.equal(out, stored[name]), name
    return ours


def cut_anywhere(theirs, part, whole):
    """Assert that boxes of a part come out of boxes of theirs, and no more than whole heads and groups are read."""
    random = torch.Generator().manual_seed(1)
    for _ in range(12):
        low = [int(torch.randint(0, size, (), generator=random)) for size in whole.shape]
        size = [int(torch.randint(1, n - at + 1, (), generator=random)) for n, at in zip(whole.shape, low, strict=True)]
        box = Box((low[0] + part.start, *low[1:]), tuple(size))
        boxes: list[Box] = []

        def read(asked: Box, boxes: list[Box] = boxes) -> Tensor:
            boxes.append(asked)
            return theirs[asked.slices]

        values = part.cut(read, box)
        assert torch.equal(values, whole[Box(tuple(low), tuple(size)).slices])
        assert values.is_contiguous()
        if part.groups == 1 and part.pairs is None:
            assert [asked.numel for asked in boxes] == [box.numel]


def qkv(heads: int = 6, kv: int = 2, bias: bool = False) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for letter, number in (("q", heads), ("k", kv), ("v", kv)):
        shapes[f"layers.3.attention.{letter}.weight"] = (number * D, H)
        if bias:
            shapes[f"layers.3.attention.{letter}.bias"] = (number * D,)
    return shapes


FUSED = {f"layers.*.attention.{letter}": "h.*.qkv" for letter in "qkv"}


def test_rows_of_q_k_and_v_below_each_other() -> None:
    stored = {"h.3.qkv.weight": torch.randn(10 * D, H), "h.3.qkv.bias": torch.randn(10 * D)}
    ours = there_and_back(stored, recipes(qkv(bias=True), FUSED))
    _, k, v = stored["h.3.qkv.weight"].split([6 * D, 2 * D, 2 * D])
    assert torch.equal(ours["layers.3.attention.k.weight"], k)
    assert torch.equal(ours["layers.3.attention.v.weight"], v)
    assert torch.equal(ours["layers.3.attention.q.bias"], stored["h.3.qkv.bias"][: 6 * D])


def test_experts_below_each_other_in_one_matrix() -> None:
    """As DBRX has them, whose last matrix is transposed."""
    shapes = {}
    for expert in range(11):
        shapes[f"layers.3.mlp.experts.{expert}.gate.weight"] = (D, H)
        shapes[f"layers.3.mlp.experts.{expert}.down.weight"] = (H, D)
    modules = {f"layers.*.mlp.experts.*.{ours}.weight": f"h.*.{w}" for ours, w in (("gate", "w1"), ("down", "w2"))}
    layouts = {"h.*.w1": Packing(joined=True), "h.*.w2": Packing(joined=True, transposed=True)}
    stored = {"h.3.w1": torch.randn(11 * D, H), "h.3.w2": torch.randn(11 * D, H)}
    ours = there_and_back(stored, recipes(shapes, modules, layouts))
    assert torch.equal(ours["layers.3.mlp.experts.10.gate.weight"], stored["h.3.w1"][-D:])
    assert torch.equal(ours["layers.3.mlp.experts.2.down.weight"], stored["h.3.w2"][2 * D : 3 * D].t())


@pytest.mark.parametrize(("kv", "groups"), [(2, "num_key_value_heads"), (6, "num_attention_heads")])
def test_q_k_and_v_of_each_group_of_heads(kv: int, groups: str) -> None:
    """As Falcon has them, three query heads to a key; and as GPT-NeoX has them, one."""
    stored = {"h.3.qkv.weight": torch.randn((6 + 2 * kv) * D, H), "h.3.qkv.bias": torch.randn((6 + 2 * kv) * D)}
    ours = there_and_back(stored, recipes(qkv(kv=kv, bias=True), FUSED, {"h.*.qkv": Packing(groups)}, sizes=SIZES))
    heads = stored["h.3.qkv.weight"].view(kv, 6 // kv + 2, D, H)
    assert torch.equal(ours["layers.3.attention.q.weight"].view(6, D, H)[6 // kv], heads[1, 0])
    assert torch.equal(ours["layers.3.attention.k.weight"].view(kv, D, H)[1], heads[1, -2])
    assert torch.equal(ours["layers.3.attention.v.bias"][:D], stored["h.3.qkv.bias"].view(kv, -1, D)[0, -1])


def test_rows_that_do_not_divide_into_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"h.3.qkv.weight: rows \[20, 8, 8\] do not divide by 6 groups"):
        recipes(qkv(heads=5), FUSED, {"h.*.qkv": Packing("num_attention_heads")}, sizes=SIZES)


def test_a_query_and_its_gate_in_each_head() -> None:
    """As Qwen3-Next has them."""
    shapes = {"layers.0.attention.q.weight": (6 * D, H), "layers.0.attention.gate.weight": (6 * D, H)}
    names = {"layers.*.attention.q": "h.*.q_proj", "layers.*.attention.gate": "h.*.q_proj"}
    stored = {"h.0.q_proj.weight": torch.randn(12 * D, H)}
    ours = there_and_back(stored, recipes(shapes, names, {"h.*.q_proj": Packing("num_attention_heads")}, sizes=SIZES))
    query, gate = stored["h.0.q_proj.weight"].view(6, 2 * D, H).split(D, dim=1)
    assert torch.equal(ours["layers.0.attention.q.weight"], query.reshape(-1, H))
    assert torch.equal(ours["layers.0.attention.gate.weight"], gate.reshape(-1, H))


def test_a_weight_of_a_norm_with_a_row_for_each_head() -> None:
    """As Command R+ has them, with rotary pairs beside each other."""
    layouts = {"h.*.q_norm": Packing("num_attention_heads", by_group=True)}
    shapes = {"layers.0.attention.q_norm.weight": (6 * D,)}
    names = {"layers.*.attention.q_norm": "h.*.q_norm"}
    stored = {"h.0.q_norm.weight": torch.randn(6, D)}
    ours = there_and_back(stored, recipes(shapes, names, layouts, sizes=SIZES))
    assert torch.equal(ours["layers.0.attention.q_norm.weight"], stored["h.0.q_norm.weight"].flatten())
    pairs = {"layers.*.attention.q_norm": Pairs(D, 0, D)}
    ours = there_and_back(stored, recipes(shapes, names, layouts, sizes=SIZES, pairs=pairs))
    halves = stored["h.0.q_norm.weight"].view(6, D // 2, 2).transpose(1, 2)
    assert torch.equal(ours["layers.0.attention.q_norm.weight"], halves.flatten())


def test_a_weight_of_a_norm_with_a_tensor_for_each_head() -> None:
    """As StableLM 2 12B has them: twelve heads, so that the order of the numbers is not that of their digits."""
    sizes = SimpleNamespace(num_attention_heads=12)
    layouts = {"h.*.norms.*": Packing("num_attention_heads")}
    shapes = {"layers.3.attention.q_norm.weight": (12 * D,)}
    names = {"layers.*.attention.q_norm": "h.*.norms.*"}
    stored = {f"h.3.norms.{head}.weight": torch.randn(D) for head in range(12)}
    ours = there_and_back(stored, recipes(shapes, names, layouts, sizes=sizes))
    assert torch.equal(ours["layers.3.attention.q_norm.weight"], torch.cat(list(stored.values())))
    pairs = {"layers.*.attention.q_norm": Pairs(D, 0, D)}
    ours = there_and_back(stored, recipes(shapes, names, layouts, sizes=sizes, pairs=pairs))
    halves = torch.stack(list(stored.values())).view(12, D // 2, 2).transpose(1, 2)
    assert torch.equal(ours["layers.3.attention.q_norm.weight"], halves.flatten())
    with pytest.raises(ConfigError, match=r"h.3.norms.\*.weight: 50 rows do not divide by 12 groups"):
        recipes({"layers.3.attention.q_norm.weight": (50,)}, names, layouts, sizes=sizes)


@pytest.mark.parametrize("boxes", [[(0, 50)], [(0, 7), (7, 43)], [(13, 37), (0, 13)]])
def test_boxes_of_a_tensor_that_is_several_of_theirs(boxes: list[tuple[int, int]]) -> None:
    """Boxes as ranks own them, which begin and end within heads."""
    shapes = {"layers.0.attention.q_norm.weight": (50,)}
    made = recipes(
        shapes,
        {"layers.*.attention.q_norm": "h.*.norms.*"},
        {"h.*.norms.*": Packing("num_attention_heads")},
        sizes=SimpleNamespace(num_attention_heads=5),
    )
    ours = torch.randn(50)
    theirs = {name: torch.full(recipe.shape, torch.nan) for name, recipe in made.items()}
    for name, recipe in made.items():
        for start, size in boxes:
            box = recipe.parts[0].inside(Box((start,), (size,)))
            if box is not None:
                recipe.parts[0].put(theirs[name], box, ours[box.slices])
    assert torch.equal(torch.cat(list(theirs.values())), ours)


@pytest.mark.parametrize("pairs", [Pairs(D, 0, D), Pairs(D, 2, 2), Pairs(6, 0, 4), Pairs(0, 20, 4)])
def test_rotary_pairs_beside_each_other_give_the_same_scores(pairs: Pairs) -> None:
    """A whole head, its end, its beginning, and the last rows of a matrix that is one head."""
    width = pairs.width or 24
    names = {f"layers.*.attention.{name}": f"h.*.{name}" for name in ("q", "k", "q_norm")}
    shapes = {"layers.0.attention.q.weight": (24, H), "layers.0.attention.k.weight": (24, H)}
    shapes |= {"layers.0.attention.q_norm.weight": (width,)}
    of_modules = dict.fromkeys(names, pairs)
    stored = {f"h.0.{name}.weight": torch.randn(24, H) for name in "qk"} | {"h.0.q_norm.weight": torch.randn(width)}
    ours = there_and_back(stored, recipes(shapes, names, pairs=of_modules))
    x = torch.randn(H)
    angles = torch.randn(pairs.size // 2)
    scores = []
    for prefix, tensors in (("layers.0.attention", ours), ("h.0", stored)):
        norm = tensors[f"{prefix}.q_norm.weight"]
        q = (tensors[f"{prefix}.q.weight"] @ x).view(-1, width) * norm
        k = (tensors[f"{prefix}.k.weight"] @ x).view(-1, width)
        turned = q[:, pairs.start : pairs.start + pairs.size]
        if prefix == "h.0":
            pair = torch.view_as_complex(turned.reshape(len(q), -1, 2).contiguous())
            turned.copy_(torch.view_as_real(pair * torch.polar(torch.ones(()), angles)).flatten(1))
        else:
            first, second = turned.clone().chunk(2, dim=1)
            cos, sin = angles.cos(), angles.sin()
            turned.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=1))
        scores.append((q * k).sum(1))
    torch.testing.assert_close(*scores)


def test_interleaved_transposed_stacks_of_experts_with_biases() -> None:
    """As gpt_oss has them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for expert in range(3):
        name = f"layers.1.mlp.experts.{expert}"
        for module, shape in (("gate", (D, H)), ("up", (D, H)), ("down", (H, D))):
            shapes |= {f"{name}.{module}.weight": shape, f"{name}.{module}.bias": shape[:1]}
    names = {}
    for module, theirs in (("gate", "gate_up_proj"), ("up", "gate_up_proj"), ("down", "down_proj")):
        names[f"layers.*.mlp.experts.*.{module}.weight"] = f"h.*.experts.{theirs}"
        names[f"layers.*.mlp.experts.*.{module}.bias"] = f"h.*.experts.{theirs}_bias"
    layouts = {
        "h.*.experts.gate_up_proj": Packing("rows", transposed=True),
        "h.*.experts.gate_up_proj_bias": Packing("rows"),
        "h.*.experts.down_proj": Packing(transposed=True),
    }
    stored = {"h.1.experts.gate_up_proj": torch.randn(3, H, 2 * D), "h.1.experts.gate_up_proj_bias": torch.randn(3, 8)}
    stored |= {"h.1.experts.down_proj": torch.randn(3, D, H), "h.1.experts.down_proj_bias": torch.randn(3, H)}
    ours = there_and_back(stored, recipes(shapes, names, layouts))
    gate_up = stored["h.1.experts.gate_up_proj"][2]
    assert torch.equal(ours["layers.1.mlp.experts.2.gate.weight"], gate_up[:, ::2].t())
    assert torch.equal(ours["layers.1.mlp.experts.2.up.weight"], gate_up[:, 1::2].t())
    assert torch.equal(ours["layers.1.mlp.experts.1.up.bias"], stored["h.1.experts.gate_up_proj_bias"][1, 1::2])
    assert torch.equal(ours["layers.1.mlp.experts.1.down.weight"], stored["h.1.experts.down_proj"][1].t())


def test_prefixes_are_replaced_at_the_start_and_listed_parts_are_left_out() -> None:
    assert LLAMA.hugging_face is not None
    prefixes = {"model.language_model.": "model.", "language_model.model.": "model."}
    ignored = ("mtp.", "model.visual.", "model.layers.61.")
    for stored, expected in (
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.model.layers.6.mlp.up_proj.weight", "model.layers.6.mlp.up_proj.weight"),
        ("model.layers.6.mlp.up_proj.weight", "model.layers.6.mlp.up_proj.weight"),
        ("model.layers.61.mlp.up_proj.weight", None),
        ("mtp.norm.weight", None),
        ("model.visual.mtp.weight", None),
        ("model.mtp.weight", "model.mtp.weight"),  # nobody listed it, so it is unexpected
    ):
        assert canonical_name(stored, LLAMA.hugging_face, ignored, prefixes) == expected


# Quantized


def test_fp8_blocks_with_ragged_ends(tmp_path: Path) -> None:
    """Against a plain sum over elements in fp64."""
    values = torch.randn(576, 130).to(torch.float8_e4m3fn)
    scales = torch.rand(5, 2) + 0.1
    plain = torch.ones(3)
    stored = {"a.weight": values, "a.weight_scale_inv": scales, "b.weight": plain.bfloat16()}
    save_file(stored, tmp_path / "model.safetensors")
    weights = HFWeights(tmp_path)
    assert set(weights.tensors) == {"a.weight", "b.weight"}
    assert weights.dtype() == torch.bfloat16
    (found,) = [
        native_tensor(weights, place) for place in places(recipes({"x.weight": (576, 130)}, {"x": "a"})).values()
    ]
    expected = torch.empty(576, 130, dtype=torch.float64)
    for row in range(576):
        for column in range(130):
            expected[row, column] = values[row, column].double() * scales[row // 128, column // 128].double()
    torch.testing.assert_close(found.double(), expected, rtol=2**-24, atol=0.0)
    save_file(stored | {"a.weight_scale_inv": torch.rand(4, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"a.weight_scale_inv has shape \[4, 2\], not \[5, 2\]"):
        HFWeights(tmp_path)
    del stored["a.weight_scale_inv"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.weight is F8_E4M3"):
        HFWeights(tmp_path)


def test_mxfp4_is_that_of_transformers(tmp_path: Path) -> None:
    """Of each expert by itself, the transpose of gpt_oss included; exactly."""
    integrations = pytest.importorskip("transformers.integrations.mxfp4", reason="not run: needs transformers")
    blocks = torch.randint(256, (3, 8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(120, 134, (3, 8, 2), dtype=torch.uint8)
    theirs = integrations.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file({"h.gate_up_proj_blocks": blocks, "h.gate_up_proj_scales": scales}, tmp_path / "model.safetensors")
    weights = HFWeights(tmp_path)
    assert weights.tensors["h.gate_up_proj"].info.shape == theirs.shape == (3, 64, 8)
    for expert in range(3):
        assert torch.equal(weights.read("h.gate_up_proj", expert), theirs[expert])
    assert torch.equal(weights.read("h.gate_up_proj"), theirs)
    one = torch.tensor([[[0x21] + 15 * [0]]], dtype=torch.uint8)  # the low bits come first
    assert mxfp4(one, torch.full((1, 1), 128, dtype=torch.uint8))[:2, 0].tolist() == [1.0, 2.0]


def test_axes_of_size_1_around_a_vector() -> None:
    """As Kimi Linear has the logarithms of decays."""
    stored = {"h.3.A_log": torch.randn(1, 1, 6, 1)}
    names = {"layers.*.attention.A_log": "h.*.A_log"}
    made = recipes({"layers.3.attention.A_log": (6,)}, names, {"h.*.A_log": Packing(axes=(2, 1))})
    ours = there_and_back(stored, made)
    assert torch.equal(ours["layers.3.attention.A_log"], stored["h.3.A_log"].flatten())


def test_rotary_pairs_of_one_layer() -> None:
    """As Ling 3.0 has them: queries of its other layers are not rotated."""
    stored = {f"h.{number}.q.weight": torch.randn(2 * D, H) for number in (0, 1)}
    shapes = {f"layers.{number}.attention.q.weight": (2 * D, H) for number in (0, 1)}
    names = {"layers.*.attention.q": "h.*.q"}
    ours = there_and_back(stored, recipes(shapes, names, pairs={"layers.1.attention.q": Pairs(D, 0, D)}))
    assert torch.equal(ours["layers.0.attention.q.weight"], stored["h.0.q.weight"])
    turned = [0, 2, 1, 3, 4, 6, 5, 7]
    assert torch.equal(ours["layers.1.attention.q.weight"], stored["h.1.q.weight"][turned])
