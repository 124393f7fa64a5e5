# Sourced by quickstart.sh and tests/run.sh: a .venv in the repository's root with the pinned packages, made once.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
wanted=$(cat setup.py constraints.txt | sha256sum)
if [ ! -f .venv/installed ] || [ "$(cat .venv/installed)" != "$wanted" ]; then
    echo "installing into $PWD/.venv"
    python3.11 -m venv .venv
    install() { .venv/bin/pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt "$@"; }
    install torch==2.13.0
    # torch's CUDA builds bring their own triton; its CPU build brings none, and kernels are interpreted by this one.
    [ "$(uname)" != Linux ] || .venv/bin/python -c "import triton" 2> /dev/null || install triton==3.9.0
    install --editable '.[dev]'
    echo "$wanted" > .venv/installed
fi
source .venv/bin/activate
