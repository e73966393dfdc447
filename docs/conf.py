"""Sphinx settings of the site (`make docs-site`): every page of the checkout, offline, with local search."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from parallel_rl import __version__
from tools.reference.pages import BUILT, write

HERE = Path(__file__).parent
_mathjax = find_spec("sphinx-mathjax-offline")
assert _mathjax is not None and _mathjax.origin is not None, "install .ci/docs.txt: make docs-site does"

# tutorials call torchrun and parallel-rl
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
write(BUILT)  # before Sphinx looks for pages

project, release, author = "parallel_rl", __version__, "The parallel_rl developers"
copyright = author
extensions = ["myst_nb", "sphinx.ext.mathjax", "sphinx_copybutton"]

# The checkout is the source, so that links between docs/, README.md and benchmarks/ work here and on a code host.
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "benchmarks/*.md",
    "slurm/*.md",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
]
exclude_patterns = ["docs/_static/**", "docs/_root/**"]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
myst_fence_as_directive = ["math"]
nb_execution_mode = "force"
nb_execution_timeout = 240  # a cell takes seconds; a busy machine takes many times as long
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_merge_streams = True

html_theme = "pydata_sphinx_theme"
html_title = "parallel_rl"
html_static_path = [str(HERE / "_static"), str(Path(_mathjax.origin).parent / "static")]
html_extra_path = [str(HERE / "_root")]
html_css_files = ["site.css"]
html_context = {"default_mode": "auto"}
html_copy_source = False
html_sidebars = {"docs/index": [], "README": [], "CONTRIBUTING": [], "CHANGELOG": [], "SECURITY": []}
html_theme_options = {
    "navigation_with_keys": False,
    "show_nav_level": 1,
    "header_links_before_dropdown": 6,
    "footer_start": ["copyright"],
    "footer_end": [],
}
mathjax_path = "mathjax/tex-chtml.js"
copybutton_exclude = ".linenos, .gp, .go"
