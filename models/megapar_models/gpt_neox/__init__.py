"""The family of GPT-NeoX and Pythia: its modules, its rules and names elsewhere, and presets."""
