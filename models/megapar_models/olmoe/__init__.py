"""OLMoE: its rules, its names at Hugging Face, and a preset."""
