"""Pictures of characters, and the one that `surestep bench` draws."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from surestep_cli.bench.load import LoadReport, Percentiles
from surestep_cli.bench.picture import in_characters, to_svg
from surestep_cli.terminal.pictures import bar, sparkline


def test_the_greatest_value_fills_a_block() -> None:
    assert sparkline([0, 1, 4, 8], ascii_only=False) == " ▁▄█"
    assert sparkline([0, 1, 4, 8], ascii_only=True) == " .=@"
    assert sparkline([1, 2], ascii_only=False, most=16) == "▁▁"  # little is not nothing
    assert sparkline([9], ascii_only=False, most=3) == "█"
    assert sparkline([0, 0], ascii_only=False) == "  "
    assert sparkline([], ascii_only=False) == ""


@pytest.mark.parametrize(
    ("share", "drawn"), [(0, "...."), (0.5, "##.."), (1, "####"), (7, "####"), (-1, "....")]
)
def test_bars_are_as_long_as_they_may_be(share: float, drawn: str) -> None:
    assert bar(share, 4, ascii_only=True) == drawn


def report(model: str = "m") -> LoadReport:
    some = Percentiles(1.0, 2.0)
    return LoadReport(
        model=model,
        concurrency=2,
        num_requests=3,
        prompt_tokens=4.0,
        wall_s=8.0,
        requests_s=0.25,
        prompt_tok_s=1.0,
        output_tokens=80,
        output_tok_s=10.0,
        ttft_ms=some,
        itl_ms=some,
        tpot_ms=some,
        e2e_ms=some,
        num_chunks=80,
        num_errors=1,
        errors={"timeout": 1},
        num_reconnects=0,
        error_sample="",
        output_sha256="",
        bucket_s=0.2,
        tok_s_over_time=[float(i % 20) for i in range(40)],
        ttft_quantiles_ms=[float(i) for i in range(21)],
        itl_quantiles_ms=[0.5] * 21,
    )


def test_the_drawing_is_one_of_svg() -> None:
    svg = to_svg(report('<script> & "x"'))
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label", "").startswith('<script> & "x": 2 of 3 requests')
    bars = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("class") == "bars"]
    assert len(bars) == 40
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 2


def test_a_terminal_without_utf8_gets_plain_characters() -> None:
    plain = "\n".join(in_characters(report(), ascii_only=True))
    assert plain.isascii()
    assert "tok/s over 8.0 s, up to 19:" in plain
    assert "  100      20.0 " + "#" * 40 in plain
    assert "  50      10.0 " + "#" * 20 + "." * 20 in plain
