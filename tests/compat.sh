#!/usr/bin/env bash
# What the pipeline does with the oldest and the newest redis-py, on every server binary there is.
#     tests/compat.sh PYTHON          (make compat; another Python: make compat PYTHON=python3.13 VENV=.venv313)
# A redis-py that cannot be installed is said and left out. Clusters need redis-py 7: those tests are skipped below it.
set -euo pipefail
cd "$(dirname "$0")/.."
python="$1"

tests=(
  tests/unit/store tests/unit/run tests/servers/test_{connection,pipelined,resp}.py
  tests/servers/test_sentinel.py tests/servers/test_cluster.py tests/servers/test_versions.py
  tests/promises/nothing_lost/test_{leases,pipeline,producer,server_restart}.py
)
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
mapfile -t servers < <("$python" -c '
import shutil
from streamadv.store.embedded import _packaged_binaries
found = [shutil.which("redis-server"), shutil.which("valkey-server"), *map(str, _packaged_binaries())]
print("\n".join(path for path in found if path))')

"$python" --version
for client in "redis==5.1.*" "redis>=8,<9"; do
  folder="$scratch/${client//[^0-9]/}"
  if ! "$python" -m pip install --quiet --no-deps --target "$folder" "$client" async-timeout; then
    echo "left out: $client cannot be installed"
    continue
  fi
  for server in "${servers[@]}"; do
    echo "== $client on $("$server" --version)"
    PYTHONPATH="$folder:$PWD" STREAMADV_SERVER_BINARY="$server" "$python" -m pytest -q -p no:cacheprovider "${tests[@]}"
  done
done
