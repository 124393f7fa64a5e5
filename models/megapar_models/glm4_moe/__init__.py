"""The family of GLM-4.5: its rules, its names at Hugging Face, and presets."""
