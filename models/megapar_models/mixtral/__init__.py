"""The Mixtral family: its modules, its rules and names elsewhere, a plain version of it, and presets."""
