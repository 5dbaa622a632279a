"""`pytest exercises` grades every `exercise.py` and shows the scorecard; how, is told in minillm/grading/plugin.py."""

from minillm.grading.plugin import (  # noqa: F401
    pytest_pycollect_makemodule,
    pytest_runtest_makereport,
    pytest_terminal_summary,
    pytest_unconfigure,
)
