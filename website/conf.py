"""How the documentation site is built: `make site`, which is sphinx-build -W -c website docs build/site."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "src")]

import inventory  # noqa: E402
import words  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402

import gradmesh  # noqa: E402

project = "gradmesh"
author = "the authors of gradmesh"
version = release = gradmesh.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
]
# What is typed, without the prompt and what came of it.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Tutorials come with what they printed; tests/test_site_sources.py runs them.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

exclude_patterns = ["**/.ipynb_checkpoints"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_use_ivar = True
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
default_role = "named"
highlight_language = "none"  # of the pictures in docstrings; other blocks say theirs

# The addresses of what the docstrings name in other projects, so that no build needs the network.
intersphinx_mapping = inventory.mapping(Path(HERE.parent, "build", "inventories"))
intersphinx_timeout = 1

html_theme = "furo"
html_title = f"gradmesh {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_logo = html_favicon = "_static/logo.svg"
templates_path = ["_templates"]
html_additional_pages = {"404": "404.html"}
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
smartquotes = False  # much of the text is code
pygments_style = "friendly"
pygments_dark_style = "monokai"

# A server shows the page for wrong addresses under any path, so that its links are absolute: `base` in 404.html.
# If the project file has the site's address (Documentation), they start there, else at the server's root.
_urls = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"].get("urls", {})
html_baseurl = _urls.get("Documentation", "")
html_context = {"site_address": html_baseurl.rstrip("/") + "/"}

# Where the project has a public repository, each page links to its source and to an editor of it.
if "Repository" in _urls:
    html_theme_options = {
        "source_repository": _urls["Repository"],
        "source_branch": "main",
        "source_directory": "docs/",
        "top_of_page_buttons": ["view", "edit"],
    }
    if not re.match(r"https://(github|gitlab|bitbucket)\.(com|org)/", _urls["Repository"]):
        # Of other hosts the theme does not know the addresses, and warns: GitHub's form is the most common.
        _page = f"{_urls['Repository'].rstrip('/')}/%s/main/docs/{{filename}}"
        html_theme_options |= {"source_view_link": _page % "blob", "source_edit_link": _page % "edit"}


def setup(app: Sphinx) -> None:
    """Tell Sphinx what docstrings mean by names in backticks."""
    words.setup(app)
