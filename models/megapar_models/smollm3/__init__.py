"""The family of SmolLM3: its modules, its rules and names elsewhere, and presets."""
