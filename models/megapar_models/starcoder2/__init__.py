"""The family of StarCoder2: its modules, its rules and names elsewhere, and presets."""
