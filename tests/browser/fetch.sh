#!/bin/sh
# Prints a folder with a chromium that runs: Debian's package and what it needs and lacks here, unpacked into a cache
# and not installed. Says so where it cannot be had.
set -e
cache="${XDG_CACHE_HOME:-$HOME/.cache}/streamadv/chromium"
mkdir -p "$cache/bin" "$cache/packages"
if ! command -v chromium > /dev/null && [ ! -x "$cache/bin/chromium" ]; then
    packages=$(apt-get install -s --no-install-recommends chromium 2> /dev/null | sed -n 's/^Inst \([^ ]*\).*/\1/p')
    if [ -n "$packages" ] && { cd "$cache/packages" && apt-get download $packages; } >&2; then
        for package in "$cache"/packages/*.deb; do dpkg -x "$package" "$cache"; done
        cat > "$cache/bin/chromium" << END
#!/bin/sh
libraries="$cache/usr/lib/x86_64-linux-gnu"
LD_LIBRARY_PATH="\$libraries:\$libraries/pulseaudio:\$LD_LIBRARY_PATH" exec "$cache/usr/lib/chromium/chromium" "\$@"
END
        chmod +x "$cache/bin/chromium"
        rm -r "$cache/packages"
    else
        echo "chromium is not here and apt-get cannot fetch it: what needs it will be skipped" >&2
    fi
fi
echo "$cache/bin"
