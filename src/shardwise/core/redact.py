"""Redacts secrets in messages, logs and records, which are stored and shared."""

from __future__ import annotations

import os
import re

# Of variables. NCCL_IB_PKEY is a partition's number and TOKENIZERS_PARALLELISM a switch: neither is a secret.
SECRET_VARIABLE = re.compile(r"TOKEN(?!IZER)|SECRET|PASS(W|PH|_|$)|CREDENTIAL|AUTH|(?<!P)KEY", re.IGNORECASE)
# Of settings, where `tokens` are counted and `token_env` names a variable.
SECRET_SETTING = re.compile(r"(^|[._])(api_?)?(key|secret|password|passwd|token|credentials?)$", re.IGNORECASE)
SECRET_VALUE = re.compile(
    r"\b(?:hf_\w{20,}|gh\w_\w{20,}|sk-[\w-]{16,}|glpat-[\w-]{16,}|eyJ[\w.-]{16,}|AKIA\w{12,})"
    r"|(?<=://)[^/\s@'\"]+(?=@)"
)
HIDDEN = "(hidden)"
SHORTEST = 8  # characters: shorter values stand in texts by chance


def redact(text: str) -> str:
    """The text without API keys, credentials in URLs, and values of secret environment variables."""
    text = SECRET_VALUE.sub(HIDDEN, text)
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and SECRET_VARIABLE.search(name) and not os.path.exists(value):
            text = text.replace(value, HIDDEN)
    return text
