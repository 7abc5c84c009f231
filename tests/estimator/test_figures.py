"""Plots are well-formed SVG that shows what it was given."""

from xml.etree import ElementTree

from disco_hlo.estimator.evaluation import bars_and_curves, lines

SVG = "{http://www.w3.org/2000/svg}"


def test_curves_are_drawn_and_named() -> None:
    root = ElementTree.fromstring(lines({"main": [(1, 0.4), (2, 0.2)], "a<b": [(1, 0.3)]}, "epoch", "error"))
    assert len(root.findall(f"{SVG}polyline")) == 2
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert {"main", "a<b", "epoch", "error"} <= set(texts)


def test_bars_reach_as_high_as_their_share() -> None:
    root = ElementTree.fromstring(bars_and_curves([0.5, 1.0], [0.25, 0.5], {"CDF": [0.3, 1.0]}))
    heights = [float(bar.get("height")) for bar in root.findall(f"{SVG}rect") if bar.get("x")]
    assert heights[1] == 2 * heights[0]
