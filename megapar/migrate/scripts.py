"""Flags of scripts around Hugging Face's Trainer: earlier names, and those of TRL and other fine-tuning scripts."""

from megapar.migrate import conversions_others as c
from megapar.migrate.conversions import nothing
from megapar.migrate.rows import NO_HUB, OF_MEMORY, always, choice, computed, lacking, same

PREPARED = "data.train: tools/preprocess_data.py makes tokens of it first"
OF_PREPARATION = "an option of tools/preprocess_data.py"
OF_TORCH = "torch chooses the attention kernel"

FLAGS = (
    # Earlier names of fields of TrainingArguments
    computed(
        "evaluation_strategy",
        "train.eval_every",
        "it counts steps; without data.validation nothing is evaluated",
        convert=c.eval_strategy,
    ),
    computed("warmup_ratio", "optimizer.warmup_steps", "the share x train.steps", convert=c.warmup_ratio),
    always("overwrite_output_dir", "checkpoint.resume decides what is resumed", "true", "True"),
    lacking("hub_strategy", NO_HUB),
    lacking("fsdp_transformer_layer_cls_to_wrap", "layers are the units that are gathered"),
    # The model
    lacking("model_name_or_path", "give --model: what tools/convert_checkpoint.py hf-to-native wrote, or a preset"),
    always("model_revision", "tools/convert_checkpoint.py hf-to-native reads a folder", "main"),
    choice("torch_dtype", "train.precision", {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}),
    always("attn_implementation", OF_TORCH),
    always("use_flash_attn", OF_TORCH),
    always("use_flash_attention_2", OF_TORCH),
    always("trust_remote_code", "no code of a model is run", "false", "False"),
    always("low_cpu_mem_usage", OF_MEMORY),
    same("lora_r", "adapter.rank"),
    same("lora_alpha", "adapter.alpha"),
    same("lora_dropout", "adapter.dropout"),
    computed("lora_target_modules", "adapter.targets", "q_proj: q, and so on; all-linear: unset", convert=c.adapted),
    always("lora_target_linear", "all matrices of the layers have adapters by default", "true", "True"),
    computed("lora_module_name", "adapter.alpha", "1 in DeepSpeed-Chat; adapter.targets", convert=c.chat_adapters),
    computed("only_optimize_lora", "train.trainable", "unset: adapters alone are trained", convert=nothing),
    always("use_peft", "adapter.rank decides"),
    always("load_in_4bit", "weights have the dtype of train.precision", "false", "False"),
    always("load_in_8bit", "weights have the dtype of train.precision", "false", "False"),
    same("zero_stage", "optimizer.zero_stage"),
    # Preferences
    computed("beta", "train.beta", "the same, with train.objective dpo", convert=c.beta),
    computed("loss_type", "train.objective", "sigmoid: dpo, sigmoid_norm: dpo_norm, ipo: ipo", convert=c.preferences),
    computed("label_smoothing", "train.label_smoothing", "the same, of loss_type robust", convert=c.smoothed),
    lacking("max_prompt_length", "--max_length of tools/preprocess_data.py preferences is that of a pair"),
    # Texts
    same("max_seq_length", "train.seq_length"),
    same("max_length", "train.seq_length"),
    same("model_max_length", "train.seq_length"),
    same("block_size", "train.seq_length"),
    always("packing", "samples are packed; data.documents apart keeps documents apart"),
    lacking("tokenizer_name", "data.tokenizer hf:FOLDER/tokenizer.json"),
    lacking("tokenizer_name_or_path", "data.tokenizer hf:FOLDER/tokenizer.json"),
    always("use_fast_tokenizer", "tokenizer.json is read by tokenizers"),
    computed("data_path", "data.train", "PREFIX, or a blend such as 0.7:A 0.3:B", convert=c.texts),
    lacking("train_file", PREPARED),
    lacking("validation_file", PREPARED),
    lacking("dataset_name", PREPARED),
    lacking("dataset_mixer", PREPARED),
    lacking("dataset_mixture", PREPARED),
    lacking("dataset_splits", PREPARED),
    lacking("chat_template", "tools/preprocess_data.py chat takes the template"),
    always("dataset_num_proc", OF_PREPARATION),
    always("preprocessing_num_workers", OF_PREPARATION),
    always("lazy_preprocess", "tokens are prepared once"),
    always("dataset_kwargs", OF_PREPARATION),
    computed("val_set_size", "data.split", "in percent, such as 95 5 0"),
    computed("evals_per_epoch", "train.eval_every", "steps between two", convert=c.times_an_epoch("train.eval_every")),
    computed("saves_per_epoch", "checkpoint.every", "steps between two", convert=c.times_an_epoch("checkpoint.every")),
    same("wandb_project", "log.wandb"),
    always("deepspeed_config", "tools/from_deepspeed.py turns the ds_config into options"),
)

# Names of programs with a loop of their own, and those of axolotl, by the names of the Trainer and its scripts. They
# are no rows: as a hint each would answer a name that nobody means.
OWN_LOOPS = {
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "max_seq_len": "max_seq_length",
    "lora_dim": "lora_r",
    "num_warmup_steps": "warmup_steps",
    "model_name": "model_name_or_path",
}
# Names that programs around the Trainer have too.
OF_ANY_PROGRAM = {
    "log_interval": "logging_steps",
    "wandb_run_name": "run_name",
    "data_split": "dataset_splits",
    "dataset_percentage": "dataset_splits",
}
AXOLOTL = {
    "base_model": "model_name_or_path",
    "num_epochs": "num_train_epochs",
    "micro_batch_size": "per_device_train_batch_size",
    "sequence_len": "max_seq_length",
    "lr_scheduler": "lr_scheduler_type",
    "sample_packing": "packing",
    "flash_attention": "use_flash_attn",
    "adapter": "use_peft",
    "optimizer": "optim",
    "datasets": "dataset_mixer",
    "model_type": "architectures",
    "tokenizer_type": "use_fast_tokenizer",
}
