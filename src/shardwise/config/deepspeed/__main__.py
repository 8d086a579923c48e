"""Prints docs/deepspeed.md from the table: `python -m shardwise.config.deepspeed > docs/deepspeed.md`."""

from __future__ import annotations

from shardwise.config.deepspeed.table import SECTIONS, Key

INTRODUCTION = """\
# DeepSpeed's config

<!-- Printed by `python -m shardwise.config.deepspeed > docs/deepspeed.md`; change the table, not this page. -->

```yaml
parallel: {deepspeed: ds_config.json}   # in RUN.yaml; the path is relative to the folder you run the command in
```

```
shardwise train run.yaml                                         # prints what became of each key it met
shardwise config --from-deepspeed ds_config.json                 # the equivalent RUN.yaml; a scheduler and
                                                                 # csv_monitor are left to the config, which it names
shardwise config run.yaml --from-deepspeed ds_config.json ranks=8
```

Every key of DeepSpeed's config is in one of three states here:

- **honoured**: it becomes a setting of ours, with the same meaning;
- **no effect**: nothing here depends on it, for the reason given;
- **refused**: it asks for what is not here. The run does not start; a value that switches the thing off passes.

An unknown key is refused with the nearest known name. `"auto"` takes RUN.yaml's value, else our default, and the value
is shown. Where RUN.yaml and the config contradict each other the run does not start; the command line has the last
word. What the config leaves out takes DeepSpeed's default (no weight decay, betas 0.9 and 0.999, a constant rate, fp32,
stage 0) where RUN.yaml is silent too.

`train_batch_size` = `train_micro_batch_size_per_gpu` × `gradient_accumulation_steps` × ranks that see different data:
any two give the third, `train_batch_size` or the micro-batch alone gives the rest with one round of accumulation, and
three are checked.

One thing differs from DeepSpeed by design in `shardwise train`: an update that fp16 skips for an overflow counts as a
step of the schedule. A script's own loop (`shardwise.deepspeed`) follows DeepSpeed: the schedule waits.
"""


def page() -> str:
    """Returns docs/deepspeed.md as Markdown."""
    parts = [INTRODUCTION]
    for title, keys in SECTIONS.items():
        parts.append(f"## {title}\n\n| key | here | what becomes of it |\n| --- | --- | --- |")
        parts += [_row(key) for key in keys]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _row(key: Key) -> str:
    note = f"{key.note}. Instead: {key.remedy}" if key.verdict == "refused" else key.note
    return f"| `{key.path}` | {key.verdict} | {note.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    print(page(), end="")
