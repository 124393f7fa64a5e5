"""The family of DeepSeek-V2 and V3: its rules, its names at Hugging Face, and presets."""
