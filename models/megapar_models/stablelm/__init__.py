"""The family of StableLM 2: its modules, its rules and names elsewhere, and presets."""
