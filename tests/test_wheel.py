"""The README's install commands in an empty environment, and the recipes, data and Slurm scripts that they install."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTALL = "\n".join(
    re.findall(r"^## Install\n(.*?)^## ", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
)
PIP, UV = (re.findall(rf"(?<![a-z] ){tool} install [^\s;]+", INSTALL) for tool in ("pip", "uv pip"))
_FOUND = """
from pathlib import Path
import parallel_rl
from parallel_rl.recipes import find_recipe, recipes
from parallel_rl.training.config.load import load_config
config = load_config(str(find_recipe("GRPO")))
assert Path(config.data.train).is_file(), config.data.train
print(len(recipes()), find_recipe("GRPO"), Path(parallel_rl.__file__).parent)
"""


def run(command: str, folder: Path, environment: Path) -> str:
    """What a command prints, in a folder and an activated environment."""
    path = f"{environment / 'bin'}:{os.environ['PATH']}"
    names = {"PATH": path, "VIRTUAL_ENV": str(environment), "HOME": os.environ.get("HOME", "/"), "UV_NATIVE_TLS": "1"}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_", "UV_", "SSL_")) or "proxy" in name.lower()
    }
    ran = subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**kept, **names}, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_the_readmes_install_commands(tmp_path: Path) -> None:
    """pip installs; uv resolves. What both would download beside this package is taken from the tests' own environment."""
    source, environment = tmp_path / "source", tmp_path / "environment"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("configs", "slurm", "parallel_rl"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=120)
    (environment / "bin" / "pip").write_text('#!/bin/sh\nexec python -m pip "$@"\n')
    (environment / "bin" / "pip").chmod(0o755)
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert len({*PIP}) == len({*UV}) == 1
    run(f"{PIP[0]} uv", source, environment)
    count, path, installed = run(f"python -c '{_FOUND}'", tmp_path, environment).split()
    assert int(count) == len(list((ROOT / "configs" / "recipes").glob("*.yaml")))
    assert Path(installed) == packages / "parallel_rl" and Path(path).is_relative_to(installed)
    for script in (ROOT / "slurm").glob("*.*"):
        assert Path(installed, "slurm", script.name).is_file()
    for name in ("html.j2", "css", "js"):
        assert Path(installed, "explain", f"page.{name}").is_file()
    run(f"{UV[0]} --dry-run", source, environment)


def test_torchs_bound_is_one_number() -> None:
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "pyproject.toml", "docs/megatron.md")]
    bounds = [re.findall(r"torch ?(?:≥|>=) ?(\d+\.\d+)", text) for text in texts]
    assert bounds == [["2.8"]] * 3, "write the bound of pyproject.toml in README.md and docs/megatron.md, once each"
