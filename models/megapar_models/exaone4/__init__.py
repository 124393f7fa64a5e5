"""The family of EXAONE 4: its modules, its rules and names elsewhere, and presets."""
