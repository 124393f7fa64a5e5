"""The family of OPT: its modules, its rules and names elsewhere, and presets."""
