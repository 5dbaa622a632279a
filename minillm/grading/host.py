"""The learner's side of a channel: loads one file, calls what it defines, and tells in plain values what came of it."""

import contextlib
import io
import os
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from minillm.grading import wire
from minillm.grading.capture import Captured
from minillm.grading.fence import confine
from minillm.roofline.counting import count


class Host:
    """Holds the learner's functions and objects by number, and answers the grader's messages.

    `ask_back` carries a message to the grader and brings its answer: that is how the learner's code calls a function of the
    grader's, such as a model.
    """

    def __init__(self, ask_back: Callable[[bytes], bytes], confined: bool = False) -> None:
        self._ask_back = ask_back
        self._confined = confined
        self._objects: list[Any] = []
        self._callbacks: dict[int, Callable[..., Any]] = {}
        self._path = ""
        self._module: types.ModuleType | None = None
        self._printed = _Counter()

    def handle(self, message: bytes) -> bytes:
        request = wire.unpack(message, self._resolve)
        self._printed.count = 0
        try:
            with contextlib.redirect_stdout(self._printed), contextlib.redirect_stderr(self._printed):
                reply = self._perform(request)
            reply["printed"] = self._printed.count
            return self._pack(reply)
        except BaseException as error:  # also sys.exit, and a result that cannot be written
            return self._pack(self._describe(error) | {"printed": self._printed.count})

    def add(self, value: Any) -> dict[str, Any]:
        """A reference by which the grader can call `value`."""
        number = next((i for i, known in enumerate(self._objects) if known is value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return {"object": number, "type": type(value).__name__}

    def _perform(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "load":
            self._load(request["path"], request["exercises"])
            return {"returned": None}
        if request["do"] == "get":
            return {"found": getattr(self._module, request["name"], None)}
        target, method, args = request["target"], request["method"], request["args"]
        if method is not None:
            target = getattr(target, method)
        before = self._pack({"args": args})
        if request["do"] == "count":
            result: Any = count(lambda: target(*args)).bytes
        elif request["do"] == "capture":
            result = Captured(target, args)
        else:
            result = target(*args)
        if self._pack({"args": args}) != before:
            return {"mutated": None}
        return {"returned": result}

    def _load(self, path: str, exercises: str) -> None:
        self._path = path
        module = types.ModuleType("exercise")
        module.__file__ = path
        sys.modules["exercise"] = module
        sys.path.insert(0, os.path.dirname(path))
        with open(path, "rb") as file:
            source = file.read()
        if self._confined:
            confine(os.path.dirname(path), exercises)
        exec(compile(source, path, "exec"), module.__dict__)
        self._module = module

    def _describe(self, error: BaseException) -> dict[str, Any]:
        if type(error).__name__ == "InterpreterError" and error.__cause__:  # Triton's: what the kernel raised is inside
            error = error.__cause__
        line = error.lineno if isinstance(error, SyntaxError) and error.filename == self._path else None
        for frame, number in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == self._path:
                line = number
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"raised": kinds, "message": str(message)[:2000], "line": line}

    def _pack(self, message: dict[str, Any]) -> bytes:
        return wire.pack(message, self._special)

    def _special(self, value: Any) -> dict[str, Any]:
        for number, function in self._callbacks.items():
            if function is value:
                return {"callback": number}
        return self.add(value)

    def _resolve(self, value: dict[str, Any]) -> Any:
        if "object" in value:
            return self._objects[value["object"]]
        number = value["callback"]
        return self._callbacks.setdefault(number, lambda *args: self._call_back(number, args))

    def _call_back(self, number: int, args: tuple[Any, ...]) -> Any:
        answer = self._ask_back(self._pack({"callback": number, "args": list(args)}))
        return wire.unpack(answer, self._resolve)["answer"]


class _Counter(io.TextIOBase):
    """Stands in for standard output: counts the characters and keeps none."""

    count = 0

    def write(self, text: str) -> int:
        self.count += len(text)
        return len(text)
