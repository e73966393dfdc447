#!/usr/bin/env bash
# Makes .ci/requirements.txt and .ci/docs.txt anew (`make lock`): what the continuous integration installs, with the hashes of its files, for every
# Python that is supported. It is for Linux with the versions of constraints.txt, and needs uv on PATH.
set -euo pipefail

out=.ci/requirements.txt
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# torch is left out: its CPU builds are other files on each index, and its CUDA build brings packages that no CPU needs. What it
# needs of others stands here instead, and what builds this package.
printf 'torch; python_version < "3"\ntriton>=3.4; sys_platform == "linux"\n' >"$work/overrides"
printf '%s\n' filelock fsspec jinja2 networkx sympy typing-extensions 'setuptools>=77' >"$work/more.in"

{
  echo "# Made by tools/lock.sh: what the continuous integration installs but for torch, whose CPU builds have other hashes on each index."
  uv pip compile pyproject.toml "$work/more.in" --universal --python-version 3.10 -c constraints.txt \
    --extra megatron --extra triton --extra data --extra datasets --extra hf --extra math --extra report --extra dev --override "$work/overrides" --generate-hashes --no-emit-index-url --no-annotate --no-header --quiet
} >"$work/out"
mv "$work/out" "$out"

# the site's packages alone: they go into a folder of their own, next to .venv's
sed -n 's/^docs = \[\(.*\)\].*/\1/p' pyproject.toml | tr -d ' "' | sed 's/,\([a-z]\)/\n\1/g' >"$work/docs.in"
{
  echo "# Made by tools/lock.sh: what builds the site (make docs-site), for Python 3.11 and newer."
  uv pip compile "$work/docs.in" --universal --python-version 3.11 -c constraints.txt --generate-hashes --no-emit-index-url \
    --no-annotate --no-header --quiet
} >"$work/out"
mv "$work/out" .ci/docs.txt
