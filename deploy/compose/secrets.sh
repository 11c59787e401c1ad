#!/usr/bin/env bash
# secrets.sh [FOLDER]: makes the keys and passwords of compose.yaml in FOLDER (default: this one), once: `.env` and `viewer_key`.
set -euo pipefail
cd "${1:-$(dirname "$0")}"
[ ! -e .env ] || { echo "secrets: .env is there already; it stays" >&2; exit 0; }
umask 077
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
for name in SUPERUSER STORE DUMP REDIS ENGINE GRAFANA; do echo "${name}_PASSWORD=$(random)"; done > .env.partial
for role in ADMIN TRAINER EVALUATOR RUNNER VIEWER PROJECT SECRET; do
  echo "${role}_KEY=rt-$(echo "$role" | tr '[:upper:]' '[:lower:]')-$(random)"
done >> .env.partial
sed -n 's/^VIEWER_KEY=//p' .env.partial | tr -d '\n' > viewer_key
chmod 644 viewer_key # Prometheus's container has another user
mv .env.partial .env
