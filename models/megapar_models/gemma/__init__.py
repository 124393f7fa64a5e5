"""The Gemma family: its rules, its names at Hugging Face, and presets."""
