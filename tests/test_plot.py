"""What the roofline diagram contains, read back from the figure: roofs, markers, arrows, and labels that can be read."""

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations, pairwise, product
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.markers import MarkerStyle
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox
from picture_checks import markers, points
from PIL import Image

from minillm.errors import MinillmError
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.counting import Cost, Operator
from minillm.roofline.plot import MARKERS, save_roofline, si
from minillm.roofline.position import Position

MEASURED = Ceilings("a small CPU, 2 threads", "fp32", bandwidth=2e10, peak=1.2e11, overhead=8e-6)
DATASHEET = Ceilings("Datasheet CPU", "fp32", bandwidth=6e10, peak=5e11, overhead=0.0, source="datasheet")
STAGES = ["naive", "kv_cache", "gqa", "batching", "quantization", "speculative", "paged", "kernels", "serving"]


def position(phase: str, intensity: float, achieved: float) -> Position:
    flops = 10**12
    cost = Cost(Counter({Operator("work", "", flops, round(flops / intensity), 0, 0): 1}))
    return Position(phase, cost, MEASURED, measured_s=flops / achieved)


TWO = {
    "naive": [position("prefill", 18, 6e10), position("decode", 19, 5e10)],
    "kv_cache": [position("prefill", 16, 6.1e10), position("decode", 0.48, 8e9)],
}
NINE = {  # crowded: each stage but a little beside the one before
    stage: [
        position("prefill", 16 + i, 6e10 * (1 + i / 20)),
        position("decode", 0.48 * (1 + i / 3), 8e9 * (1 + i / 4)),
    ]
    for i, stage in enumerate(STAGES)
}
OVERHEAD_BOUND = {  # far below the roof, as a small model on a big GPU
    "naive": [position("prefill", 300, 1e8), position("decode", 280, 9e7)],
    "kv_cache": [position("prefill", 250, 9.5e7), position("decode", 0.9, 1e7)],
}
ALIKE = {stage: [position("prefill", 5, 5e10), position("decode", 5, 5e10)] for stage in STAGES[:3]}
PREFILL_ONLY = {"naive": [position("prefill", 18, 6e10)]}
PICTURES = {"two": TWO, "nine": NINE, "overhead": OVERHEAD_BOUND, "alike": ALIKE, "prefill only": PREFILL_ONLY}


def draw(stages: Mapping[str, Sequence[Position]], measured: Ceilings, datasheet: Ceilings | None) -> Axes:
    with tempfile.TemporaryDirectory() as folder:
        figure = save_roofline(Path(folder) / "roofline.png", stages, measured, datasheet, "a title")
    figure.draw_without_rendering()
    [axes] = figure.axes
    return axes


@cache
def drawn(name: str, with_datasheet: bool = True) -> Axes:
    """One of the pictures; read it only."""
    return draw(PICTURES[name], MEASURED, DATASHEET if with_datasheet else None)


def lines_labelled(axes: Axes, start: str) -> list[Line2D]:
    return [line for line in axes.lines if str(line.get_label()).startswith(start)]


def point_labels(axes: Axes, stages: Mapping[str, Sequence[Position]]) -> dict[tuple[str, str], Annotation]:
    found = {}
    for stage, positions in stages.items():
        for p in positions:
            [label] = [text for text in axes.texts if text.get_text().startswith(f"{stage} {p.phase}")]
            found[stage, p.phase] = label
    return found


def words(axes: Axes) -> list[Text]:
    """Every piece of text inside the axes."""
    legend = axes.get_legend()
    return [text for text in [*axes.texts, *(legend.get_texts() if legend else [])] if text.get_text()]


def box(text: Text) -> Bbox:
    return Text.get_window_extent(text)  # of the words, without an annotation's arrow


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_both_axes_are_logarithmic_and_named() -> None:
    axes = drawn("two")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert "FLOP per byte" in axes.get_xlabel()
    assert "FLOP/s" in axes.get_ylabel()
    assert axes.get_title() == "a title"


