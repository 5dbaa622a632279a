"""`check` for notebooks: the same graders, on functions that stand in the notebook itself."""

from typing import Any

import torch

from minillm.grading.catalog import check_chapter, find_exercises, load_chapter, select
from minillm.grading.channel import TIME_LIMIT, LocalChannel
from minillm.grading.engine import run_grader
from minillm.grading.errors import NotGraded, NotWritten, sentence
from minillm.grading.stubs import passed


def check(name: str, *objects: Any, time_limit: float = TIME_LIMIT) -> None:
    """Grade what a cell defines, as in `check("ch00/ttft", ttft)`, and print the verdict in one sentence."""
    print(verdict(name, *objects, time_limit=time_limit))


def verdict(name: str, *objects: Any, time_limit: float = TIME_LIMIT) -> str:
    """The sentence that `check` prints."""
    try:
        ((chapter, (exercise, *others)),) = select(name).items()
        if others:
            return f"{name}: not graded, because that is a chapter: name one exercise, such as {chapter}/{exercise}."
        folder = find_exercises()
        check_chapter(folder, chapter)
        item = {item.name: item for item in load_chapter(folder, chapter)}[exercise]
        if len(objects) != len(item.needs):
            return f"{name}: not graded, because it needs {', '.join(item.needs)}: check({name!r}, {', '.join(item.needs)})."
        channel = LocalChannel(time_limit)
        wrapped = [channel.wrap(value, need) for value, need in zip(objects, item.needs, strict=True)]
        with torch.device("cpu"):  # whatever default the notebook has set
            status, why = run_grader(item, channel, wrapped)
    except NotWritten as error:
        return f"{name}: not attempted. {sentence(str(error))}"
    except NotGraded as error:
        return f"{name}: {error}"
    except ValueError as error:  # no such exercise, no exercises folder
        return f"{name}: not graded, because of this: {error}"
    if status == "passed":
        return passed(name, item.points)
    return f"{name}: failed. {sentence(why)}"
