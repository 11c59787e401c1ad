#!/usr/bin/env bash
# sinks.sh VENV: makes a virtual environment with W&B's and MLflow's clients beside ours (once), which sees our packages
# through a .pth file. Their servers are not needed: both keep runs in files.
set -euo pipefail
venv=${1:?usage: sinks.sh VENV}
cd "$(dirname "$0")/.."

[ -f "$venv/.ready" ] && exit 0
echo "sinks: installing wandb and mlflow-skinny into $venv (once)"
rm -rf "$venv" && .venv/bin/python -m venv "$venv"
"$venv/bin/pip" install -q wandb==0.31.0 mlflow-skinny==3.17.2 2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2) ||
  { echo "sinks: can't install them; is a package index reachable?" >&2; exit 1; }
ours=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$ours" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth"
touch "$venv/.ready"
