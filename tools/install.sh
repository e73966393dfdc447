#!/usr/bin/env bash
# Makes or updates .venv (called by `make install`, from the repository's root).
#   PYTHON       the interpreter to use; otherwise the first of python3, python3.13 .. python3.10 that is 3.10-3.13
#   TORCH_INDEX  an extra package index that has CPU builds of torch, where the default one has CUDA builds only
#   EXTRAS       extras of pyproject.toml; otherwise all that the tests and tools need
#   LOCKED       1: nothing but the files whose hashes .ci/requirements.txt has (as the continuous integration does)
set -euo pipefail

say() { printf 'install: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }
# shellcheck source=tools/apt.sh
source tools/apt.sh

# A version manager's shim may stand on PATH and refuse to run: only a run tells.
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
supported() { case "$(version_of "$1")" in 3.10 | 3.11 | 3.12 | 3.13) true ;; *) false ;; esac; }

find_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11 python3.10; do
    if supported "$name"; then
      command -v "$name"
      return
    fi
  done
  return 1
}

venv=.venv
if ! supported "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  if [ -n "${PYTHON:-}" ]; then
    supported "$PYTHON" || fail "PYTHON=$PYTHON is $(version_of "$PYTHON" || echo "no Python"); 3.10 to 3.13 is needed"
    python=$PYTHON
  else
    python=$(find_python) || { command -v python3 >/dev/null || apt_install python3 python3-venv; python=$(find_python); } ||
      fail "python3 is $(version_of python3 || echo missing); Python 3.10 to 3.13 is needed (set PYTHON=/path/to/one)"
  fi
  version=$(version_of "$python")
  "$python" -c 'import ensurepip, venv' 2>/dev/null || apt_install "python$version-venv"
  say "Python $version ($python) -> $venv"
  "$python" -m venv --clear "$venv"
fi

# torch.compile builds C++ on the CPU: it wants a compiler and Python.h
version=$(version_of "$venv/bin/python")
missing=()
command -v g++ >/dev/null || missing+=(g++)
header=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")')
[ -e "$header" ] || missing+=("python$version-dev")
[ ${#missing[@]} -eq 0 ] || apt_install "${missing[@]}"

index=()
[ -z "${TORCH_INDEX:-}" ] || index=(--extra-index-url "$TORCH_INDEX")
pip=("$venv/bin/python" -m pip install --quiet "${index[@]}")

# torch first and as an exact version: with a range, pip prefers the newest release, whose default build brings CUDA
say "torch and the rest; the first time takes minutes"
torch=$(grep '^torch==' constraints.txt)
if [ "${LOCKED:-}" = 1 ]; then
  # torch alone has no hash there: its CPU builds are other files on each index. What they need is in the list
  "${pip[@]}" --require-hashes --no-deps -r .ci/requirements.txt
  "${pip[@]}" "$torch"
  "${pip[@]}" --no-deps --no-build-isolation -e .
else
  "${pip[@]}" "$torch"
  # a CUDA build of torch needs the very triton that it brings
  brings='from importlib.metadata import requires; print(*[name for name in requires("torch") if name.startswith("triton")])'
  constraints=$(mktemp)
  trap 'rm -f "$constraints"' EXIT
  if [ -n "$("$venv/bin/python" -c "$brings")" ]; then
    grep -v '^triton==' constraints.txt >"$constraints"
  else
    cat constraints.txt >"$constraints"
  fi
  "${pip[@]}" -c "$constraints" -e ".[${EXTRAS:-megatron,triton,data,datasets,hf,math,report,dev}]"
fi
say "ready: $("$venv/bin/python" -c 'import torch; print("torch", torch.__version__)')"