def test_the_measured_roof_rises_with_the_bandwidth_to_the_ridge_and_is_flat_then() -> None:
    axes = drawn("two")
    [roof] = lines_labelled(axes, "measured")
    (x0, x1, x2), (y0, y1, y2) = roof.get_data()
    assert (x0, x2) == axes.get_xlim()
    assert (x1, y1) == pytest.approx((6.0, 1.2e11))
    assert y0 == pytest.approx(2e10 * x0)
    assert y2 == 1.2e11
    assert (to_rgb(roof.get_color()), roof.get_linestyle()) == ((0, 0, 0), "-")
    assert MEASURED.device in roof.get_label()


def test_the_datasheet_is_grey_and_dashed_beside_it() -> None:
    axes = drawn("two")
    [roof] = lines_labelled(axes, "datasheet")
    red, green, blue = to_rgb(roof.get_color())
    assert 0.3 < red == green == blue < 0.8
    assert roof.get_linestyle() == "--"
    assert np.array(roof.get_data())[:, 1] == pytest.approx((DATASHEET.ridge, DATASHEET.peak))
    assert DATASHEET.device in roof.get_label()
    assert lines_labelled(drawn("two", False), "datasheet") == []


def test_ridge_peak_and_bandwidth_are_labelled() -> None:
    axes = drawn("two")
    by_text = {text.get_text(): text for text in axes.texts}
    ridge = by_text["ridge 6 FLOP/byte"]
    assert ridge.xy == pytest.approx((6.0, 1.2e11))
    assert {"120 GFLOP/s (fp32)", "20 GB/s"} <= by_text.keys()
    assert 10 < by_text["20 GB/s"].get_rotation() < 80  # along the slope


@pytest.mark.parametrize("name", PICTURES)
def test_each_stage_and_phase_has_one_marker_at_its_intensity_and_rate(name: str) -> None:
    stages = PICTURES[name]
    expected = [(p.cost.intensity, p.cost.flops / p.measured_s) for phases in stages.values() for p in phases]
    np.testing.assert_allclose(sorted(points(drawn(name))), sorted(expected))


def test_without_colour_shape_tells_the_stage_and_filling_the_phase() -> None:
    axes = drawn("nine")
    found = dict(zip(points(axes), markers(axes), strict=True))
    shapes = set()
    for phases in NINE.values():
        prefill, decode = (found[p.cost.intensity, p.achieved] for p in phases)
        assert prefill.get_marker() == decode.get_marker()
        shapes.add(prefill.get_marker())
        assert to_rgb(decode.get_markerfacecolor()) == (1, 1, 1)
        assert max(to_rgb(prefill.get_markerfacecolor())) < 0.8  # dark beside white, also in grey
        assert max(to_rgb(decode.get_markeredgecolor())) < 0.8
    assert len(shapes) == len(NINE)
    assert all(MarkerStyle(shape).is_filled() for shape in MARKERS)  # a shape of lines alone could not be hollow


def test_an_arrow_leads_from_each_stage_to_the_next_phase_by_phase() -> None:
    axes = drawn("nine")
    arrows = [text for text in axes.texts if isinstance(text, Annotation) and not text.get_text()]
    at = {(stage, p.phase): (p.cost.intensity, p.achieved) for stage, phases in NINE.items() for p in phases}
    expected = {
        (at[before, phase], at[after, phase]) for before, after in pairwise(STAGES) for phase in ("prefill", "decode")
    }
    assert {(tuple(text.xyann), tuple(text.xy)) for text in arrows} == expected
    heads = [text.arrow_patch.get_arrowstyle() for text in arrows]
    assert all(type(head).__name__ == "CurveB" for head in heads)  # "->": the head is at the later stage


def test_a_stage_without_decode_gets_no_arrow_for_it() -> None:
    stages = {"naive": TWO["naive"][:1], "kv_cache": TWO["kv_cache"]}
    axes = draw(stages, MEASURED, None)
    assert len([text for text in axes.texts if not text.get_text()]) == 1


