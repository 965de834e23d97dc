# shellcheck shell=bash
# Sourced by demo.sh, test.sh and .ci/run: makes the environment, then sets CLIS_ROOT and CLIS_PYTHON_COMMAND.
#
#   (nothing set)          a virtual environment .venv in the repository, from scripts/requirements.lock;
#                          reused as long as the lock file is the same
#   CLIS_PYTHON=/path/to/python   that interpreter's environment, which is left as it is (as on a TPU VM)

CLIS_ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
CLIS_LOCK_FILE="$CLIS_ROOT/scripts/requirements.lock"
CLIS_VENV="$CLIS_ROOT/.venv"
CLIS_OWNED="$CLIS_VENV/.made-by-clis"  # this directory is ours to delete
CLIS_COMPLETE="$CLIS_VENV/.complete"   # written last; holds the lock file's checksum
CLIS_NEEDED_GB=10
# test.sh adds what only the tests need.
CLIS_NEEDED_MODULES="torch torch_xla jax diffusers transformers typer rich safetensors imageio matplotlib ${CLIS_TEST_MODULES:-}"

clis_error() {
    printf 'error: %s\n' "$*" >&2
    return 1
}

# Exit status 0 if the interpreter $1 runs and is one of the versions that the lock file resolves for.
clis_python_suits() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

# Prints the first suitable interpreter. 3.11 first: the tested set of versions.
clis_find_python() {
    local name found="" without_venv=""
    for name in python3.11 python3.12 python3.13 python3.10 python3; do
        clis_python_suits "$name" || continue
        if "$name" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            found="$name"
            break
        fi
        without_venv="${without_venv:-$name}"
    done
    if [[ -n "$found" ]]; then
        printf '%s\n' "$found"
    elif [[ -n "$without_venv" ]]; then
        clis_error "$without_venv cannot make virtual environments; install its venv module" \
            "(Debian, Ubuntu: sudo apt install $without_venv-venv) and run this again"
    else
        clis_error "no Python 3.10 to 3.13 found; install one (Debian, Ubuntu: sudo apt install python3 python3-venv)" \
            "or name one with CLIS_PYTHON=/path/to/python"
    fi
}

clis_lock_checksum() {
    sha256sum <"$CLIS_LOCK_FILE" | cut -d ' ' -f 1
}

clis_venv_is_current() {
    [[ -f "$CLIS_COMPLETE" && "$(cat "$CLIS_COMPLETE")" == "$(clis_lock_checksum)" ]] &&
        clis_python_suits "$CLIS_VENV/bin/python"
}

clis_check_machine() {
    if [[ "$(uname -s)-$(uname -m)" != "Linux-x86_64" ]]; then
        clis_error "torch_xla is published for Linux on x86-64 only and this is $(uname -s) on $(uname -m);" \
            "use such a machine, or an environment that has torch_xla with CLIS_PYTHON=/path/to/python"
        return
    fi
    local free_gb
    free_gb="$(df -Pk "$CLIS_ROOT" | awk 'NR == 2 { print int($4 / 1048576) }')"
    if ((free_gb < CLIS_NEEDED_GB)); then
        clis_error "$free_gb GB are free in $CLIS_ROOT and the set-up needs $CLIS_NEEDED_GB GB; free some," \
            "move the repository to a bigger disk, or use CLIS_PYTHON=/path/to/python"
    fi
}

clis_make_venv() {
    local python
    if [[ -e "$CLIS_VENV" && ! -e "$CLIS_OWNED" ]]; then
        clis_error "$CLIS_VENV exists and was not made by this script; move it away, or use it with" \
            "CLIS_PYTHON=$CLIS_VENV/bin/python"
        return
    fi
    python="$(clis_find_python)" || return
    clis_check_machine || return
    cat <<MESSAGE
Setting up $CLIS_VENV with $("$python" --version): PyTorch, PyTorch/XLA, JAX and diffusers.
This takes about 9 GB of disk, a download of about 4 GB (which pip also keeps in its cache) and 5 to 15 minutes.
It happens once; later runs reuse it.
MESSAGE
    rm -rf -- "$CLIS_VENV"
    mkdir -- "$CLIS_VENV" && : >"$CLIS_OWNED" || return
    if ! "$python" -m venv "$CLIS_VENV"; then
        clis_error "$python -m venv failed (see above); on Debian and Ubuntu: sudo apt install python3-venv"
        return
    fi
    local pip=("$CLIS_VENV/bin/python" -m pip --disable-pip-version-check)
    if ! "${pip[@]}" install --requirement "$CLIS_LOCK_FILE"; then
        clis_error "the packages were not installed (see above). Check the network and the free disk space" \
            "(df -h '$CLIS_ROOT'), then run this again: what was downloaded is in pip's cache"
        return
    fi
    if ! "${pip[@]}" install --quiet --no-deps --no-build-isolation --editable "$CLIS_ROOT"; then
        clis_error "torch-clis itself was not installed (see above); run this again, and report it if it persists"
        return
    fi
    clis_lock_checksum >"$CLIS_COMPLETE"
}

clis_use_venv() {
    # One set-up at a time: demo.sh and test.sh may be started together.
    exec 9>"$CLIS_ROOT/.venv.lock" || return
    if ! flock --nonblock 9; then
        echo "Waiting for another set-up of $CLIS_VENV to finish."
        flock 9
    fi
    local status=0
    clis_venv_is_current || clis_make_venv || status=$?
    exec 9>&-
    CLIS_PYTHON_COMMAND="$CLIS_VENV/bin/python"
    return "$status"
}

clis_use_given_python() {
    if ! clis_python_suits "$CLIS_PYTHON"; then
        clis_error "CLIS_PYTHON=$CLIS_PYTHON is not a Python 3.10 to 3.13 that runs; correct it, or unset it to have" \
            "an environment made"
        return
    fi
    local missing
    # shellcheck disable=SC2086  # a list of words
    missing="$("$CLIS_PYTHON" -c 'import importlib.util, sys
print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])' $CLIS_NEEDED_MODULES)" || return
    if [[ -n "$missing" ]]; then
        clis_error "CLIS_PYTHON=$CLIS_PYTHON lacks: $missing. Install them with" \
            "'$CLIS_PYTHON' -m pip install -r '$CLIS_LOCK_FILE', or unset CLIS_PYTHON to have an environment made"
        return
    fi
    CLIS_PYTHON_COMMAND="$CLIS_PYTHON"
    export PYTHONPATH="$CLIS_ROOT${PYTHONPATH:+:$PYTHONPATH}"
}

if [[ -n "${CLIS_PYTHON:-}" ]]; then
    clis_use_given_python
else
    clis_use_venv
fi
