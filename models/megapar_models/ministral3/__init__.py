"""The family of Ministral 3: its rules, its names at Hugging Face, and presets."""
