"""Small models of Gemma 4, of which layers hand on keys and values, and read inputs of their own."""

from dataclasses import replace

from megapar_models.families.gemma4 import Gemma4Model

from megapar.config.model_options import MoEConfig
from tests.support import tiny_models

# Layers 2 and 3 hand on; 4 and 5 read, each with a kind of its own.
MODEL: Gemma4Model = tiny_models.small(
    "gemma4",
    48,
    6,
    76,
    num_key_value_heads=2,
    head_dim=6,
    global_head_dim=10,
    sliding_window=7,
    layer_types=("sliding_attention", "full_attention") * 3,
    rope_local_base_freq=50.0,
    num_kv_shared_layers=2,
    use_double_wide_mlp=True,
    hidden_size_per_layer_input=10,
    rms_norm_eps=3e-1,
    initializer_range=0.1,
)
MIXTURE = replace(
    MODEL,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    moe=MoEConfig(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20),
)
