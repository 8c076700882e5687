#!/bin/sh
# Prints a folder with prometheus and promtool: Debian's package, unpacked into a cache and not installed. Prints the
# folder of those on PATH where they are there; says so where they cannot be had.
set -e
if found=$(command -v prometheus); then dirname "$found"; exit; fi
cache="${XDG_CACHE_HOME:-$HOME/.cache}/streamadv/prometheus"
if [ ! -x "$cache/usr/bin/prometheus" ]; then
    if ! { mkdir -p "$cache" && cd "$cache" && apt-get download prometheus && dpkg -x prometheus_*.deb .; } >&2; then
        echo "prometheus is not here and apt-get cannot fetch it: the tests will skip" >&2
        echo "$cache"
        exit
    fi
fi
echo "$cache/usr/bin"
