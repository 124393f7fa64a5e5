"""One distribution, three import packages: megapar (the framework), megapar_models and megapar_kernels."""

from setuptools import find_packages, setup

setup(
    name="megapar",
    version="0.1.0",
    description="3D-parallel transformer pretraining that one person can read in an afternoon",
    license="Apache-2.0",
    python_requires=">=3.11",
    package_dir={
        "megapar": "megapar",
        "megapar_models": "models/megapar_models",
        "megapar_kernels": "kernels/megapar_kernels",
    },
    packages=[
        *find_packages(".", include=["megapar", "megapar.*"]),
        *find_packages("models"),
        "megapar_kernels",
    ],
    package_data={"megapar": ["py.typed"], "": ["presets/*.toml"]},
    install_requires=[
        "torch>=2.11,<2.14",  # tensors, autograd, SDPA, checkpoint(), the collectives
        "triton>=3.6; sys_platform == 'linux'",  # fused kernels; torch's own ops serve where there is none
        "einops>=0.8",  # shape changes that read as what they mean
        "numpy>=1.26",  # memory-mapped tokens and counter-based weight initialization
        "safetensors>=0.4",  # checkpoints that hold tensors and cannot hold code
        "sentencepiece>=0.2",  # the tokenizer that the quickstart trains
        "tyro>=1.0",  # dataclasses to a command line with --help
        "rich>=13",  # progress and log lines
        "tensorboard>=2.15",  # loss curves while a run is going
        "matplotlib>=3.8",  # loss curve and pipeline timeline as PNG
    ],
    extras_require={
        "convert": ["transformers>=5"],  # what tools/convert_checkpoint.py compares logits with
        # What preprocessing reads or tokenizes with, imported where it is asked for: hf:, tiktoken:, .zst, .parquet.
        # The tests have all but pyarrow, which takes 170 MB.
        "data": ["tokenizers>=0.21", "tiktoken>=0.8", "zstandard>=0.22", "pyarrow>=17"],
        # What tools/build_docs.sh needs: the last mkdocs before 2, its theme, and API pages out of docstrings.
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.7,<10", "mkdocstrings>=1,<2", "mkdocstrings-python>=2,<3"],
        "dev": [
            "pytest>=8",
            "pytest-xdist>=3",  # the suite on all cores: half the time
            "hypothesis>=6",
            "ruff",
            "mypy",
            "pre-commit",
            "transformers>=5",
            "tokenizers>=0.21",
            "tiktoken>=0.8",
            "zstandard>=0.22",
            "mkdocs>=1.6,<2",
            "mkdocs-material>=9.7,<10",
            "mkdocstrings>=1,<2",
            "mkdocstrings-python>=2,<3",
        ],
    },
)
