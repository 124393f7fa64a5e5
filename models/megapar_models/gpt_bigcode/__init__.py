"""The family of StarCoder and SantaCoder: its names at Hugging Face, and presets."""
