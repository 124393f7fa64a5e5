"""The family of dense HunYuan: its rules, its names at Hugging Face, and presets."""
