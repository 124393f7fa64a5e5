"""One distribution: the import packages megapar (what trains), megapar_models, megapar_kernels and megapar_tools (what
people run beside training), and the programs.

The folders of the programs are no packages in a checkout, where a person runs them by their path. An installation has
them as megapar_programs, beside each other as here, and the command `megapar` starts them.
"""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="megapar",
    version="0.1.0",
    description="Pretraining of transformers with data, tensor, pipeline, context and expert parallelism",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "tools/megapar_tools/dashboard/LICENSE-uPlot"],
    keywords=["transformers", "pretraining", "tensor parallelism", "pipeline parallelism", "ZeRO", "Triton"],
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11,<3.15",  # torch has builds for 3.14, with which the tests were not run yet
    package_dir={
        "megapar": "megapar",
        "megapar_models": "models/megapar_models",
        "megapar_kernels": "kernels/megapar_kernels",
        "megapar_tools": "tools/megapar_tools",
        "megapar_programs.pretrain_scripts": "pretrain_scripts",
        "megapar_programs.tools": "tools",
    },
    packages=[
        *find_packages(".", include=["megapar", "megapar.*"]),
        *find_packages("models"),
        *find_packages("tools", include=["megapar_tools", "megapar_tools.*"]),
        "megapar_kernels",
        "megapar_programs.pretrain_scripts",
        "megapar_programs.tools",  # without tools/benchmarks, which measure a checkout
    ],
    package_data={
        "megapar_tools": ["migrate/flags/*.toml", "plan/machines/*.toml", "dashboard/*.*", "dashboard/LICENSE-uPlot"],
        "megapar_programs.pretrain_scripts": ["configs/*.toml"],
        "": ["py.typed", "presets/*.toml"],
    },
    entry_points={"console_scripts": ["megapar = megapar.__main__:main"]},
    install_requires=[
        "torch>=2.11,<2.14",  # tensors, autograd, SDPA, checkpoint(), the collectives
        "triton>=3.6; sys_platform == 'linux'",  # fused kernels; torch's own ops serve where there is none
        "einops>=0.8",  # shape changes that read as what they mean
        "typing_extensions>=4.12",  # type variables with defaults, which Python has from 3.13 on
        "numpy>=1.26",  # tokens in files, and counter-based weight initialization
        "safetensors>=0.4",  # checkpoints that hold tensors and cannot hold code
        "sentencepiece>=0.2.3",  # the tokenizer that the quickstart trains
        "tyro>=1.0",  # dataclasses to a command line with --help
        "jinja2>=3.1",  # chat templates, which are Hugging Face's, in its sandbox; torch needs it too
        # Both take 4 MB, and only the commands from_* import them: who comes over has nothing else to install first.
        "tree-sitter>=0.25",  # parses launch scripts of other frameworks, which are never run
        "tree-sitter-bash>=0.25",  # bash's grammar for it
        "rich>=13",  # progress and log lines
        "prometheus-client>=0.21",  # the text of the numbers that log.prometheus_port serves
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
        # What slow tests compare with, and .ci/run installs: TRL's objectives and templates, PEFT's adapters, Arrow's
        # files, the harness of tasks. They bring pandas, scikit-learn and scipy, so no user's environment gets them.
        "judges": ["trl>=1.16", "peft>=0.21", "accelerate>=1", "datasets>=4", "pyarrow>=17", "lm-eval>=0.4.13,<0.5"],
        "dev": [
            "pytest>=8",
            "PyYAML>=6",  # the tests read the templates for Kubernetes and SkyPilot
            "pytest-xdist>=3",  # the suite on all cores: half the time
            "hypothesis>=6",
            "ruff",
            "mypy",
            "pre-commit",
            "transformers>=5",
            "huggingface_hub",  # comes with transformers; names the error of a config.json that it refuses
            "tokenizers>=0.21",
            "tiktoken>=0.8",
            "zstandard>=0.22",
            "Markdown>=3.5",  # comes with mkdocs; the tests make anchors of headings as the site does
            "mkdocs>=1.6,<2",
            "mkdocs-material>=9.7,<10",
            "mkdocstrings>=1,<2",
            "mkdocstrings-python>=2,<3",
        ],
    },
)
