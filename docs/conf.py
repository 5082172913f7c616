"""Settings of Sphinx for the site: ``make docs``."""

from typing import Any

from sphinx.application import Sphinx

import sparton
import sparton.ops

project = "sparton"
author = copyright = "The sparton authors"
release = version = sparton.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

html_theme = "furo"
html_title = f"sparton {release}"
html_copy_source = False
html_show_sphinx = False
html_css_files = ["wide.css"]
html_static_path = ["static"]
highlight_language = "sh"  # of blocks that name none: commands, most of them

myst_heading_anchors = 4

# A reference that leads nowhere is a fault of the page. What other libraries document has no target
# here, as no build downloads their inventories; neither have type variables.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:(class|obj|data|exc|meth)", r"(?!sparton).*"),
    (r"py:class", r"sparton\.[\w.]+\.(Batch|Config|Item|Model|OwnStep|Scored|SplitDecoder|T)"),
]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_use_rtype = False


def leave_out(
    app: Sphinx, what: str, name: str, member: object, skip: bool, options: object
) -> bool:
    """Skip fields of named tuples, which the docstring of the class describes."""
    return skip or (getattr(member, "__doc__", None) or "").startswith("Alias for field number")


def find_public(app: Sphinx, env: Any, node: Any, content: Any) -> Any:
    """Lead references to functions of the kernels to :mod:`sparton.ops`, where they are shown."""
    module, _, name = node.get("reftarget", "").rpartition(".")
    if not module.startswith("sparton.kernels") or name not in sparton.ops.__all__:
        return None
    domain = env.domains["py"]
    document, target = node["refdoc"], f"sparton.ops.{name}"
    return domain.resolve_xref(env, document, app.builder, "func", target, node, content)


def setup(app: Sphinx) -> None:
    app.connect("autodoc-skip-member", leave_out)
    app.connect("missing-reference", find_public)
