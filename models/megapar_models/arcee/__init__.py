"""The family of Arcee's AFM: its rules, its names at Hugging Face, and presets."""
