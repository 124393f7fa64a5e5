"""Cohere's Command models: their rules, their names at Hugging Face, and presets."""
