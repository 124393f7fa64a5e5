"""The family of Apertus: its rules, its names at Hugging Face, and presets."""
