"""Settings of Sphinx for the site: ``make docs``."""

import re

import sparton

project = "sparton"
author = copyright = "The sparton authors"
release = version = sparton.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

html_theme = "furo"
html_title = f"sparton {release}"
html_copy_source = False
html_show_sphinx = False

myst_heading_anchors = 4

# A reference that leads nowhere is a fault of the page. No build downloads what other libraries
# document, so types of theirs in signatures have no target.
nitpicky = True
nitpick_ignore_regex = [(r"py:(class|obj|data|exc|meth)", r"(?!sparton).*")]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_use_rtype = False


def leave_out(app, what, name, member, skip, options):
    """Fields of named tuples are told in the docstring of the class, where it says anything."""
    return skip or bool(re.match("Alias for field number", getattr(member, "__doc__", None) or ""))


def setup(app):
    app.connect("autodoc-skip-member", leave_out)
