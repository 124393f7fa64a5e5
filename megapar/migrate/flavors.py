"""The flavors of torchtitan's models: a preset of megapar, and what differs from it as torchtitan computes it."""

from collections.abc import Mapping

from megapar.migrate.job import Job, NoCounterpart, Ours, Words

_ROPE = "model.rope_scaling"
# torchtitan stretches the positions of every Llama 3 as those of Llama 3.1.
_LLAMA_3_1 = {f"{_ROPE}.rope_type": "llama3", f"{_ROPE}.factor": "8", f"{_ROPE}.low_freq_factor": "1"}
_LLAMA_3_1 |= {f"{_ROPE}.high_freq_factor": "4", f"{_ROPE}.original_max_position_embeddings": "8192"}
# Of its mixtures a bias alone evens out the load, with scores by softmax too.
_BALANCED = {"model.moe.balance": "bias", "model.moe.router_bias_update_rate": "0.001"}
_DEEPSEEK = _BALANCED | {"model.rms_norm_eps": "1e-5"}
_MSCALE = {f"{_ROPE}.mscale": "0.7", f"{_ROPE}.mscale_all_dim": "0.7"}
_PLAIN_ROPE = {f"{_ROPE}.rope_type": "default", f"{_ROPE}.factor": "1", f"{_ROPE}.mscale": "0"}
_PLAIN_ROPE |= {f"{_ROPE}.mscale_all_dim": "0", f"{_ROPE}.original_max_position_embeddings": "8192"}


def _qwen3(width: int, layers: int, heads: int, inner: int, *, tied: bool = False) -> dict[str, str]:
    """What a dense Qwen3 has in place of the sizes of its 8B."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"intermediate_size": inner}
    return {f"model.{name}": str(size) for name, size in sizes.items()} | {
        "model.tie_word_embeddings": str(tied).lower()
    }


_FLAVORS: Mapping[tuple[str, str], tuple[str, dict[str, str]]] = {
    ("llama3", "8B"): ("llama3-8b", _LLAMA_3_1),
    ("llama3", "70B"): ("llama3-70b", _LLAMA_3_1),
    ("llama3", "405B"): ("llama3.1-405b", {}),
    ("deepseek_v3", "16B"): (
        "deepseek-v2-lite",
        _DEEPSEEK | {f"{_ROPE}.mscale": "0.7", f"{_ROPE}.mscale_all_dim": "0.7"},
    ),
    ("deepseek_v3", "671B"): ("deepseek-v3", _DEEPSEEK),
    ("qwen3", "0.6B"): ("qwen3-8b", _qwen3(1024, 28, 16, 3072, tied=True)),
    ("qwen3", "1.7B"): ("qwen3-8b", _qwen3(2048, 28, 16, 6144, tied=True)),
    ("qwen3", "4B"): ("qwen3-8b", _qwen3(2560, 36, 32, 9728, tied=True)),
    ("qwen3", "8B"): ("qwen3-8b", {}),
    ("qwen3", "14B"): ("qwen3-8b", _qwen3(5120, 40, 40, 17408)),
    ("qwen3", "32B"): ("qwen3-8b", _qwen3(5120, 64, 64, 25600)),
    ("qwen3", "30B-A3B"): ("qwen3-30b-a3b", _BALANCED),
    ("qwen3", "235B-A22B"): ("qwen3-235b-a22b", _BALANCED | {"model.rope_theta": "5000000"}),
    ("gpt_oss", "20b"): ("gpt-oss-20b", _BALANCED),
    ("gpt_oss", "120b"): ("gpt-oss-120b", _BALANCED),
}


def flavor(job: Job, words: Words) -> Ours:
    """model.name and model.flavor: a preset has the sizes of the published model."""
    name = job.text("model.name")
    preset, differs = _FLAVORS.get((name, job.text("model.flavor")), ("", {}))
    if not preset:
        raise NoCounterpart("no preset is known to be this model; give one with --model")
    # DeepSeek's yarn begins where samples are longer than those of its first training.
    if name == "deepseek_v3" and job.whole("training.seq_len", 2048) <= 4096:
        differs = differs | _PLAIN_ROPE
    return {"base": (preset,), **{option: (value,) for option, value in differs.items()}}
