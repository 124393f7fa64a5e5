"""Hugging Face: fields of `TrainingArguments`, and keys of a model's config.json with other names than here."""

from megapar.config.other_frameworks.rows import (
    COUNTS_BATCH,
    EPOCHS,
    NO_COMPILE,
    NO_HUB,
    NO_NOISE,
    NO_TRACKER,
    OF_MEMORY,
    RESUMES,
    always,
    choice,
    computed,
    lacking,
    same,
    sets,
)

TRAINING_ARGUMENTS = (
    same("output_dir", "run_dir"),
    always("do_train", "a run trains"),
    always("do_eval", "data.validation is evaluated, if there is one"),
    # Batches and length
    same("per_device_train_batch_size", "train.micro_batch_size"),
    computed("gradient_accumulation_steps", "train.global_batch_size", COUNTS_BATCH),
    same("max_steps", "train.steps"),
    computed("num_train_epochs", "train.steps", EPOCHS),
    lacking("auto_find_batch_size", "dry_run prints the memory of a layout"),
    # Optimizer
    same("learning_rate", "optimizer.lr"),
    choice(
        "lr_scheduler_type",
        "optimizer.schedule",
        {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"}
        | {"inverse_sqrt": "inverse_sqrt", "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd"},
    ),
    computed("lr_scheduler_kwargs", "optimizer.min_lr", "min_lr; optimizer.decay_steps for num_decay_steps"),
    computed("warmup_steps", "optimizer.warmup_steps", "the number; below 1 it is a share: x train.steps"),
    always(
        "optim",
        "AdamW is the only optimizer; kernels.backend decides its kernel",
        *("adamw_torch", "adamw_torch_fused", "adamw_apex_fused"),
    ),
    lacking("optim_args", "AdamW is the only optimizer"),
    same("weight_decay", "optimizer.weight_decay"),
    computed("adam_beta1", "optimizer.betas", "its first number"),
    computed("adam_beta2", "optimizer.betas", "its second number"),
    same("adam_epsilon", "optimizer.eps"),
    same("max_grad_norm", "optimizer.clip_grad"),
    lacking("label_smoothing_factor", "the loss is the cross entropy of the next token"),
    always("average_tokens_across_devices", "the loss is divided by the target tokens of all ranks", "True"),
    lacking("neftune_noise_alpha", "embeddings get no noise"),
    # Precision, memory, kernels
    sets("bf16", "train.precision", "bf16"),
    sets("fp16", "train.precision", "fp16"),
    always("bf16_full_eval", "evaluation computes in train.precision"),
    always("fp16_full_eval", "evaluation computes in train.precision"),
    lacking("tf32", "torch's own default decides"),
    sets("activation_checkpointing", "train.recompute", "full"),
    computed("activation_checkpointing_kwargs", "train.recompute_every", "every_n_layers; there is no offload"),
    sets("gradient_checkpointing", "train.recompute", "full"),
    computed("gradient_checkpointing_kwargs", "train.recompute_every", "every_n_layers; there is no offload"),
    lacking("torch_compile", NO_COMPILE),
    lacking("torch_compile_backend", NO_COMPILE),
    lacking("torch_compile_mode", NO_COMPILE),
    sets("use_liger_kernel", "kernels.backend", "triton", "megapar's own kernels"),
    lacking("torch_empty_cache_steps", OF_MEMORY),
    # Parallelism
    computed("fsdp", "optimizer.zero_stage", "full_shard 3, shard_grad_op 2; hybrid: optimizer.shard_ranks"),
    computed("fsdp_config", "optimizer.zero_stage", "layers are the units that are gathered"),
    computed("deepspeed", "optimizer.zero_stage", "the stage; no ds_config is read: give its values as options"),
    computed("parallelism_config", "parallel.tp", "parallel.tp, cp and dp"),
    computed("ddp_bucket_cap_mb", "optimizer.bucket_mb", "the same number, with optimizer.zero_stage 0 and 1"),
    same("ddp_timeout", "launch.timeout_seconds"),
    always("ddp_backend", "nccl on GPUs, gloo and shared memory on CPUs"),
    sets("use_cpu", "launch.device", "cpu"),
    # Data
    computed("dataloader_num_workers", "data.workers", "of use for hf: sources; a thread is enough for token files"),
    lacking("dataloader_drop_last", "samples come by number of steps, not by epochs"),
    always("dataloader_pin_memory", "batches are ready ahead of the step"),
    lacking("dataloader_prefetch_factor", "batches are ready ahead of the step"),
    always("train_sampling_strategy", "documents are shuffled by train.seed", "random"),
    always("remove_unused_columns", "tokens are all that a run reads"),
    always("ignore_data_skip", "a resumed run neither repeats nor skips a sample", "False"),
    same("seed", "train.seed"),
    lacking("data_seed", "train.seed decides the order of samples too"),
    sets("full_determinism", "train.deterministic", "true"),
    # Checkpoints
    same("save_steps", "checkpoint.every"),
    always("save_strategy", "checkpoint.every counts steps", "steps"),
    same("save_total_limit", "checkpoint.keep_last"),
    lacking("save_only_model", "a checkpoint is complete"),
    lacking("save_on_each_node", "all ranks write to run_dir"),
    computed("resume_from_checkpoint", "checkpoint.resume", f"auto, none or a folder; {RESUMES}"),
    lacking("load_best_model_at_end", "checkpoint.keep_every keeps checkpoints to choose from"),
    lacking("metric_for_best_model", "checkpoint.keep_every keeps checkpoints to choose from"),
    lacking("push_to_hub", NO_HUB),
    lacking("hub_model_id", NO_HUB),
    lacking("hub_token", NO_HUB),
    # Evaluation and logs
    same("eval_steps", "train.eval_every"),
    always("eval_strategy", "train.eval_every counts steps", "steps"),
    lacking("per_device_eval_batch_size", "evaluation has the batches of training"),
    lacking("eval_on_start", "train.eval_every 1 evaluates after the first step"),
    same("logging_steps", "log.every"),
    always("logging_strategy", "log.every counts steps", "steps"),
    always("logging_first_step", "metrics.jsonl has every step"),
    choice("report_to", "log.tensorboard", {"tensorboard": "true", "none": "false"}, NO_TRACKER),
    computed("run_name", "run_dir", "the name of a run is that of its folder"),
    always("include_num_input_tokens_seen", "metrics.jsonl has tokens and consumed_samples"),
    lacking("disable_tqdm", "log.every says how often a line is printed"),
    lacking("log_level", "log.every says how often a line is printed"),
)

# Keys of config.json whose name is ours, such as hidden_size, need no row: the model's section takes them.
CONFIG_JSON = (
    choice(
        "model_type",
        "model.family",
        {"llama": "llama", "mistral": "llama", "ministral": "llama", "qwen2": "llama", "qwen3": "llama"}
        | {"seed_oss": "llama", "gpt2": "gpt", "smollm3": "smollm3", "exaone4": "exaone4", "helium": "helium"}
        | {"ernie4_5": "helium", "phi3": "phi3", "glm": "glm", "glm4": "glm", "starcoder2": "starcoder2"}
        | {"mixtral": "mixtral", "qwen3_moe": "qwen3_moe", "gpt_oss": "gpt_oss", "olmo": "olmo", "olmo2": "olmo"}
        | {"olmo3": "olmo", "olmoe": "olmoe", "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma2"}
        | {"granite": "granite", "granitemoe": "granitemoe", "cohere": "cohere", "cohere2": "cohere"}
        | {"deepseek_v2": "deepseek", "deepseek_v3": "deepseek", "kimi_k2": "deepseek", "glm4_moe_lite": "deepseek"}
        | {"glm4_moe": "glm4_moe", "arcee": "arcee", "nemotron": "nemotron", "apertus": "apertus"}
        | {"hunyuan_v1_dense": "hunyuan", "ministral3": "ministral3"},
    ),
    same("n_embd", "model.hidden_size"),
    same("n_layer", "model.num_hidden_layers"),
    same("n_head", "model.num_attention_heads"),
    same("n_inner", "model.intermediate_size"),
    same("n_positions", "model.max_position_embeddings"),
    choice("activation_function", "model.hidden_act", {"gelu_new": "gelu_pytorch_tanh"}),
    same("resid_pdrop", "model.hidden_dropout"),
    same("embd_pdrop", "model.hidden_dropout"),
    same("attn_pdrop", "model.attention_dropout"),
    same("layer_norm_epsilon", "model.rms_norm_eps"),
    computed("rope_parameters", "model.rope_scaling.rope_type", "and its other keys; rope_theta is model.rope_theta"),
    computed("use_sliding_window", "model.sliding_window", "0 if it is false"),
    computed("max_window_layers", "model.layer_types", "full_attention for so many layers, then sliding_attention"),
    always("use_cache", "training keeps no keys and values", "false"),
    same("num_local_experts", "model.moe.num_experts"),
    same("n_routed_experts", "model.moe.num_experts"),
    computed("n_shared_experts", "model.moe.shared_expert_intermediate_size", "x model.moe.moe_intermediate_size"),
    computed("decoder_sparse_step", "model.moe.mlp_only_layers", "numbers of the layers without experts, from 0"),
    same("first_k_dense_replace", "model.moe.first_k_dense_replace"),
    lacking("router_jitter_noise", NO_NOISE),
    always("output_router_logits", "model.moe.balance decides whether there is a loss"),
)

FLAGS = (*TRAINING_ARGUMENTS, *CONFIG_JSON)
