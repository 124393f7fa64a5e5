"""Granite: its rules, its names at Hugging Face, and presets."""
