#!/usr/bin/env bash
# Set-up, then the tests. Further arguments go to pytest:  bash scripts/test.sh tests/certify -k theorem
# The tests that compile for TPU (minutes each) run with:  bash scripts/test.sh -m slow
set -euo pipefail

CLIS_TEST_MODULES="pytest xdist pytest_timeout hypothesis flint ml_dtypes"
source "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
cd -- "$CLIS_ROOT"
# The tests are about the CPU device and interpret mode, also on a machine with a TPU.
export PJRT_DEVICE=CPU JAX_PLATFORMS=cpu
# Two processes, each with whole files, so that what a file sets up is made once. `-n 0` runs in this process.
exec "$CLIS_PYTHON_COMMAND" -m pytest -n 2 --dist loadfile "$@"
