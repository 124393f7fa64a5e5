"""Reads options as the programs do: with those of all families."""

from functools import partial

from megapar_models.registry import FOR_OPTIONS

from megapar.config import files
from megapar.migrate.hints import hint

load = partial(files.load, families=FOR_OPTIONS, hint=hint)