@pytest.mark.parametrize("name", PICTURES)
def test_each_marker_is_labelled_with_stage_phase_and_share_of_the_roof(name: str) -> None:
    stages = PICTURES[name]
    labels = point_labels(drawn(name), stages)
    for stage, phases in stages.items():
        for p in phases:
            label = labels[stage, p.phase]
            assert label.xy == (p.cost.intensity, p.achieved)
            assert f"{p.fraction_of_roofline:.0%}" in label.get_text()


# --- whether it can be read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("datasheet", [True, False], ids=["with datasheet", "without"])
@pytest.mark.parametrize("name", PICTURES)
def test_no_words_overlap_at_800_pixels(name: str, datasheet: bool) -> None:
    axes = drawn(name, datasheet)
    assert axes.figure.bbox.width == 800
    overlapping = [
        (one.get_text(), other.get_text())
        for one, other in combinations(words(axes), 2)
        if box(one).overlaps(box(other))
    ]
    assert overlapping == []


@pytest.mark.parametrize("name", PICTURES)
def test_words_stay_inside_the_axes_and_off_the_markers(name: str) -> None:
    axes = drawn(name)
    frame = axes.get_window_extent()
    centers = axes.transData.transform(points(axes))
    for text in words(axes):
        inner = box(text)
        assert frame.x0 <= inner.x0 <= inner.x1 <= frame.x1, text.get_text()
        assert frame.y0 <= inner.y0 <= inner.y1 <= frame.y1, text.get_text()
    for text, (x, y) in product(axes.texts, centers):
        assert not (text.get_text() and box(text).contains(x, y)), text.get_text()
    assert all(frame.contains(x, y) for x, y in centers)


def test_words_are_large_enough_at_800_pixels() -> None:
    axes = drawn("nine")
    assert min(text.get_fontsize() for text in words(axes)) >= 8
    assert min(line.get_markersize() for line in markers(axes)) >= 8


def test_a_ridge_near_the_edge_leaves_its_label_apart_from_the_peaks() -> None:
    """A GPU's ridge lies far right of a decode position: the flat roof gets little room."""
    gpu = Ceilings("NVIDIA H100 80GB HBM3", "bf16", 2.9e12, 7.5e14, 5e-6)
    stages = {"kv_cache": [Position("decode", position("decode", 0.05, 1e8).cost, gpu, 1e4)]}
    axes = draw(stages, gpu, None)
    assert not any(box(one).overlaps(box(other)) for one, other in combinations(words(axes), 2))


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_picture_is_1600_pixels_wide(tmp_path: Path) -> None:
    save_roofline(tmp_path / "roofline.PNG", TWO, MEASURED)
    with Image.open(tmp_path / "roofline.PNG") as image:
        assert image.size == (1600, 1100)
        colours = image.convert("L").histogram()
    assert 0.005 < sum(colours[:128]) / (1600 * 1100) < 0.2  # ink on paper
    assert 20_000 < (tmp_path / "roofline.PNG").stat().st_size < 400_000


@pytest.mark.parametrize(("suffix", "magic"), [(".svg", b"<?xml"), (".pdf", b"%PDF"), (".png", b"\x89PNG")])
def test_the_name_chooses_the_format(tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"roofline{suffix}"
    save_roofline(path, TWO, MEASURED)
    assert path.read_bytes().startswith(magic)


def test_a_full_disk_leaves_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(MinillmError, match="No space left on device"):
        save_roofline(tmp_path / "roofline.png", TWO, MEASURED)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.35e12, "3.35 T"),
        (1.2e11, "120 G"),
        (999, "999 "),
        (1e3, "1 k"),
        (0, "0 "),
        (0.0051, "5.1 m"),
        (2.5e-6, "2.5 u"),
        (8e-8, "80 n"),
        (-4e6, "-4 M"),
        (999.4, "999 "),
        (999.7, "1 k"),
        (999.9e9, "1 T"),
        (3e15, "3e+03 T"),
    ],
)
def test_figures_have_three_digits_and_an_si_prefix(value: float, text: str) -> None:
    assert si(value) == text
