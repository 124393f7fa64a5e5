# Sourced by the scripts: a .venv in the repository's root with the pinned packages, made once. `extra=dev`, which
# tests/run.sh sets, adds what the tests need, and the first command does not.
# Python 3.11, 3.12, 3.13 or 3.14 makes it: the first of these that is there, or the one that PYTHON names. Nobody has
# run the tests with 3.14 yet; all packages of constraints.txt have builds for it.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Of pyproject.toml only what is installed: the settings of tools come behind it.
wanted=$(sed '/^\[tool\./,$d' pyproject.toml | cat - setup.py constraints.txt | sha256sum)
# Some containers set it. Without compiled files each process would compile what it imports.
unset PYTHONDONTWRITEBYTECODE
installed=.venv/installed${extra:+-$extra}
if [ ! -f "$installed" ] || [ "$(cat "$installed")" != "$wanted" ]; then
    python=''
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2> /dev/null; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "no Python 3.11, 3.12, 3.13 or 3.14 among: ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}" >&2
        exit 2
    fi
    echo "installing into $PWD/.venv with $("$python" --version)"
    "$python" -m venv .venv
    # Python compiles a file at its first import: pip would compile all files, which takes as long as the rest of its work.
    install() { .venv/bin/pip install --no-compile --quiet --quiet --disable-pip-version-check --constraint constraints.txt "$@"; }
    install torch==2.13.0
    # torch's CUDA builds bring their own triton; its CPU build brings none, and kernels are interpreted by this one.
    triton=triton==3.9.0
    if [ "$(uname)" != Linux ] || .venv/bin/python -c "import triton" 2> /dev/null; then
        triton=
    fi
    install $triton --editable ".${extra:+[$extra]}"
    echo "$wanted" | tee .venv/installed > "$installed"
fi
source .venv/bin/activate
