"""Safe loading of untrusted YAML: plain values only, bounded in number and depth.

A few lines of nested aliases can expand to billions of values, and thousands of brackets overflow the stack. Both are
rejected while the text is being parsed, before anything is built.
"""

from __future__ import annotations

from typing import Any

import yaml

MOST = 100_000  # values, each alias counted as what it stands for
DEEPEST = 64


class BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader with limits."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = self._count = 0
        self._weights: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """PyYAML's method, with counting."""
        event = self.peek_event()
        before = self._count
        is_alias = isinstance(event, yaml.AliasEvent)
        self._depth += 1
        if self._depth > DEEPEST:
            raise yaml.composer.ComposerError(None, None, f"more than {DEEPEST} levels deep", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._weights:
            raise yaml.composer.ComposerError(None, None, "an alias that stands within itself", event.start_mark)
        self._count += self._weights[id(node)] if is_alias else 1
        if self._count > MOST:
            problem = f"more than {MOST:,} values, aliases counted as what they stand for"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        if not is_alias:
            self._weights[id(node)] = self._count - before
        return node


def read_yaml(text: str) -> Any:
    """Parses plain values; raises yaml.YAMLError for invalid or oversized YAML."""
    return yaml.load(text, BoundedLoader)
