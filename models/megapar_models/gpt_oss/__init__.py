"""The family of gpt-oss: its rules, its names at Hugging Face, and presets."""
