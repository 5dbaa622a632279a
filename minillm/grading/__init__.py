"""Grading: what grader files, notebooks and commands use. The learner's code never runs where the points are counted."""

from minillm.grading.answer import Answer, Evidence, ask, captured, moved_bytes, needs_triton, refuses
from minillm.grading.catalog import exercise
from minillm.grading.errors import NotGraded, NotWritten, Wrong
from minillm.grading.guesses import judge_guesses
from minillm.grading.models import PROMPT, continued, example_model
from minillm.grading.notebook import check

__all__ = [
    "PROMPT",
    "Answer",
    "Evidence",
    "NotGraded",
    "NotWritten",
    "Wrong",
    "ask",
    "captured",
    "check",
    "continued",
    "example_model",
    "exercise",
    "judge_guesses",
    "moved_bytes",
    "needs_triton",
    "refuses",
]
