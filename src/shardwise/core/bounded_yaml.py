"""YAML that others wrote: plain values only, and no more of them than a person would write.

A few lines of aliases to aliases can stand for billions of values, and some thousand brackets for a stack that ends the
process. Both are refused while the text is still being parsed, before anything is built of it.
"""

from __future__ import annotations

from typing import Any

import yaml

MOST = 100_000  # values, each alias counted as what it stands for
DEEPEST = 64


class BoundedLoader(yaml.SafeLoader):
    """YAML's safe loader with limits."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = self._count = 0
        self._weights: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """As PyYAML's, counting."""
        event, before = self.peek_event(), self._count
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
    """Plain values; yaml.YAMLError for what is no YAML, or too much of it."""
    return yaml.load(text, BoundedLoader)
