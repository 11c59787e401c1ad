#!/usr/bin/env bash
# trainers.sh VENV: makes a virtual environment with tinker-cookbook beside ours (once; 50 MB, a minute).
# It sees our packages through a .pth file, so torch is not installed again; only what is missing comes.
set -euo pipefail
venv=${1:?usage: trainers.sh VENV}
cd "$(dirname "$0")/.."

[ -f "$venv/.ready" ] && exit 0
die() { echo "trainers: $*" >&2; exit 1; }

echo "trainers: installing tinker-cookbook into $venv (once)"
rm -rf "$venv" && .venv/bin/python -m venv "$venv" || die "can't make a virtual environment; is python3-venv installed?"
ours=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$ours" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth"
"$venv/bin/pip" install -q --no-deps tinker-cookbook==0.5.8 chz==0.4.0 blobfile==3.3.0 lxml==6.1.3 \
  2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2) ||
  die "can't install tinker-cookbook; is a package index reachable?"
touch "$venv/.ready"
