#!/usr/bin/env bash
# setup.sh PYTHON VENV EXTRA: makes the virtual environment and installs rolltap with an extra, pinned.
set -euo pipefail
python=$1 venv=$2 extra=$3
cd "$(dirname "$0")/.."

die() { echo "setup: $*" >&2; exit 1; }

command -v "$python" >/dev/null || die "no '$python' found; install Python 3.11 or later, or call make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  die "$("$python" --version) is too old; rolltap needs Python 3.11 or later (make PYTHON=/path/to/python3.11)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || die "can't make a virtual environment; is python3-venv installed?"

install() { "$venv/bin/python" -m pip install -q "$@" 2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2); }

echo "setup: installing rolltap[$extra] into $venv (the first time takes a few minutes)"
# torch first: the CPU build where one is offered, and never a second one pulled in by another package.
install -c constraints.txt torch || die "can't install torch; is a package index reachable?"
install -c constraints.txt -e ".[$extra]" || die "can't install rolltap[$extra]; is a package index reachable?"
# Agents run in a sandbox unless told otherwise; without bubblewrap `rolltap run` refuses.
if ! command -v bwrap >/dev/null && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  echo "setup: installing bubblewrap"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq bubblewrap; } >/dev/null 2>&1 || true
fi
command -v bwrap >/dev/null ||
  echo "setup: no bubblewrap (apt install bubblewrap); until then agents run with --runtime process only" >&2
echo "setup: done"
