"""The family of Qwen3's mixtures: its modules, its rules and names elsewhere, a plain version of it, and presets."""
