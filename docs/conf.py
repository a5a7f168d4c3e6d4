"""The configuration of the documentation site, which `make docs` builds."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent / "extensions")]

project = "Rankless"
author = "the Rankless developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "command_reference", "error_catalogue"]
exclude_patterns = ["build"]
html_theme = "furo"
html_title = "Rankless"
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 3
# Links to files of the repository, such as examples, are links to files: the tests check that each exists.
suppress_warnings = ["myst.xref_missing"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "code"
