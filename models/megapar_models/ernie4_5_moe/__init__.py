"""The family of ERNIE 4.5's mixtures: its modules, its rules and names elsewhere, and presets."""
