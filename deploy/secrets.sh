#!/bin/sh
# Makes what compose mounts as secrets: passwords, the server's users, the password file of its exporter.
#   sh secrets.sh [RUN]     in deploy/, once; needs openssl and streamadv on PATH
set -eu
run="${1:-${STREAMADV_RUN:-default}}"
cd "$(dirname "$0")"
if [ -e secrets ]; then
  echo "secrets/ is there already: delete it to make new passwords" >&2
  exit 1
fi
umask 077
mkdir secrets.new
cd secrets.new
for user in owner producer pipeline observer; do openssl rand -hex 32 > "$user.password"; done
{
  echo "user default off ~* &* +@all"  # nobody logs in as it; the server reads its file back as it
  printf 'user owner on #%s ~* &* +@all\n' "$(printf %s "$(cat owner.password)" | openssl dgst -sha256 -r | cut -d ' ' -f 1)"
  STREAMADV_PRODUCER_PASSWORD_FILE=producer.password STREAMADV_PIPELINE_PASSWORD_FILE=pipeline.password \
    STREAMADV_OBSERVER_PASSWORD_FILE=observer.password streamadv config acl --run "$run"
} > users.acl
printf '{"redis://streamadv-observer@redis:6379": "%s"}\n' "$(cat observer.password)" > redis-exporter.json
# The users inside the containers read them; outside, the folder keeps everybody else away.
chmod 444 ./*
cd ..
mv secrets.new secrets
