"""Hook of the documentation: formulas become MathML when a page is built, without a script or a network."""

import re
from html import unescape

from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from mkdocs.exceptions import PluginError

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[([](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(html: str, page: object, **_: object) -> str:
    """Replace the formulas of a page, which the Markdown extension has put between brackets."""

    def rendered(match: re.Match[str]) -> str:
        kind, text = match.groups()
        try:
            return tex2mathml(unescape(text), as_block=kind == "div")
        except MathError as error:
            raise PluginError(f"{page}: the formula {text.strip()!r} cannot be shown: {error}") from None

    return FORMULA.sub(rendered, html)
