"""Small faults put into a module's source, one at a time: what `mutate.py` tries the tests on.

    comparison    < becomes <= and >=, == becomes !=, `in` becomes `not in`
    condition     `if a` becomes `if not a`; `a and b` becomes `a or b`, a, and b
    operator      + becomes -, * becomes /, // becomes /, -x becomes x
    number        n becomes n + 1 and n - 1 (bounds, offsets, axes); 0.5 becomes 1.0; True becomes False
    bound         in x[a:b], range(a, b) and arange(a, b): one more and one less
    function      min becomes max, any becomes all, floor becomes ceil
    statement     a call, a raise, a continue and a second assignment to a name are left out

Left alone, as no run of right code can tell them apart or since they are prose: docstrings, strings, what is raised,
annotations, decorators, base classes, imports, and `strict=` of zip.
"""

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], list[type[ast.cmpop]]] = {
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
PAIRS = [("min", "max"), ("any", "all"), ("floor", "ceil"), ("amin", "amax"), ("argmin", "argmax")]
PAIRS += [("clamp_min", "clamp_max"), ("clamp_min_", "clamp_max_"), ("minimum", "maximum")]
FUNCTIONS = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """One fault. `line` and `change` name it in a report, wherever the line has moved to."""

    line: str  # the text of the line where it begins, stripped
    change: str  # "old -> new"; a second one of the same words on that line ends in " (2)"
    source: str  # the module's whole source with the fault in it
    number: int  # of the line
    touches: range  # lines of which one runs wherever the faulty code does
    function: str | None  # qualified name of the outermost function it is in the body of; None: it acts while imported


def mutants(source: str) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    found = list(_Finder(source).module())
    seen: Counter[tuple[str, str]] = Counter()
    named = []
    for mutant in sorted(found, key=lambda mutant: mutant.number):
        seen[mutant.line, mutant.change] += 1
        n = seen[mutant.line, mutant.change]
        named.append(Mutant(**{**vars(mutant), "change": f"{mutant.change} ({n})"}) if n > 1 else mutant)
    return named


class _Finder:
    """Walks a syntax tree and yields a mutant for each fault it can put in."""

    def __init__(self, source: str) -> None:
        self.lines = source.splitlines(keepends=True)
        self.tree = ast.parse(source)
        self.function: str | None = None
        self.touches = range(0)
        self.rebound: set[str] = set()  # names of the function at hand that are bound more than once

    def module(self) -> Iterator[Mutant]:
        yield from self._body(self.tree.body, "")

    def _body(self, body: list[ast.stmt], prefix: str) -> Iterator[Mutant]:
        """Statements of a module, a class or a function; prefix is the qualified name of what they stand in."""
        for statement in body:
            if does_nothing(statement):
                continue
            match statement:
                case ast.Import() | ast.ImportFrom():
                    continue
                case ast.ClassDef():
                    yield from self._body(statement.body, f"{prefix}{statement.name}.")
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield from self._function(statement, prefix)
                case _:
                    yield from self._statement(statement, prefix)

    def _function(self, function: FUNCTION, prefix: str) -> Iterator[Mutant]:
        outer = self.touches, self.rebound
        self.touches = range(function.lineno, function.body[0].lineno)
        for default in [*function.args.defaults, *function.args.kw_defaults]:
            if default is not None:
                yield from self._expression(default, function.args)
        outermost = self.function is None
        if outermost:
            self.function = f"{prefix}{function.name}"
        self.rebound = _rebound(function)
        yield from self._body(function.body, f"{prefix}{function.name}.<locals>.")
        if outermost:
            self.function = None
        self.touches, self.rebound = outer

    def _statement(self, statement: ast.stmt, prefix: str) -> Iterator[Mutant]:
        inner = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
        handlers = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.ExceptHandler)]
        end = inner[0].lineno if inner else (statement.end_lineno or statement.lineno) + 1
        self.touches = range(statement.lineno, max(end, statement.lineno + 1))
        if self._may_go(statement):
            yield self._replaced(statement, "pass", f"{ast.unparse(statement)} -> pass")
        if isinstance(statement, ast.Raise):
            return
        for child in ast.iter_child_nodes(statement):
            is_annotation = isinstance(statement, ast.AnnAssign) and child is not statement.value
            if isinstance(child, ast.expr) and not is_annotation:
                if isinstance(statement, ast.If | ast.While) and child is statement.test:
                    yield from self._negated(child)
                yield from self._expression(child, statement)
            elif isinstance(child, ast.withitem):
                yield from self._expression(child.context_expr, child)
        yield from self._body(inner, prefix)
        for handler in handlers:
            yield from self._body(handler.body, prefix)

    def _may_go(self, statement: ast.stmt) -> bool:
        match statement:
            case ast.Raise() | ast.Continue() | ast.Break():
                return True
            case ast.Expr():
                return True
            case ast.AugAssign():
                return self.function is not None
            case ast.Assign(targets=targets):
                names = [node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
                new = any(isinstance(name.ctx, ast.Store) and name.id not in self.rebound for name in names)
                return self.function is not None and not new
        return False

    def _expression(self, node: ast.expr, parent: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.JoinedStr():
                return
            case ast.Constant(bool() | int() | float()) | ast.UnaryOp(ast.USub(), ast.Constant()):
                yield from self._number(node, parent)
                return
            case ast.Compare():
                yield from self._comparison(node)
            case ast.BoolOp():
                other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
                yield self._changed(node, ast.BoolOp(other, node.values))
                for i in range(len(node.values)):
                    rest = node.values[:i] + node.values[i + 1 :]
                    yield self._changed(node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))
            case ast.BinOp() if type(node.op) in OPERATORS and not _is_text(node):
                yield self._changed(node, ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))
            case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert()):
                yield self._changed(node, node.operand)
            case ast.IfExp():
                yield from self._negated(node.test)
            case ast.Slice():
                for bound in (node.lower, node.upper):
                    yield from self._bound(bound, node)
            case ast.Call():
                yield from self._call(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from self._expression(child, node)
            elif isinstance(child, ast.keyword) and not _is_strict_of_zip(node, child):
                yield from self._expression(child.value, child)
            elif isinstance(child, ast.comprehension):
                yield from self._expression(child.iter, child)
                for condition in child.ifs:
                    yield from self._negated(condition)
                    yield from self._expression(condition, child)
            elif isinstance(child, ast.arguments):
                for default in child.defaults:
                    yield from self._expression(default, child)

    def _number(self, node: ast.expr, parent: ast.AST) -> Iterator[Mutant]:
        match ast.literal_eval(node):
            case bool(value):
                yield self._changed(node, ast.Constant(not value), parent)
            case int(value):
                yield self._changed(node, ast.Constant(value + 1), parent)
                yield self._changed(node, ast.Constant(value - 1), parent)
            case float(value):
                yield self._changed(node, ast.Constant(2 * value if value else 1.0), parent)

    def _comparison(self, node: ast.Compare) -> Iterator[Mutant]:
        for i, op in enumerate(node.ops):
            for other in COMPARISONS[type(op)]:
                yield self._changed(
                    node, ast.Compare(node.left, [*node.ops[:i], other(), *node.ops[i + 1 :]], node.comparators)
                )

    def _negated(self, condition: ast.expr) -> Iterator[Mutant]:
        """Not what a comparison, `and`, `or` and `not` become anyway."""
        if not isinstance(condition, ast.Compare | ast.BoolOp | ast.UnaryOp):
            yield self._changed(condition, ast.UnaryOp(ast.Not(), condition))

    def _bound(self, node: ast.expr | None, parent: ast.AST) -> Iterator[Mutant]:
        """A number is changed as a number, that of n + 1 too."""
        plain = not isinstance(node, ast.Constant | ast.UnaryOp | ast.Starred)
        if node is not None and plain and not _is_offset(node):
            for op in (ast.Add(), ast.Sub()):
                yield self._changed(node, ast.BinOp(node, op, ast.Constant(1)), parent)

    def _call(self, node: ast.Call) -> Iterator[Mutant]:
        name = _called(node)
        if name in FUNCTIONS:
            other = copy.deepcopy(node.func)
            if isinstance(other, ast.Attribute):
                other.attr = FUNCTIONS[name]
            elif isinstance(other, ast.Name):
                other.id = FUNCTIONS[name]
            yield self._changed(node.func, other)
        if name in ("range", "arange"):
            for argument in node.args:
                yield from self._bound(argument, node)

    def _changed(self, node: ast.expr, new: ast.expr, inside: ast.AST | None = None) -> Mutant:
        """The mutant that has `new` for `node`; told by the words of `inside`, where those of the node are few."""
        text = f"({ast.unparse(new)}"
        if inside is None or isinstance(inside, ast.stmt | ast.arguments | ast.comprehension | ast.withitem):
            return self._replaced(node, text, f"{ast.unparse(node)} -> {ast.unparse(new)}", end=")")
        change = f"{ast.unparse(inside)} -> {ast.unparse(_swapped(inside, node, new))}"
        return self._replaced(node, text, change, end=")")

    def _replaced(self, node: ast.expr | ast.stmt, text: str, change: str, end: str = "") -> Mutant:
        """The mutant that has text and end for `node`, and as many lines: what follows it keeps its numbers."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        first, last = node.lineno - 1, node.end_lineno - 1
        before = self.lines[first].encode()[: node.col_offset].decode()  # columns count bytes
        after = self.lines[last].encode()[node.end_col_offset :].decode()
        lines = [before, text, "\n" * (last - first), end, after]
        source = "".join([*self.lines[:first], *lines, *self.lines[last + 1 :]])
        return Mutant(self.lines[first].strip(), change, source, node.lineno, self.touches, self.function)


def does_nothing(statement: ast.AST) -> bool:
    """Whether this is a docstring, or another text or dots that stand alone."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and (isinstance(statement.value.value, str) or statement.value.value is ...)
    )


