"""Reads options as the programs do: with those of all families."""

from functools import partial

from megapar_models.registry import FOR_OPTIONS
from megapar_tools.migrate.hints import hint

from megapar.config import files

load = partial(files.load, families=FOR_OPTIONS, hint=hint)
