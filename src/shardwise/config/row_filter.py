"""Row filters: a small expression language with Python's syntax that can only inspect a row.

    len(text) > 20 and lang in ["en", "de"] and not contains(lower(messages[-1].content), "as an ai")

Names are columns of the row, `a.b`, `a["b"]` and `a[0]` parts of them; missing ones are None. `row` is the full row
(for names that are not identifiers: row["my column"]), `text` the example's full text, `turns` its number of messages
without the system prompt, each unless the row has a column of that name. Literals, lists, comparisons (`is None` too),
and/or/not, in, + - * / // %, the functions of row_filter_operations.py, and any/all over `… for x in a_list`.

The text is parsed with Python's grammar and every unknown node is rejected when the config is loaded, with its
position; nothing is ever evaluated by Python itself. [Note: bounded] The cost of a filter is bounded: its size and
depth, no powers, no repeated text, steps per row, and a time limit for patterns. A meaningless comparison (text with a
number: the columns of a CSV file are text) makes the row a bad one rather than false.
"""

from __future__ import annotations

import ast
import difflib
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shardwise.config.row_filter_operations import (
    ARITHMETIC,
    COMPARISONS,
    FUNCTIONS,
    Undecided,
    as_list,
    as_number,
    as_text,
    kind_of,
)
from shardwise.core.errors import UserError

LONGEST, DEEPEST = 4000, 40  # characters of a filter, levels of nesting
STEPS = 100_000  # turns of any/all that one row may take
LONGEST_PATTERN, LARGEST_REPEAT = 1000, 10_000  # the pattern library writes x{1000} out when it compiles
SECONDS = 1.0  # of processor time (what the pattern library counts) for the patterns on one row

FIELD = "data.refine.filter"


@dataclass
class _Scope:
    """The row being evaluated."""

    row: Mapping[str, Any]
    say: Callable[[], str]  # everything the example says
    count_turns: Callable[[], int]
    bound: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    seconds: float = SECONDS  # left for patterns

    @cached_property
    def text(self) -> str:
        return self.say()


Step = Callable[[_Scope], Any]


class _Refused(Exception):
    """An error in the filter itself."""

    def __init__(self, node: ast.AST, problem: str, remedy: str) -> None:
        self.node = node
        self.problem = problem
        self.remedy = remedy


