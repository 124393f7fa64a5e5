# Sourced by quickstart.sh and tests/run.sh: a .venv in the repository's root with the pinned packages, made once.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
wanted=$(cat setup.py constraints.txt | sha256sum)
if [ ! -f .venv/installed ] || [ "$(cat .venv/installed)" != "$wanted" ]; then
    echo "installing into $PWD/.venv"
    python3.11 -m venv .venv
    .venv/bin/pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
    .venv/bin/pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
    echo "$wanted" > .venv/installed
fi
source .venv/bin/activate
