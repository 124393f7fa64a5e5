"""The family of Phi-3 and Phi-4: its modules, its rules and names elsewhere, and presets."""
