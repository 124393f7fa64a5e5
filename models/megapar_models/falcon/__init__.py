"""The family of Falcon: its rules, its names at Hugging Face, and presets."""
