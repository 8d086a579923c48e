"""Chat templates of the families that differ, written down from how they lay a conversation out.

Beside each template stands what it makes of an answer, as a plain function: the reference that masks are held to.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Message = dict[str, Any]
Turn = Callable[[Sequence[Message], int], str]  # what of the rendering is learned for one assistant message


@dataclass(frozen=True)
class Family:
    """A template, the tokens it needs, what it learns, and what it takes."""

    template: str
    turn: Turn
    eos: str
    bos: str | None = None
    special: tuple[str, ...] = ()
    system: bool = True
    tools: bool = False
    blanks: bool = True  # whether blanks around a content survive
    stops: tuple[str, ...] = ()  # of the model's generation config, besides eos


def _end(mark: str, head: str = "", trim: bool = False) -> Turn:
    def turn(messages: Sequence[Message], index: int) -> str:
        content = messages[index].get("content") or ""
        return head + (content.strip() if trim else content) + mark

    return turn


def _calls(
    write: Callable[[Message], str], mark: str, before: str = "", between: str = "", after: str = "", head: str = ""
) -> Turn:
    """An answer with tool calls, each written by `write`; or a plain one."""

    def turn(messages: Sequence[Message], index: int) -> str:
        message = messages[index]
        content = message.get("content") or ""
        if not message.get("tool_calls"):
            return head + content + mark
        return content + before + between.join(write(c) for c in message["tool_calls"]) + after + mark

    return turn


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = """\
{%- set ns = namespace(system='') -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- set ns.system = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' -%}
{%- elif m.role == 'user' -%}{{ bos_token + '[INST] ' + ns.system + m.content.strip() + ' [/INST]' }}
{%- set ns.system = '' -%}
{%- else -%}{{ ' ' + m.content.strip() + ' ' + eos_token }}{%- endif -%}
{%- endfor -%}"""
LLAMA3 = """\
{{- bos_token -}}
{%- if tools -%}
{{- '<|start_header_id|>system<|end_header_id|>\n\nTools:\n' -}}
{%- for t in tools -%}{{- t | tojson + '\n' -}}{%- endfor -%}{{- '<|eot_id|>' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.tool_calls -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{%- set call = m.tool_calls[0].function -%}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' -}}
{%- else -%}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' -}}
{{- m.content | trim + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}"""
MISTRAL_V1 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_V3 = """\
{%- set ns = namespace(last=-1, system='') -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- if m.role == 'system' -%}{%- set ns.system = m.content + '\n\n' -%}{%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{%- if tools and loop.index0 == ns.last -%}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}
{%- endif -%}
{{- '[INST] ' + (ns.system if loop.index0 == ns.last else '') + m.content + '[/INST]' -}}
{%- elif m.tool_calls -%}
{{- '[TOOL_CALLS] [' -}}
{%- for c in m.tool_calls -%}
{%- if c.id | length != 9 -%}{{- raise_exception('ids have nine letters') -}}{%- endif -%}
{{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' + ('' if loop.last else ', ') -}}
{%- endfor -%}
{{- ']' + eos_token -}}
{%- elif m.role == 'tool' -%}
{{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' -}}
{%- elif m.role == 'assistant' -%}{{- ' ' + m.content + eos_token -}}
{%- endif -%}
{%- endfor -%}"""
GEMMA = """\
{{ bos_token }}
{%- set ns = namespace(lead='') -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- set ns.lead = m.content | trim + '\n\n' -%}
{%- else -%}
{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + ns.lead + m.content | trim }}
{{- '<end_of_turn>\n' }}
{%- set ns.lead = '' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{% endfor %}"
)
DEEPSEEK = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- m.content -}}
{%- elif m.role == 'user' -%}{{- '<|User|>' + m.content -}}
{%- elif m.role == 'tool' -%}{{- '<|tool_output_begin|>' + m.content + '<|tool_output_end|>' -}}
{%- elif m.tool_calls -%}
{{- '<|Assistant|><|tool_calls_begin|>' -}}
{%- for c in m.tool_calls -%}
{{- '<|tool_call_begin|>function<|tool_sep|>' + c.function.name + '\n' + c.function.arguments | tojson -}}
{{- '<|tool_call_end|>' -}}
{%- endfor -%}
{{- '<|tool_calls_end|>' + eos_token -}}
{%- else -%}{{- '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|Assistant|>' -}}{%- endif -%}"""
# Reasoning models are asked with the tag already open, which finished answers do not have.
DEEPSEEK_R1 = DEEPSEEK.replace("'<|Assistant|>' -}}{%- endif -%}", "'<|Assistant|><think>\n' -}}{%- endif -%}")
QWEN25 = """\
{%- if tools -%}
{{- '<|im_start|>system\n' + (messages[0].content if messages[0].role == 'system' else 'Be kind.') + '\n\n<tools>' -}}
{%- for t in tools -%}{{- '\n' + t | tojson -}}{%- endfor -%}{{- '\n</tools><|im_end|>\n' -}}
{%- elif messages[0].role == 'system' -%}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' -}}
{%- else -%}{{- '<|im_start|>system\nBe kind.<|im_end|>\n' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|im_start|>assistant' -}}
{%- if m.content -%}{{- '\n' + m.content -}}{%- endif -%}
{%- for c in m.tool_calls -%}
{{- '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson -}}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
# Thoughts are kept in answers behind the last question, and dropped from the others; without any, an empty block.
QWEN3 = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set thought, words = '', m.content -%}
{%- if '</think>' in m.content -%}
{%- set thought = m.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
{%- set words = m.content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > ns.last and (loop.last or thought) -%}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + words.lstrip('\n') -}}
{%- else -%}{{- words -}}{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
FALCON = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\n' }}"
    "{% elif m.role == 'user' %}{{ 'User: ' + m.content + '\n' }}"
    "{% else %}{{ 'Assistant: ' + m.content + eos_token + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
COMMAND_R = (
    "{{ bos_token }}{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}"
    "{{ {'system': '<|SYSTEM_TOKEN|>', 'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}[m.role] }}"
    "{{ m.content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
# Channels; the last answer of all returns, earlier ones end.
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}{{ '<|start|>assistant<|channel|>commentary to=functions.' + m.tool_calls[0].function.name"
    " + '<|message|>' + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
GRANITE = (
    "{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{% endfor %}" + CHATML
)
# As some old templates: nothing is written for add_generation_prompt, or the header always is.
NO_PROMPT = CHATML.partition("{% if add_generation_prompt")[0]
ALWAYS_PROMPT = NO_PROMPT + "{{ '<|im_start|>assistant\n' }}"
# Two special tokens end an answer.
COMMAND_A = (
    "{{ bos_token }}{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}{% if m.role == 'assistant' %}"
    "{{ '<|CHATBOT_TOKEN|><|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{% else %}"
    "{{ ('<|USER_TOKEN|>' if m.role == 'user' else '<|SYSTEM_TOKEN|>') + m.content }}{% endif %}"
    "{{ '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' }}{% endif %}"
)
# The end of turn is written once, behind the last message; turns are told apart by plain text.
VICUNA = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ ' ASSISTANT: ' + m.content + '\n' }}{% else %}{{ m.content + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% else %}{{ eos_token }}{% endif %}"
)
# The same with markers of roles.
METHARME = (
    "{% for m in messages %}{{ {'user': '<|user|>', 'assistant': '<|model|>', 'system': '<|system|>'}[m.role] }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<|model|>' }}{% else %}{{ eos_token }}{% endif %}"
)
# Nothing but the marker of the next role parts the turns, and the model stops at it.
GLM = (
    "{{ '[gMASK]<sop>' }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# The last answer is left open.
APERTUS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '_start|>' + m.content }}"
    "{% if m.role != 'assistant' or not loop.last %}{{ '<|' + m.role + '_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant_start|>' }}{% endif %}"
)
# A second answer in a row is not asked for, and has a header all the same.
ASKED_ONCE = CHATML.replace("add_generation_prompt %}", "add_generation_prompt and messages[-1].role != 'assistant' %}")
# What the prompt ends with stands in the last answer, empty, and not in earlier ones.
QWEN35 = QWEN3.replace(
    "'<|im_start|>assistant\n' -}}{%- endif -%}", "'<|im_start|>assistant\n<think>\n' -}}{%- endif -%}"
)
# Contents as parts alone, as templates of models that see have it.
PARTS = CHATML.replace("m.content", "m.content[0].text if m.content is not string else ''").replace(
    "+ m.content[0].text if m.content is not string else '' +",
    "+ (m.content[0].text if m.content is not string else '') +",
)
# Tool calls with arguments as JSON text; "" beside them makes a turn of its own.
DISTILL = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<|User|>' + m.content -}}
{%- elif m.role == 'tool' -%}{{- '<|tool_output_begin|>' + m.content + '<|tool_output_end|>' -}}
{%- elif m.role == 'assistant' -%}
{%- if m.tool_calls -%}
{{- '<|Assistant|><|tool_calls_begin|>' -}}
{%- for c in m.tool_calls -%}
{{- '<|tool_call_begin|>' + c.function.name + '<|tool_sep|>' + c.function.arguments + '<|tool_call_end|>' -}}
{%- endfor -%}
{{- '<|tool_calls_end|>' + eos_token -}}
{%- endif -%}
{%- if m.content is not none -%}{{- '<|Assistant|>' + m.content + eos_token -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|Assistant|>' -}}{%- endif -%}"""
WORDY_END = CHATML.replace("m.content + '<|im_end|>\n'", "m.content + '\n(over)' + '<|im_end|>\n\n'")


def _hermes(call: Message) -> str:
    inner = call["function"]
    arguments = json.dumps(inner["arguments"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{inner["name"]}", "arguments": {arguments}}}\n</tool_call>'


def _llama_turn(messages: Sequence[Message], index: int) -> str:
    if calls := messages[index].get("tool_calls"):
        inner = calls[0]["function"]
        arguments = json.dumps(inner["arguments"], ensure_ascii=False)
        return f'{{"name": "{inner["name"]}", "parameters": {arguments}}}<|eot_id|>'
    return str(messages[index]["content"]).strip() + "<|eot_id|>"


def _mistral_call(call: Message) -> str:
    inner = json.dumps(call["function"], ensure_ascii=False)[:-1]
    return f'{inner}, "id": "{call["id"]}"}}'


def _deepseek_turn(messages: Sequence[Message], index: int) -> str:
    message, end = messages[index], "<|end_of_sentence|>"
    if not message.get("tool_calls"):
        return str(message["content"]).split("</think>")[-1] + end
    calls = "".join(
        f"<|tool_call_begin|>function<|tool_sep|>{c['function']['name']}\n"
        f"{json.dumps(c['function']['arguments'], ensure_ascii=False)}<|tool_call_end|>"
        for c in message["tool_calls"]
    )
    return f"<|tool_calls_begin|>{calls}<|tool_calls_end|>{end}"


def _qwen25_turn(messages: Sequence[Message], index: int) -> str:
    """The prompt ends with a newline, which a message with calls alone has before its first call."""
    message = messages[index]
    parts = ([message["content"]] if message.get("content") else []) + [*map(_hermes, message.get("tool_calls") or [])]
    return "\n".join(parts) + "<|im_end|>"


def _qwen3_turn(messages: Sequence[Message], index: int) -> str:
    content = str(messages[index]["content"])
    thought, words = "", content
    if "</think>" in content:
        thought = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
        words = content.split("</think>")[-1].lstrip("\n")
    last_question = max(i for i, m in enumerate(messages) if m["role"] == "user")
    if index > last_question and (index == len(messages) - 1 or thought):
        stripped, rest = thought.strip("\n"), words.lstrip("\n")
        return f"<think>\n{stripped}\n</think>\n\n{rest}<|im_end|>"
    return words + "<|im_end|>"


def _qwen35_turn(messages: Sequence[Message], index: int) -> str:
    """As before, but what the prompt ends with is no part of the answer."""
    return _qwen3_turn(messages, index).removeprefix("<think>\n")


def _harmony_turn(messages: Sequence[Message], index: int) -> str:
    if calls := messages[index].get("tool_calls"):
        inner = calls[0]["function"]
        arguments = json.dumps(inner["arguments"], ensure_ascii=False)
        return f"<|channel|>commentary to=functions.{inner['name']}<|message|>{arguments}<|call|>"
    end = "<|return|>" if index == len(messages) - 1 else "<|end|>"
    return f"<|channel|>final<|message|>{messages[index]['content']}{end}"


def _distill_turn(messages: Sequence[Message], index: int) -> str:
    message, end = messages[index], "<|end_of_sentence|>"
    if not message.get("tool_calls"):
        return str(message["content"]) + end
    calls = "".join(
        f"<|tool_call_begin|>{c['function']['name']}<|tool_sep|>"
        f"{json.dumps(c['function']['arguments'], ensure_ascii=False)}<|tool_call_end|>"
        for c in message["tool_calls"]
    )
    return f"<|tool_calls_begin|>{calls}<|tool_calls_end|>{end}"


def _last(end: str, head: str = "") -> Turn:
    """An end that only the last message of a conversation has."""

    def turn(messages: Sequence[Message], index: int) -> str:
        content = str(messages[index]["content"])
        return head + content + end if index == len(messages) - 1 else (head + content).rstrip()

    return turn


_IM = ("<|im_start|>", "<|im_end|>")
_ROLES = ("<|user|>", "<|assistant|>", "<|system|>", "<|model|>")
_LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>")
_V3 = ("[TOOL_CALLS]", *(f"[{s}{w}]" for w in ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS") for s in ("", "/")))
_DEEP = (
    *("<|begin_of_sentence|>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>", "<|tool_sep|>"),
    *(f"<|tool_{what}_{side}|>" for what in ("calls", "call", "output") for side in ("begin", "end")),
)
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
_COMMAND = (
    "<BOS_TOKEN>",
    *(f"<|{w}_TOKEN|>" for w in ("START_OF_TURN", "END_OF_TURN", "SYSTEM", "USER", "CHATBOT")),
)

FAMILIES: dict[str, Family] = {
    "chatml": Family(CHATML, _end("<|im_end|>"), "<|im_end|>", special=_IM),
    "llama2": Family(LLAMA2, _end(" </s>", " ", trim=True), "</s>", "<s>", blanks=False),
    "llama3": Family(LLAMA3, _llama_turn, "<|eot_id|>", "<|begin_of_text|>", _LLAMA, tools=True, blanks=False),
    "mistral-v1": Family(MISTRAL_V1, _end("</s>", " "), "</s>", "<s>", system=False),
    "mistral-v3": Family(
        MISTRAL_V3, _calls(_mistral_call, "</s>", "[TOOL_CALLS] [", ", ", "]", head=" "), "</s>", "<s>", _V3, tools=True
    ),
    "gemma": Family(
        GEMMA, _end("<end_of_turn>", trim=True), "<eos>", "<bos>", ("<start_of_turn>", "<end_of_turn>"), blanks=False
    ),
    "phi3": Family(
        PHI3, _end("<|end|>"), "<|endoftext|>", special=("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
    ),
    "zephyr": Family(ZEPHYR, _end("</s>", "\n"), "</s>", "<s>"),
    "deepseek": Family(DEEPSEEK, _deepseek_turn, "<|end_of_sentence|>", "<|begin_of_sentence|>", _DEEP, tools=True),
    "deepseek-r1": Family(
        DEEPSEEK_R1, _deepseek_turn, "<|end_of_sentence|>", "<|begin_of_sentence|>", _DEEP, tools=True
    ),
    "qwen2.5": Family(QWEN25, _qwen25_turn, "<|im_end|>", special=_IM, tools=True),
    "qwen3": Family(QWEN3, _qwen3_turn, "<|im_end|>", special=_IM),
    "falcon": Family(FALCON, _end("<|endoftext|>", " "), "<|endoftext|>"),
    "command-r": Family(
        COMMAND_R,
        _end("<|END_OF_TURN_TOKEN|>", trim=True),
        "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>",
        _COMMAND,
        blanks=False,
    ),
    "harmony": Family(HARMONY, _harmony_turn, "<|return|>", special=_HARMONY, tools=True),
    "granite": Family(
        GRANITE,
        _end("<|end_of_text|>"),
        "<|end_of_text|>",
        special=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    ),
    "tagged": Family(TAGGED, _end("<|im_end|>"), "<|im_end|>", special=_IM),
    "no-system": Family(NO_SYSTEM, _end("<|im_end|>"), "<|im_end|>", special=_IM, system=False),
    "no-prompt": Family(NO_PROMPT, _end("<|im_end|>"), "<|im_end|>", special=_IM),
    "always-prompt": Family(ALWAYS_PROMPT, _end("<|im_end|>"), "<|im_end|>", special=_IM),
    "command-a": Family(
        COMMAND_A,
        _end("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
        "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>",
        (*_COMMAND, "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "vicuna": Family(VICUNA, _last("\n</s>", " "), "</s>", "<s>"),
    "metharme": Family(METHARME, _last("</s>"), "</s>", special=_ROLES),
    "glm": Family(GLM, _end("<|user|>"), "<|endoftext|>", special=("[gMASK]", "<sop>", *_ROLES), stops=("<|user|>",)),
    "apertus": Family(
        APERTUS,
        _end("<|assistant_end|>"),
        "<|assistant_end|>",
        "<s>",
        tuple(f"<|{role}_{side}|>" for role in ("user", "assistant", "system") for side in ("start", "end")),
    ),
    "asked-once": Family(ASKED_ONCE, _end("<|im_end|>"), "<|im_end|>", special=_IM),
    "qwen3.5": Family(QWEN35, _qwen35_turn, "<|im_end|>", special=_IM),
    "parts": Family(PARTS, _end("<|im_end|>"), "<|im_end|>", special=_IM),
    "distill": Family(DISTILL, _distill_turn, "<|end_of_sentence|>", "<|begin_of_sentence|>", _DEEP, False, True),
    "wordy-end": Family(WORDY_END, _end("\n(over)<|im_end|>"), "<|im_end|>", special=_IM),
}


@lru_cache
def smollm2() -> Any:
    """The tokenizer of the embedded model, whose weights are not converted for it (half a minute, once)."""
    from shardwise.config.schema import Model
    from shardwise.nn.models.source import EMBEDDED, find_model
    from support.tiny import LLAMA

    return find_model(Model(config=dict(LLAMA), tokenizer=EMBEDDED)).load_tokenizer()


@lru_cache
def family_tokenizer(name: str, kind: str = "bytes") -> Any:
    """A family's template over the small tokenizer of `kind`, or over SmolLM2's own words (smollm2)."""
    from support.chat import chat_tokenizer

    family = FAMILIES[name]
    tokenizer = copy.deepcopy(smollm2()) if kind == "smollm2" else chat_tokenizer(None, kind=kind)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.special)})
    tokenizer.add_special_tokens({"eos_token": family.eos} | ({"bos_token": family.bos} if family.bos else {}))
    tokenizer.chat_template = family.template
    return tokenizer