class RowFilter:
    """A validated filter; `keeps` says whether a row is kept."""

    def __init__(self, text: str, field: str = FIELD) -> None:
        self.text, self.field = text, field
        self._lead = len(text) - len(text.lstrip())
        self._source = text.strip()
        if "\n" in self._source:  # lines need a bracket around them to be one expression
            self._source = f"({self._source}\n)"
            self._lead -= 1
        tree = self._parse()
        try:
            builder = _Builder(self._source)
            self._step = builder.build(tree.body)
        except _Refused as refused:
            raise self._mistake(refused.problem, self._place(refused.node), refused.remedy) from None
        self.columns = builder.columns - {"row", "text", "turns"}
        self.guarded = builder.guarded & self.columns

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.text, self.field)

    def keeps(self, row: Any, say: Callable[[], str], count_turns: Callable[[], int]) -> bool:
        """Whether the row is kept; raises Undecided. `say` and `count_turns` compute `text` and `turns`."""
        scope = _Scope(row if isinstance(row, Mapping) else {}, say, count_turns)
        try:
            value = self._step(scope)
        except (TypeError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
            problem = f"data.refine.filter cannot be evaluated ({str(error)[:200]})"
            raise Undecided(problem, "fix the row, or the filter so that it fits all rows") from None
        if isinstance(value, (str, list, tuple, Mapping)) and value:
            remedy = "compare it with something, e.g. == 'yes'"
            raise Undecided(f"data.refine.filter gives {kind_of(value)}, not true or false", remedy)
        return bool(value)

    def check_columns(self, rows: Iterable[Any], path: str) -> list[str]:
        """Raises UserError for a name that none of the first rows has, unless the filter tests it for None.

        Returns the names that are missing legitimately.
        """
        columns: set[str] = set()
        for row in rows:
            columns |= set(map(str, row)) if isinstance(row, Mapping) else set()
        missing = sorted(self.columns - columns)
        for name in missing:
            if name in self.guarded:
                continue
            near = difflib.get_close_matches(name, columns, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            listed = ", ".join(sorted(columns)[:20]) or "none, use text"
            remedy = f"{hint}its columns are {listed}; where only some sources "
            remedy += f"have it, say what becomes of the others: {name} is None or … keeps their rows"
            problem = f"no row at the beginning of {path} has a column {name}"
            raise UserError(self.field, self.text, problem, remedy)
        return missing

    def _parse(self) -> ast.Expression:
        if len(self._source) > LONGEST:
            raise self._mistake(f"has {len(self._source)} characters", None, f"use at most {LONGEST}")
        if not self._source.strip():
            raise self._mistake("is empty", None, "write e.g. len(text) > 20, or remove it")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python's advice on '\d' and the like
                tree = ast.parse(self._source, mode="eval")
        except SyntaxError as error:
            before = self._source.split("\n")[: (error.lineno or 1) - 1]
            at = error.offset or len(self._source) + 1  # 0 where more was expected
            place = sum(len(line) + 1 for line in before) + at + self._lead
            remedy = 'write e.g. len(text) > 20 and lang == "en"; a column that is no plain name: row["from"]'
            raise self._mistake(f"is not an expression ({error.msg})", place, remedy) from None
        except (ValueError, MemoryError, RecursionError) as error:
            raise self._mistake(f"cannot be read ({error})", None, "write a shorter one") from None
        level: list[ast.AST] = [tree.body]
        for _ in range(DEEPEST):
            level = [child for node in level for child in ast.iter_child_nodes(node)]
        if level:
            raise self._mistake(f"is nested deeper than {DEEPEST} levels", None, "write a shorter one")
        return tree

    def _mistake(self, problem: str, place: int | None, remedy: str) -> UserError:
        where = "" if place is None else f", at character {place}"
        return UserError(self.field, self.text, f"{problem}{where}", remedy)

    def _place(self, node: ast.AST) -> int:
        """Character position of a node in the filter, from 1 (Python counts bytes of the line)."""
        lines = self._source.split("\n")
        line, column = getattr(node, "lineno", 1) - 1, getattr(node, "col_offset", 0)
        begin = sum(len(before) + 1 for before in lines[:line]) + self._lead
        return begin + len(lines[line].encode()[:column].decode(errors="ignore")) + 1


class _Builder:
    """Compiles the syntax tree into functions of the row; rejects what is not in the language."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.columns: set[str] = set()
        self.guarded: set[str] = set()  # columns that are compared with None, so they may be missing
        self.bound: list[str] = []

    def build(self, node: ast.expr) -> Step:
        """Compiles one node."""
        make = getattr(self, f"_{type(node).__name__.lower()}", None)
        if make is None:
            raise _Refused(
                node, f"{self._source_of(node)} is not allowed", "see the filter's language in the documentation"
            )
        step: Step = make(node)
        return step

    def _source_of(self, node: ast.AST) -> str:
        text = ast.get_source_segment(self.source, node) or type(node).__name__
        return f"`{text if len(text) <= 40 else text[:39] + '…'}`"

    def _constant(self, node: ast.Constant) -> Step:
        value = node.value
        if not (value is None or isinstance(value, (str, int, float))):
            raise _Refused(node, f"{self._source_of(node)} is not allowed", "use text, numbers, True, False and None")
        return lambda _: value

    def _name(self, node: ast.Name) -> Step:
        name = node.id
        if (literal := {"true": "True", "false": "False", "null": "None", "none": "None"}.get(name)) is not None:
            raise _Refused(node, f"{name} would be a column", f'write {literal} (or row["{name}"])')
        if name in self.bound:
            return lambda scope: scope.bound[name]
        self.columns.add(name)
        special = {"text": lambda s: s.text, "turns": lambda s: s.count_turns(), "row": lambda s: s.row}
        if (otherwise := special.get(name)) is None:
            return lambda scope: scope.row.get(name)
        return lambda scope: scope.row[name] if name in scope.row else otherwise(scope)

    def _attribute(self, node: ast.Attribute) -> Step:
        return self._part(node.value, lambda _: node.attr)

    def _subscript(self, node: ast.Subscript) -> Step:
        if isinstance(node.slice, ast.Slice):
            raise _Refused(node, "slices are not allowed", "use startswith, endswith or contains")
        return self._part(node.value, self.build(node.slice))

    def _part(self, node: ast.expr, key: Step) -> Step:
        container, source = self.build(node), self._source_of(node)

        def step(scope: _Scope) -> Any:
            value = container(scope)
            index = key(scope)
            if value is None:
                return None
            if isinstance(value, Mapping):
                return value.get(index) if isinstance(index, (str, int, float)) else None
            if not isinstance(value, (list, tuple)) or not isinstance(index, int) or isinstance(index, bool):
                remedy = "a list has parts by number, a mapping by name"
                raise Undecided(f"{source} is {kind_of(value)} and has no part {str(index)[:40]!r}", remedy)
            return value[index] if -len(value) <= index < len(value) else None

        return step

    def _list(self, node: ast.List | ast.Tuple) -> Step:
        steps = [self.build(item) for item in node.elts]
        return lambda scope: [step(scope) for step in steps]

    _tuple = _list

    def _boolop(self, node: ast.BoolOp) -> Step:
        steps = [self.build(value) for value in node.values]
        stop = isinstance(node.op, ast.Or)

        def step(scope: _Scope) -> Any:
            value = None
            for part in steps:
                value = part(scope)
                if bool(value) is stop:
                    return value
            return value

        return step

    def _unaryop(self, node: ast.UnaryOp) -> Step:
        inner, source = self.build(node.operand), self._source_of(node.operand)
        if isinstance(node.op, ast.Not):
            return lambda scope: not inner(scope)
        if isinstance(node.op, ast.USub):
            return lambda scope: -as_number(inner(scope), source)
        if isinstance(node.op, ast.UAdd):
            return lambda scope: as_number(inner(scope), source)
        raise _Refused(node, "~ is not allowed", "use not")

    def _binop(self, node: ast.BinOp) -> Step:
        act = ARITHMETIC.get(type(node.op))
        if act is None:
            raise _Refused(node, f"{self._source_of(node)} is not allowed", "of operators there are + - * / // %")
        left, right = self.build(node.left), self.build(node.right)
        first, second = self._source_of(node.left), self._source_of(node.right)
        joins = isinstance(node.op, ast.Add)

        def step(scope: _Scope) -> Any:
            a, b = left(scope), right(scope)
            if joins and isinstance(a, str) and isinstance(b, str):
                return a + b
            return act(as_number(a, first), as_number(b, second))

        return step

    def _compare(self, node: ast.Compare) -> Step:
        nodes = [node.left, *node.comparators]
        steps = [self.build(n) for n in nodes]
        sources = [self._source_of(n) for n in nodes]
        tests: list[Callable[[Any, Any, str, str], bool]] = []
        for op, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, (ast.Is, ast.IsNot)) and not (
                isinstance(right, ast.Constant) and (right.value is None or isinstance(right.value, bool))
            ):
                raise _Refused(right, "`is` compares with None, True and False only", "use ==")
            if isinstance(op, (ast.Is, ast.IsNot)) and isinstance(node.left, ast.Name) and _is_none(right):
                self.guarded.add(node.left.id)
            tests.append(COMPARISONS[type(op)])

        def step(scope: _Scope) -> bool:
            left = steps[0](scope)
            for index, test in enumerate(tests):
                right = steps[index + 1](scope)
                if not test(left, right, sources[index], sources[index + 1]):
                    return False
                left = right
            return True

        return step

    def _call(self, node: ast.Call) -> Step:
        if isinstance(node.func, ast.Attribute):
            problem = f"{self._source_of(node.func)} is a part of a row, not a function"
            raise _Refused(
                node.func, problem, f"write {node.func.attr}({self._source_of(node.func.value).strip('`')}, …)"
            )
        if not isinstance(node.func, ast.Name):
            raise _Refused(node.func, f"{self._source_of(node.func)} is not a function", f"there are {_known()}")
        name = node.func.id
        if name not in FUNCTIONS and name not in ("any", "all", "matches"):
            near = difflib.get_close_matches(name, [*FUNCTIONS, "any", "all", "matches"], 1)
            remedy = (f"did you mean {near[0]}? " if near else "") + f"there are {_known()}"
            raise _Refused(node.func, f"there is no function {name}", remedy)
        if node.keywords or any(isinstance(arg, ast.Starred) for arg in node.args):
            raise _Refused(node, f"{name} takes plain arguments", f"write {name}(a, b)")
        if name == "matches":
            return self._matches(node)
        if name in ("any", "all"):
            return self._any_or_all(node, name)
        least, limit, act = FUNCTIONS[name]
        if not least <= len(node.args) <= limit:
            takes = str(least) if least == limit else f"{least} or more"
            raise _Refused(node, f"{name} takes {takes} argument{'s' * (takes != '1')}", f"{len(node.args)} are given")
        steps = [self.build(arg) for arg in node.args]
        source = self._source_of(node.args[0])

        def step(scope: _Scope) -> Any:
            values = [part(scope) for part in steps]
            try:
                return act(*values)
            except TypeError:
                remedy = f"guard it, e.g. {source.strip('`')} is not None and …" if values[0] is None else "convert it"
                kinds = ", ".join(map(kind_of, values))
                raise Undecided(f"{name}({source}{', …' * (len(values) > 1)}) was given {kinds}", remedy) from None

        return step

    def _any_or_all(self, node: ast.Call, name: str) -> Step:
        """Compiles any and all, of a list or of `test for x in list`."""
        if len(node.args) != 1:
            raise _Refused(node, f"{name} takes one argument", f"write {name}(x > 1 for x in scores)")
        stop = name == "any"
        if not isinstance(node.args[0], (ast.GeneratorExp, ast.ListComp)):
            inner, source = self.build(node.args[0]), self._source_of(node.args[0])
            return lambda scope: (
                any(map(bool, as_list(inner(scope), source))) if stop else all(as_list(inner(scope), source))
            )
        inner_node, loops = node.args[0].elt, node.args[0].generators
        if len(loops) != 1 or loops[0].ifs or loops[0].is_async or not isinstance(loops[0].target, ast.Name):
            raise _Refused(
                node.args[0], "only `test for x in list` is allowed", "put conditions into the test with and"
            )
        target = loops[0].target.id
        items, source = self.build(loops[0].iter), self._source_of(loops[0].iter)
        self.bound.append(target)
        test = self.build(inner_node)
        self.bound.pop()

        def step(scope: _Scope) -> bool:
            outer = scope.bound
            try:
                for item in as_list(items(scope), source):
                    scope.steps += 1
                    if scope.steps > STEPS:
                        raise Undecided(f"the filter takes more than {STEPS} steps on this row", "simplify it")
                    scope.bound = {**outer, target: item}
                    if bool(test(scope)) is stop:
                        return stop
                return not stop
            finally:
                scope.bound = outer

        return step

    def _matches(self, node: ast.Call) -> Step:
        """Compiles matches(text, pattern): a regular-expression search with a time limit."""
        import regex  # unlike re it can be stopped

        pattern = node.args[1] if len(node.args) == 2 else None
        if not isinstance(pattern, ast.Constant) or not isinstance(pattern.value, str):
            raise _Refused(node, "matches takes a text and a pattern in quotes", 'write matches(text, r"\\d+")')
        if len(pattern.value) > LONGEST_PATTERN:
            raise _Refused(pattern, f"the pattern is longer than {LONGEST_PATTERN} characters", "write a shorter one")
        repeats = 1
        for least in re.findall(r"\{\s*(\d+)", pattern.value):
            repeats = min(repeats * max(int(least[:9]), 1), LARGEST_REPEAT + 1)
        if repeats > LARGEST_REPEAT:
            problem = f"the numbers in braces multiply to more than {LARGEST_REPEAT} repeats"
            raise _Refused(pattern, problem, "use smaller ones, or + and *")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compiled = regex.compile(pattern.value)
        except (regex.error, ValueError, OverflowError, RecursionError, KeyError, IndexError) as error:
            raise _Refused(pattern, f"is not a pattern ({error})", "mend it, or escape its signs with \\") from None
        inner, source = self.build(node.args[0]), self._source_of(node.args[0])

        def step(scope: _Scope) -> bool:
            value = as_text(inner(scope), source)
            begin = time.process_time()
            try:
                matched = compiled.search(value, timeout=max(scope.seconds, 0.001)) is not None
                scope.seconds -= time.process_time() - begin
                return matched
            except TimeoutError:
                problem = f"the pattern of matches({source}, …) takes longer than {SECONDS:g} s on this row"
                raise Undecided(problem, "write it without repeats inside repeats") from None

        return step


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _known() -> str:
    return ", ".join(sorted([*FUNCTIONS, "any", "all", "matches"]))
