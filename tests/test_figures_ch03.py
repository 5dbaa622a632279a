"""The pictures of chapter 3: each shows the numbers that it is given, read back from what was drawn."""

import numpy as np
import pytest
import torch
from picture_checks import (
    boxes,
    lines,
    markers,
    points,
    test_picture_is_a_page_wide_and_the_same_each_time,  # noqa: F401 (a test, of each of ALL)
    test_text_is_large_enough_and_inside_the_picture,  # noqa: F401 (the same)
    words,
)

from minillm.figures import ch03
from minillm.figures.ch03 import Model
from minillm.figures.picture import BLUE, DARK
from minillm.latent_config import KNOWN_LATENT_SHAPES
from minillm.roofline.counting import count
from minillm.stages import mla

LITE = KNOWN_LATENT_SHAPES["deepseek-v2-lite"]
MODELS = [
    Model("gemma", "MQA", 18_432, 73_728, beyond_window=3_072),
    Model("smollm2", "GQA", 23_040, 69_120),
    Model("mistral", "GQA", 131_072, 524_288, beyond_window=0),
    Model("deepseek", "MLA", 31_104, 276_480),
    Model("llama-2", "MHA", 524_288, 524_288),
]
TIMES = {"kv_cache": [0.06, 0.2], "gqa": [0.06, 0.1]}, {"kv_cache": [0.05, 0.19], "gqa": [0.05, 0.09]}

ALL = {
    "head_maps": lambda: ch03.head_maps(9, (9, 3, 1)),
    "rows_of_one_matrix": lambda: ch03.rows_of_one_matrix(),
    "intensity": lambda: ch03.intensity(4096, {"MHA": 1, "GQA": 4}, 295, "H100", ("a latent, 242", 241.8)),
    "bytes_per_token": lambda: ch03.bytes_per_token(MODELS),
    "step_over_context": lambda: ch03.step_over_context([256, 4096], {"fp32": TIMES, "bf16": TIMES}),
    "latents": lambda: ch03.latents(LITE),
    "latent_flops": lambda: ch03.latent_flops(LITE, 8192),
}


@pytest.mark.parametrize(("n_heads", "n_kv"), [(9, 9), (9, 3), (9, 1), (8, 2)])
def test_head_map_leads_each_query_head_to_its_kv_head(n_heads, n_kv):
    (axes, _) = ch03.head_maps(n_heads, (n_kv, n_kv)).axes
    kv = {round(box.get_x() + 0.4, 3): i for i, box in enumerate(boxes(axes, BLUE))}
    assert len(kv) == n_kv
    read = [kv[round(float(line.get_xdata()[1]), 3)] for line in axes.get_lines()]
    assert read == [h // (n_heads // n_kv) for h in range(n_heads)]
    assert axes.get_title() == {n_heads: "MHA", 1: "MQA"}.get(n_kv, "GQA")


def test_rows_of_one_matrix_have_the_keys_once():
    copies, rows = ch03.rows_of_one_matrix(group=3, keys=7).axes
    assert len(boxes(copies, BLUE)) == 3 * len(boxes(rows, BLUE)) == 3 * 3 * 7
    assert len(boxes(copies, DARK)) == len(boxes(rows, DARK)) == 3 * 3


def test_intensity_begins_at_the_group_size_and_tends_to_what_prefill_has():
    (axes,) = ch03.intensity(4096, {"MHA": 1, "GQA": 4}, 295, "H100", ("a latent", 241.8)).axes
    curves = lines(axes)
    for name, g in (("MHA, G = 1", 1), ("GQA, G = 4", 4)):
        (first, start), (last, end) = curves[name][0], curves[name][-1]
        assert (first, last) == pytest.approx((1, 4096))
        assert start == pytest.approx(g, rel=2e-3)
        assert end == pytest.approx(g * 4096 / (1 + g))  # g S T / (S + g T) at T = S
    assert points(axes)[-1] == (1.0, 241.8)


def test_bytes_per_token_has_a_filled_and_a_hollow_marker_for_each_model():
    (axes,) = ch03.bytes_per_token(MODELS).axes
    for y, model in enumerate(MODELS):
        drawn = [line for line in markers(axes) if list(line.get_ydata()) == [y]]
        at = {line.get_markerfacecolor() == "white": line.get_xdata()[0] for line in drawn}
        assert at == {False: model.stored, True: model.expanded}
        assert {line.get_marker() for line in drawn} == {ch03.KINDS[model.kind][0]}
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[0] == "gemma  18,432" and labels[-1] == "llama-2  524,288"
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first on top
    arrows = [text for text in axes.texts if text.arrow_patch is not None]
    assert [text.xy for text in arrows] == [(3_072, 0), (1_600, 2)]


def test_kinds_of_attention_differ_without_color():
    assert len({marker for marker, _ in ch03.KINDS.values()}) == len(ch03.KINDS) == 4


def test_steps_are_in_milliseconds_with_predictions_as_lines():
    left, right = ch03.step_over_context([256, 4096], {"fp32": TIMES, "bf16": (TIMES[0], {})}).axes
    np.testing.assert_allclose(lines(left)["kv_cache, measured"], [[256, 60], [4096, 200]])
    np.testing.assert_allclose(lines(left)["gqa, predicted"], [[256, 50], [4096, 90]])
    assert left.get_ylim()[1] > 200 and left.get_title() == "fp32"
    assert set(lines(right)) == {"kv_cache, measured", "gqa, measured"}


@pytest.mark.parametrize("name", KNOWN_LATENT_SHAPES)
def test_latents_name_what_is_kept_and_what_it_would_be(name):
    c = KNOWN_LATENT_SHAPES[name]
    shown = " ".join(words(ch03.latents(c)))
    assert "kept: 576 numbers" in shown
    assert f"= {c.expanded_bytes_per_token(1) // c.n_layers:,} numbers" in shown


@pytest.mark.parametrize(
    ("label", "attention"), [("expanded", mla.expanded_attention), ("absorbed", mla.absorbed_attention)]
)
def test_latent_flops_are_those_that_the_stage_counts(label, attention):
    picture = ch03.latent_flops(LITE, 4096)
    (axes,) = picture.axes
    (curve,) = [xy for name, xy in lines(axes).items() if name.startswith(label)]
    for T in (1, 4096):
        shapes = (1, 16, T, LITE.d_qk), (1, 1, 4096, LITE.d_latent), (16, LITE.d_nope + LITE.d_v, LITE.kv_rank)
        arguments = [torch.empty(shape, device="meta") for shape in shapes]
        counted = count(lambda a=arguments: attention(*a, LITE.d_nope)).flops
        assert counted / 16 == pytest.approx(curve[0 if T == 1 else -1, 1])
    assert words(picture) == ["T = 164"]
