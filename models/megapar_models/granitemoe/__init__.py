"""Mixtures of Granite: their rules, their names at Hugging Face, and presets."""
