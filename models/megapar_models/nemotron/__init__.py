"""The family of the dense Nemotrons: its rules, its names at Hugging Face, and presets."""
