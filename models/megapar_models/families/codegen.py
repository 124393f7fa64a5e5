"""CodeGen (arXiv 2203.13474): GPT-J.

Its files hold queries, values and keys in four parts, of a quarter of the heads each.

At Hugging Face: codegen.
"""

from typing import Any

from megapar.base.errors import ConfigError
from megapar_models.codecs import GELUS, Always, Dropouts
from megapar_models.families.gpt import SUMMARY
from megapar_models.families.gpt_neox import GPTNeoXModel, GPTNeoXStage
from megapar_models.families.gptj import ALWAYS, GPTJ, Rotated, pairs_of
from megapar_models.family import Codec, Family, ModelType, Raw, like
from megapar_models.rotary_fields import partial_problems
from megapar_models.tensor_layouts import Packing

_PARTS = 4  # the cores that the first CodeGen was trained on


class _Parts(Codec):
    """Refuses heads that do not divide by the parts."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        heads = raw.get("n_head")
        if isinstance(heads, int) and heads % _PARTS:
            return {}, [f"n_head={heads} is not supported; transformers reads multiples of {_PARTS}"]
        return {}, []

    def write(self, model: GPTNeoXModel, fields: dict[str, Any]) -> None:
        if model.num_attention_heads % _PARTS:
            text = f"codegen of Hugging Face has a multiple of {_PARTS}"
            raise ConfigError(f"model.num_attention_heads={model.num_attention_heads}: {text}")


_LAYER = "transformer.h.*"

CODEGEN = Family(
    name="codegen",
    stage=GPTNeoXStage,
    activations=GPTJ.activations,
    options=GPTNeoXModel,
    problems=partial_problems,
    hugging_face=like(
        GPTJ,
        model_types={"codegen": ModelType("CodeGenForCausalLM")},
        codecs=(
            _Parts(),
            Always(ALWAYS, key_per_head=True),
            Rotated(),
            Dropouts(("attn_pdrop", "resid_pdrop", "embd_pdrop"), written=True),
        ),
        modules=dict.fromkeys((f"layers.*.attention.{name}" for name in "qkv"), f"{_LAYER}.attn.qkv_proj"),
        layouts={f"{_LAYER}.attn.qkv_proj": Packing(_PARTS, order=("q", "v", "k"))},
        pairs=pairs_of,
        activations=GELUS,
        base_prefix="",
        without_effect=("n_ctx", "rotary", "scale_attn_weights", *SUMMARY),
    ),
)
