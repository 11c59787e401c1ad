#!/usr/bin/env bash
# lock.sh: writes requirements/*.txt, the pins of constraints.txt with the hashes of every file of each release.
#   base.txt    what `pip install rolltap` brings; deploy/Dockerfile installs it
#   server.txt  that and the extras of a server: postgres, redis, tokens; deploy/server.Dockerfile installs it
#   tested.txt  all that was tested, for scripts/audit.py. scripts/setup.sh installs by constraints.txt instead: a CPU
#               build of torch from another index has other hashes, and pip checks no hash of an editable install.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=.cache/locktools
[ -x "$tools/bin/uv" ] || { python3 -m venv "$tools" && "$tools/bin/python" -m pip install -q uv==0.13.9; }

lock() {  # OUT ARGS...
  local out=$1
  shift
  { echo "# Made by scripts/lock.sh from constraints.txt."
    "$tools/bin/uv" pip compile -q --no-annotate --no-header --generate-hashes --python-version 3.11 "$@"; } > "$out.partial"
  mv "$out.partial" "$out"
}

lock requirements/base.txt pyproject.toml -c constraints.txt
lock requirements/server.txt pyproject.toml --extra postgres --extra redis --extra tokens -c constraints.txt
lock requirements/tested.txt --no-deps constraints.txt
