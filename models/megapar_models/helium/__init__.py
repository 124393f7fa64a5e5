"""The family of Helium and ERNIE 4.5: its rules, its names elsewhere, and presets."""
