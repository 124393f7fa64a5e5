"""One distribution: the import packages megapar (what trains), megapar_models, megapar_kernels and megapar_tools (what
people run beside training), and the programs. pyproject.toml has its name, dependencies and all else that is known
without looking at files.

The folders of the programs are no packages in a checkout, where a person runs them by their path. An installation has
them as megapar_programs, beside each other as here, and the command `megapar` starts them.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup


def index_page(readme: str) -> str:
    """Return the README for a package index, where only links with an address lead anywhere.

    Other links become their words, and pictures their descriptions.
    """
    pictures_told = re.sub(r"!\[([^\]]*)\]\((?!https://)[^)]*\)", r"(Picture: \1)", readme)
    return re.sub(r"\[([^\]]+)\]\((?!https://)[^)]*\)", r"\1", pictures_told)


setup(
    long_description=index_page((Path(__file__).parent / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
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
    include_package_data=False,  # of files only package_data; else every folder of files counts as a package
    package_data={
        "megapar_tools": ["migrate/flags/*.toml", "plan/machines/*.toml", "dashboard/*.*", "dashboard/LICENSE-uPlot"],
        "megapar_programs.pretrain_scripts": ["configs/*.toml"],
        "": ["py.typed", "presets/*.toml"],
    },
)
