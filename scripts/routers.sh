#!/usr/bin/env bash
# routers.sh VENV: makes a virtual environment with the routers of vLLM and SGLang (once; 200 MB).
set -euo pipefail
venv=${1:?usage: routers.sh VENV}
wheels=(vllm-router==0.1.17 sglang-router==0.3.2)
cd "$(dirname "$0")/.."

[ -f "$venv/.ready" ] && exit 0
die() { echo "routers: $*" >&2; exit 1; }

echo "routers: installing ${wheels[*]} into $venv (once)"
rm -rf "$venv" && python3 -m venv "$venv" || die "can't make a virtual environment; is python3-venv installed?"
"$venv/bin/python" -m pip install -q "${wheels[@]}" 2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2) \
  || die "can't install ${wheels[*]}; is a package index reachable?"
touch "$venv/.ready"
