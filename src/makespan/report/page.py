"""The page itself: contents and template in, one HTML file out."""

import base64
import gzip
import io
import json
import logging
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape
from PIL import Image

from makespan.files import write_text
from makespan.report.contents import VERDICTS, Report, View, collect
from makespan.units import MINUTE, format_bytes, format_seconds

_log = logging.getLogger(__name__)
MAX_PAGE_BYTES = 15_000_000
"""Size that the page keeps below."""
_MAX_SVG_BYTES = 120_000  # larger ones have so many points that their PNG is smaller, and as sharp on screens
_LARGE_PNG_BYTES = 60_000
_N_COLOURS = 192


def write_report(
    settings: Any,
    path: str | Path,
    results: str | Path = "results",
    benchmarks: str | Path = "benchmarks/results",
    published: str | Path = "config/published",
) -> None:
    """Write the report of whatever is under ``results``; equal inputs give equal bytes.

    Parameters and errors are those of `makespan.report.collect`. A page of 15 MB or more logs a warning.
    """
    text = render(collect(settings, results, benchmarks, published))
    size = len(text.encode())
    if size >= MAX_PAGE_BYTES:
        _log.warning("%s has %s, more than %s", path, format_bytes(size), format_bytes(MAX_PAGE_BYTES))
    write_text(text, path)


def render(report: Report) -> str:
    """Return the page as HTML; every text in it is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("makespan.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "seconds": format_seconds,
        "bytes": format_bytes,
        "picture": _picture,
        "packed": _packed,
        "json": json.dumps,
        "pretty": partial(json.dumps, indent=1),
        "clock": _clock,
        "code": _code,
    }
    has_charts = any(view.charts for one in report.sections for shown in one.figures for view in shown.views)
    return environment.get_template("report.html").render(
        report=report,
        verdicts=VERDICTS,
        style=Markup(_data("report.css")),
        script=Markup(_data("report.js")),
        plotly=_plotly() if has_charts else "",
    )


def _code(text: str) -> Markup:
    """Return text in which names between backticks are marked as code."""
    plain, *rest = text.split("`")
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return escape(plain) + Markup("").join(Markup("<code>{}</code>{}").format(*pair) for pair in pairs)


def _data(name: str) -> str:
    return resources.files("makespan.report").joinpath("templates", name).read_text("utf-8")


@cache
def _plotly() -> str:
    """Return the code of plotly.js, which the package plotly ships, compressed."""
    return _packed(resources.files("plotly").joinpath("package_data", "plotly.min.js").read_text("utf-8"))


def _packed(text: str) -> str:
    """Return a text compressed by gzip in base 64, which browsers unpack when it is asked for."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _picture(view: View) -> str:
    """Return the picture of a figure as a data URI."""
    path = view.picture
    if path.suffix == ".svg":
        svg, png = path.read_bytes(), path.with_suffix(".png")
        if len(svg) <= _MAX_SVG_BYTES or not png.is_file():
            return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
        path = png
    content = path.read_bytes()
    if len(content) > _LARGE_PNG_BYTES:
        # A chart has few colours: a palette makes it a third as large.
        with Image.open(io.BytesIO(content)) as image, io.BytesIO() as stream:
            few = image.convert("RGB").quantize(
                _N_COLOURS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
            )
            few.save(stream, "PNG")
            content = min(content, stream.getvalue(), key=len)
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _clock(value_s: float) -> str:
    """Format a duration as minutes and seconds, or hours and minutes."""
    whole = round(value_s)
    if whole < MINUTE:
        return f"{value_s:.1f} s"
    minutes, seconds = divmod(whole, 60)
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest:02d} min" if hours else f"{minutes} min {seconds:02d} s"
