"""The family of GPT-J: its rules, its names at Hugging Face, and presets."""
