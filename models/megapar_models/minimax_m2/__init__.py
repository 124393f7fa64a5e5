"""The family of MiniMax-M2: its modules, its rules and names elsewhere, and presets."""
