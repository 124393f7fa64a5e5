"""OLMo 1 to 3: their rules, their names at Hugging Face, and presets."""
