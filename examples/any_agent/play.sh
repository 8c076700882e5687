#!/bin/sh
# The whole loop on this machine. ENGINE: URL of vLLM that serves the folder `model`; PORT: of the gateway.
# Runs inside `streamadv up`, see README.md.
set -e
engine=${ENGINE:-http://127.0.0.1:8000} port=${PORT:-8200}
streamadv gateway --port "$port" --engine "$engine" --load-weights &
gateway=$!
trap 'kill $gateway' EXIT
python rollouts.py --gateway "http://127.0.0.1:$port"
