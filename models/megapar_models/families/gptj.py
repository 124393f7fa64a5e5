"""GPT-J (EleutherAI, 2021): the block of GPT-NeoX with one norm for attention and MLP.

Attention has no biases, and logits have a bias. The two numbers of a rotary pair lie beside each other.

At Hugging Face: gptj.
"""

import math
from typing import Any

from megapar_models.codecs import GELUS, Always, Dropouts
from megapar_models.families.gpt import GPT, SUMMARY
from megapar_models.families.gpt_neox import GPTNeoXModel, GPTNeoXStage
from megapar_models.family import Codec, Family, ModelType, Raw, like
from megapar_models.rotary import RopeScaling
from megapar_models.rotary_fields import partial_problems
from megapar_models.tensor_layouts import Pairs


class Rotated(Codec):
    """A number of rotated dimensions of each head. The base of its rotary positions is no field."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        rotated, hidden_size, heads = raw.get("rotary_dim", 64), raw.get("n_embd"), raw.get("n_head")
        if not isinstance(rotated, int) or rotated < 1:
            return {}, [f"rotary_dim={rotated!r} is not supported; the number of rotated dimensions of a head is"]
        if not isinstance(hidden_size, int) or not isinstance(heads, int) or hidden_size < heads:
            text = f"is not supported below n_head={heads!r}: a head has a dimension at least"
            return {}, [f"n_embd={hidden_size!r} {text}"]
        width = hidden_size // heads
        part = rotated / width
        if int(width * part) < rotated:  # the quotient was rounded down
            part = math.nextafter(part, 1.0)
        return {"partial_rotary_factor": part}, []

    def write(self, model: GPTNeoXModel, fields: dict[str, Any]) -> None:
        fields |= {"rotary_dim": model.rotary_width}
        if fields["activation_function"] == "gelu_pytorch_tanh":
            fields["activation_function"] = "gelu_new"  # two names of one function; GPT-J's own file has this one


def pairs_of(model: GPTNeoXModel) -> dict[str, Pairs]:
    return dict.fromkeys(("layers.*.attention.q", "layers.*.attention.k"), Pairs(model.head_dim, 0, model.rotary_width))


ALWAYS = {"parallel_residual": "one_norm", "attention_bias": False, "mlp_bias": True, "head_bias": True}
ALWAYS |= {"qk_norm": False, "rope_theta": 10000.0, "rope_scaling": RopeScaling()}
_LAYER = "transformer.h.*"

GPTJ = Family(
    name="gptj",
    stage=GPTNeoXStage,
    activations=("gelu_pytorch_tanh", "gelu", "relu", "relu2", "silu"),
    options=GPTNeoXModel,
    problems=partial_problems,
    hugging_face=like(
        GPT,
        model_types={"gptj": ModelType("GPTJForCausalLM")},
        codecs=(
            Always(ALWAYS, key_per_head=True),
            Rotated(),
            Dropouts(("attn_pdrop", "resid_pdrop", "embd_pdrop"), written=True),
        ),
        modules={
            "positions": None,
            **{f"layers.*.attention.{name}": f"{_LAYER}.attn.{name}_proj" for name in "qkv"},
            "layers.*.attention.o": f"{_LAYER}.attn.out_proj",
            "layers.*.mlp_norm": None,
            "layers.*.mlp.up": f"{_LAYER}.mlp.fc_in",
            "layers.*.mlp.down": f"{_LAYER}.mlp.fc_out",
        },
        layouts={},
        pairs=pairs_of,
        fields={"resid_pdrop": None, "attn_pdrop": None},
        defaults={"tie_word_embeddings": False},
        activations=GELUS,
        base_prefix="",
        without_effect=("n_ctx", "rotary", "scale_attn_weights", *SUMMARY),
    ),
)
