"""The family of GLM-4: its modules, its rules and names elsewhere, and presets."""
