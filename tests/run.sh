#!/usr/bin/env bash
# Installs what the tests need, then runs linters and tests: tests/run.sh [pytest options].
# Without root or sudo the system packages stay out, and tests that need them skip and say so;
# with CI=true they fail.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

# package:program, for Debian and Ubuntu
wanted=(slurm-wlm:slurmctld slurmdbd:slurmdbd mariadb-server:mariadbd munge:munged iproute2:ip procps:ps chromium:chromium)
packages=()
for entry in "${wanted[@]}"; do
  PATH=$PATH:/usr/sbin command -v "${entry#*:}" >/dev/null || packages+=("${entry%%:*}")
done
python3 -c 'import ensurepip' 2>/dev/null || packages+=(python3-venv)
if [[ ${#packages[@]} -gt 0 ]]; then
  as_root=()
  if [[ $(id -u) -ne 0 ]]; then as_root=(sudo -n); fi
  if command -v apt-get >/dev/null && "${as_root[@]}" true 2>/dev/null; then
    echo "tests/run.sh: installing ${packages[*]}"
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${packages[@]}" >/dev/null
  else
    echo "tests/run.sh: not installed, for want of apt-get or root: ${packages[*]}"
    if [[ ${CI-} == true ]]; then exit 1; fi
  fi
fi

./launch.sh --setup-only
python=$(./launch.sh --setup-only 2>&1 | sed -n 's/^launch.sh: ready: //p')
if ! cmp -s tests/requirements.txt .venv/tests-requirements.txt; then
  if command -v uv >/dev/null; then
    uv pip install --quiet --python "$python" -r tests/requirements.txt
  else
    "$python" -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt
  fi
  if [[ $python == "$PWD/.venv/bin/python" ]]; then cp tests/requirements.txt .venv/tests-requirements.txt; fi
fi

"$python" -m ruff check .
"$python" -m ruff format --check .
shopt -s nullglob
"$(dirname -- "$python")/shellcheck" launch.sh .ci/run tests/*.sh slurm/*.sbatch
# Three files at a time, for two cores, as tests wait a lot: on Slurm, and for processes that are gone or hang.
exec "$python" -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder "$@"