def _swapped(inside: ast.AST, node: ast.expr, new: ast.expr) -> ast.AST:
    """A copy of `inside` with `new` in the place of its child `node`."""
    outer = copy.copy(inside)
    for field, value in ast.iter_fields(inside):
        if value is node:
            setattr(outer, field, new)
        elif isinstance(value, list):
            setattr(outer, field, [new if item is node else item for item in value])
    return outer


def _rebound(function: FUNCTION) -> set[str]:
    """Names that are bound more than once in a function: leaving out one such assignment is not a NameError."""
    bound = Counter(argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg))
    bound.update(
        node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    return {name for name, n in bound.items() if n > 1}


def _called(node: ast.expr) -> str:
    """The last part of the name that a call calls, "" for what has none."""
    match node:
        case ast.Call(ast.Name(name)) | ast.Call(ast.Attribute(attr=name)):
            return name
    return ""


def _is_strict_of_zip(node: ast.expr, keyword: ast.keyword) -> bool:
    return _called(node) == "zip" and keyword.arg == "strict"


def _is_offset(node: ast.expr) -> bool:
    """Whether a number is added or taken away."""
    return (
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and isinstance(node.right, ast.Constant)
    )


def _is_text(node: ast.BinOp) -> bool:
    """Whether a text is joined or repeated."""
    sides = (node.left, node.right)
    return any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str) for side in sides)
