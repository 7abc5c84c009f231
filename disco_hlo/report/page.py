"""The report as one HTML file that needs nothing else: data, style, script and charting library inside.

Names in the data come from strangers' modules. They travel as JSON in which no ``<`` is left, and the
script puts them into the page as text. The page's own policy forbids every script but these two, and
the network.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from typing import Any

_SCRIPTS = ("base.js", "timeline.js", "charts.js", "tables.js", "main.js")


def render(data: dict[str, Any]) -> bytes:
    """The page for what :func:`~disco_hlo.report.data.page_data` returned."""
    library = _asset("uPlot.iife.min.js")
    licence = _asset("uPlot.LICENSE").replace("*/", "")
    script = '"use strict";\n(() => {\n' + "\n".join(map(_asset, _SCRIPTS)) + "\n})();\n"
    style = _asset("uPlot.min.css") + "\n" + _asset("report.css")
    parts = {
        "TITLE": html.escape(f"{data['head']['module']}: plan"),
        "POLICY": _policy(library, script),
        "STYLE": style,
        "LICENCE": licence.replace("--", "- -"),
        "DATA": _embedded(data),
        "LIBRARY": library,
        "SCRIPT": script,
    }
    pieces = _asset("report.html").split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces)).encode()


def _embedded(data: dict[str, Any]) -> str:
    """JSON that can stand in an HTML script element: ASCII, and without what could end or open a tag."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _policy(*scripts: str) -> str:
    hashes = (hashlib.sha256(script.encode()).digest() for script in scripts)
    digests = " ".join(f"'sha256-{base64.b64encode(one).decode()}'" for one in hashes)
    return (
        f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return (files("disco_hlo.report") / "assets" / name).read_text(encoding="utf-8")
