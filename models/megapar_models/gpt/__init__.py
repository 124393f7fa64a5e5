"""The GPT-2 family: its modules, its rules and names elsewhere, a plain version of it, and presets."""
