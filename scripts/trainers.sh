#!/usr/bin/env bash
# trainers.sh VENV: makes the virtual environment of a trainer (once). VENV's last part names what is in it.
# It sees our packages through a .pth file, so torch is not installed again; only what is missing, and what the trainer
# wants in another version, comes (up to 150 MB, a minute). `python-3.12` and `harbor-0.25.0` see nothing of ours: what is
# in them refuses Python 3.11 (5 GB with torch, some minutes; 400 MB).
set -euo pipefail
venv=${1:?usage: trainers.sh VENV}
cd "$(dirname "$0")/.."
die() { echo "trainers: $*" >&2; exit 1; }

name=$(basename "$venv")
python=$PWD/.venv/bin/python
case "$name" in
  tinker-cookbook-0.5.8)
    packages=(tinker-cookbook==0.5.8 chz==0.4.0 blobfile==3.3.0 lxml==6.1.3 termcolor==3.3.0 pylatexenc==2.11
      math-verify==0.9.0 latex2sympy2_extended==1.11.0 antlr4-python3-runtime==4.13.2) ;;
  verl-0.9.1)
    packages=(verl==0.9.1 transformers==5.10.2 tokenizers==0.22.2 tensordict==0.10.0 pyvers==0.1.0 cloudpickle==3.1.2
      omegaconf==2.3.0 antlr4-python3-runtime==4.9.3 hydra-core==1.3.2 codetiming==1.4.0 torchdata==0.11.0
      TransferQueue==0.1.11 pyzmq==27.3.0) ;;
  llamafactory-0.9.5)
    packages=(llamafactory==0.9.5 transformers==5.6.0 tokenizers==0.22.2 datasets==4.0.0 trl==0.24.0 peft==0.18.1
      accelerate==1.11.0 omegaconf==2.3.0 antlr4-python3-runtime==4.9.3) ;;
  verifiers-0.4.0)
    packages=(verifiers==0.4.0 prime-runs==0.1.4 prime-sandboxes==0.5.1 prime-traces==0.0.10 prime-tunnel==0.1.15
      connectrpc==0.11.1 protobuf-py==0.1.1 aiofiles==25.1.0 tomli_w==1.2.0 math-verify==0.9.0
      latex2sympy2_extended==1.11.0 antlr4-python3-runtime==4.13.2) ;;
  axolotl-0.19.0)
    packages=(axolotl==0.19.0 datasets==4.8.4 colorama==0.4.6 addict==2.4.0) ;;
  ms-swift-4.6.0)
    packages=(ms-swift==4.6.0 datasets==4.8.4 modelscope==1.40.2 modelscope-hub==0.5.1 json-repair==0.64.6) ;;
  unsloth-2026.10.9)
    packages=(unsloth==2026.10.9 unsloth_zoo==2026.10.9 trl==1.15.0 transformers==5.10.2 tokenizers==0.22.2 datasets==4.3.0
      dill==0.4.0 multiprocess==0.70.16 fsspec==2025.9.0) ;;
  datasets-4.0.0) packages=(datasets==4.0.0 dill==0.3.8 multiprocess==0.70.16 fsspec==2025.3.0) ;;
  datasets-4.3.0) packages=(datasets==4.3.0 dill==0.4.0 multiprocess==0.70.16 fsspec==2025.9.0) ;;
  datasets-4.7.0) packages=(datasets==4.7.0) ;;
  datasets-4.8.4) packages=(datasets==4.8.4) ;;
  sources-1)
    packages=(megatron-core==0.16.1 beartype==0.23.1 jaxtyping==0.3.11 wadler-lindig==0.1.8 pyzmq==27.3.0
      loguru==0.7.3 tomli_w==1.2.0 transformers==5.10.2 tokenizers==0.22.2) ;;
  openenv-0.10.0 | environments-1) mapfile -t packages < "scripts/trainers/$name.txt" ;;
  python-3.12 | harbor-0.25.0)
    mapfile -t packages < "scripts/trainers/$name.txt"
    ours=no
    python=$(command -v "${PYTHON312:-}" || ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python 2>/dev/null | tail -1 ||
      command -v python3.12) || true
    [ -n "$python" ] || die "ART, SkyRL, NeMo Gym and Harbor need Python 3.12, and none was found: name one, PYTHON312=/path/to/python3.12" ;;
  *) die "no packages are known for $name" ;;
esac

[ "$(cat "$venv/.ready" 2>/dev/null)" = "${packages[*]}" ] && exit 0
echo "trainers: installing $name into $venv (once)"
rm -rf "$venv" && "$python" -m venv "$venv" || die "can't make a virtual environment; is python3-venv installed?"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
[ -n "${ours:-}" ] || .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/ours.pth"
"$venv/bin/python" -m pip install -q --no-deps "${packages[@]}" \
  2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2) ||
  die "can't install ${packages[0]}; is a package index reachable?"
rm -rf "$site/tests" "$site/scripts"  # verl's own, which would stand before ours
echo "${packages[*]}" > "$venv/.ready"
