#!/bin/sh
# Copies the image's compiled loops to where they may be written: numba uses no cache that it cannot write to.
set -eu
if [ -n "${NUMBA_CACHE_DIR:-}" ] && [ ! -e "$NUMBA_CACHE_DIR" ]; then
  cp -R /opt/streamadv/kernels "$NUMBA_CACHE_DIR" || echo "no copy in $NUMBA_CACHE_DIR: loops are compiled anew" >&2
fi
exec streamadv "$@"
