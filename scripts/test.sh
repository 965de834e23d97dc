#!/usr/bin/env bash
# Set-up, then the tests. Further arguments go to pytest:  bash scripts/test.sh tests/certify -k theorem
# The tests that compile for TPU (minutes each) run with:  bash scripts/test.sh -m slow
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
cd -- "$CLIS_ROOT"
# The tests are about the CPU device and interpret mode, also on a machine with a TPU.
export PJRT_DEVICE=CPU JAX_PLATFORMS=cpu
exec "$CLIS_PYTHON_COMMAND" -m pytest "$@"
