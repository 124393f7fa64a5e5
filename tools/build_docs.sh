#!/usr/bin/env bash
# Build the documentation into DIR: bash tools/build_docs.sh DIR [mkdocs option ...]
# A broken link or an unknown page ends it with an error.
# Needs the docs extra (pip install -c constraints.txt -e '.[docs]') and no network.
set -euo pipefail
if [ $# -eq 0 ]; then
    echo "usage: bash tools/build_docs.sh DIR [mkdocs option ...]" >&2
    exit 2
fi
site=$(realpath -m "$1")
# mkdocs empties the folder first: take only one that is new, empty, or an earlier site.
if [ -d "$site" ] && [ -n "$(ls -A "$site")" ] && [ ! -f "$site/objects.inv" ]; then
    echo "$site holds other files, and would be emptied: give a new folder" >&2
    exit 2
fi
cd "$(dirname "$0")/.."
# Not --quiet: mkdocs then counts no warnings, and strict means nothing. The variable silences Material's advertisement.
NO_MKDOCS_2_WARNING=1 exec "${PYTHON:-python}" -m mkdocs build --strict --site-dir "$site" "${@:2}"
