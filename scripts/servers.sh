#!/usr/bin/env bash
# servers.sh: makes sure that the programs which the tests start are there (PostgreSQL, Redis, nginx, Prometheus, pgbouncer,
# systemd's, bubblewrap, strace, libfaketime, Chromium with its driver).
set -euo pipefail
missing=()
ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null || missing+=(postgresql)
command -v redis-server >/dev/null || missing+=(redis-server)
PATH=$PATH:/usr/sbin command -v nginx >/dev/null || missing+=(nginx-light)
command -v promtool >/dev/null || missing+=(prometheus)
PATH=$PATH:/usr/sbin command -v pgbouncer >/dev/null || missing+=(pgbouncer)
command -v systemd-analyze >/dev/null || missing+=(systemd)
command -v bwrap >/dev/null || missing+=(bubblewrap)
command -v strace >/dev/null || missing+=(strace)
ls /usr/lib/*/faketime/libfaketime.so.1 >/dev/null 2>&1 || missing+=(faketime)
command -v chromium >/dev/null || missing+=(chromium)
command -v chromedriver >/dev/null || missing+=(chromium-driver)
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  echo "servers: installing ${missing[*]}"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}"; } >/dev/null && exit 0
fi
echo "servers: the tests need ${missing[*]}; install them (Debian: sudo apt-get install ${missing[*]}) and try again" >&2
exit 1
