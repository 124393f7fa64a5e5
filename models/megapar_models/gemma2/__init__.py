"""Gemma 2 and 3: their rules, their names at Hugging Face, and presets."""
