#!/bin/sh
# Prints a folder with what of prometheus, promtool and prometheus-redis-exporter is not on PATH: Debian's packages,
# unpacked into a cache and not installed. Says so where they cannot be had.
set -e
cache="${XDG_CACHE_HOME:-$HOME/.cache}/streamadv/prometheus"
mkdir -p "$cache"
for package in prometheus prometheus-redis-exporter; do
    if command -v "$package" > /dev/null || [ -x "$cache/usr/bin/$package" ]; then continue; fi
    if ! { cd "$cache" && apt-get download "$package" && dpkg -x "$package"_*.deb .; } >&2; then
        echo "$package is not here and apt-get cannot fetch it: what needs it will be skipped" >&2
    fi
done
echo "$cache/usr/bin"
