"""The family of Phi-1, 1.5 and 2: its rules, its names at Hugging Face, and presets."""
