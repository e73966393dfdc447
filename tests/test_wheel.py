"""What is installed has the recipes, their data and the Slurm scripts."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_wheel_brings_the_recipes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("configs", "slurm", "parallel_rl"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    [wheel] = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    for path in (ROOT / "slurm").glob("*.*"):
        assert (tmp_path / "installed" / "parallel_rl" / "slurm" / path.name).is_file()
    for name in ("html.j2", "css", "js"):
        assert (tmp_path / "installed" / "parallel_rl" / "explain" / f"page.{name}").is_file()
    code = (
        "from pathlib import Path\n"
        "from parallel_rl.recipes import find_recipe, recipes\n"
        "from parallel_rl.training.config.load import load_config\n"
        "config = load_config(str(find_recipe('GRPO')))\n"
        "assert Path(config.data.train).is_file(), config.data.train\n"
        "print(len(recipes()), find_recipe('GRPO'))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "installed",
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    count, path = found.stdout.split()
    assert int(count) == len(list((ROOT / "configs" / "recipes").glob("*.yaml")))
    assert Path(path).is_relative_to(tmp_path / "installed")
