"""megapar: Megatron-style 3D-parallel pretraining, readable in an afternoon."""

__version__ = "0.1.0"
