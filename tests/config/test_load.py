"""From RUN.yaml and overrides to a frozen run: values, origins, and one clear message for each mistake."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from support.json_schema import complaints

from shardwise.config import LoadedRun, Run, load_run
from shardwise.config.advanced import as_written
from shardwise.config.json_schema import json_schema
from shardwise.core.errors import UserError

EXAMPLE = """\
# Every kind of value in one file.
model: smollm2-135m-instruct
data:
  train:
    - {path: chat.jsonl, format: chat}
    - docs/*.txt
  eval: 2%
  sequence_length: 1_024
  over_length: drop
train:
  steps: 200
  learning_rate: 2e-4
  betas: [0.9, 0.99]
  schedule: wsd
  warmup: 3%
  decay: 100%
  max_grad_norm: null
  eval_every: 10min
parallel: {zero: 3, dp_shard_size: 2}
precision: fp32
ranks: 4
timeout: 5min
checkpoint: {every: 50, keep: 3}
export: {dtype: bf16}
advanced: {export: {shard_size: 2GiB}}
output: 2025-01-31
"""
SCRATCH = "model: {config: {model_type: x}, tokenizer: t"
SMALL = "model: m\ndata:\n  train: chat.jsonl\n"


def load(folder: Path, text: str, *overrides: str) -> LoadedRun:
    file = folder / "run.yaml"
    file.write_text(text)
    return load_run(file, overrides)


def mistake(folder: Path, text: str, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        load(folder, text, *overrides)
    return caught.value


def test_every_kind_of_value(tmp_path: Path) -> None:
    run = load(tmp_path, EXAMPLE).run
    assert run.model.name == "smollm2-135m-instruct"
    assert [(s.path, s.format) for s in run.data.train] == [("chat.jsonl", "chat"), ("docs/*.txt", "auto")]
    assert run.data.eval == 0.02 and run.data.sequence_length == 1024
    assert run.train.learning_rate == 2e-4 and run.train.betas == (0.9, 0.99) and run.train.max_grad_norm is None
    assert (run.train.warmup.steps(200), run.train.decay.steps(200)) == (6, 200)
    assert run.train.eval_every.seconds == 600 and run.checkpoint.every.steps == 50
    assert run.timeout == 300 and run.export.shard_size == 2 << 30
    assert run.output == "2025-01-31"  # no date
    assert run.train.batch_size == 32  # a default


def test_a_path_a_mapping_a_list_and_a_mixture_are_sources(tmp_path: Path) -> None:
    for given, paths in {"a.jsonl": ["a.jsonl"], "{path: a}": ["a"], "[a, {path: b}]": ["a", "b"]}.items():
        run = load(tmp_path, f"model: m\ndata: {{train: {given}, eval: {given}}}").run
        assert [s.path for s in run.data.train] == paths
        assert not isinstance(run.data.eval, float) and [s.path for s in run.data.eval] == paths


@pytest.mark.parametrize(("text", "share"), [("2%", 0.02), ("0.02", 0.02), ("1e-2", 0.01), ("'5 %'", 0.05), ("0", 0.0)])
def test_eval_as_a_share(tmp_path: Path, text: str, share: float) -> None:
    assert load(tmp_path, SMALL + f"  eval: {text}").run.data.eval == share


def test_a_section_without_a_line_is_its_defaults(tmp_path: Path) -> None:
    run = load(tmp_path, SMALL + "train:\n# steps: 5\nparallel:\n").run
    assert run.train.batch_size == 32 and run.parallel.zero == 2


def test_anchors_and_merges(tmp_path: Path) -> None:
    text = "model: m\ndata: &d {train: a.jsonl, packing: false}\n"
    run = load(tmp_path, text.replace("&d", "") + "train: {<<: {steps: 3, seed: 1}, seed: 2}\n").run
    assert (run.train.steps, run.train.seed) == (3, 2)


def test_dict_and_run_are_accepted(tmp_path: Path) -> None:
    first = load_run({"model": "m", "data": {"train": ["a", {"path": "b"}]}, "train": {"betas": (0.5, 0.6)}})
    again = load_run(first.run)
    assert again.run == first.run
    assert again.origin_of("train.betas") == "given" and again.origin_of("train.eps") == "default"


# --- overrides ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("train.learning_rate=1e-4", "train.learning_rate", 1e-4),
        ("train.max_grad_norm=null", "train.max_grad_norm", None),
        ("train.max_grad_norm=", "train.max_grad_norm", None),
        ("train.betas=[0.8, 0.9]", "train.betas", (0.8, 0.9)),
        ("train.betas.1=0.97", "train.betas", (0.9, 0.97)),
        ("parallel={zero: 1}", "parallel.zero", 1),
        ("parallel={zero: 1}", "parallel.dp_shard_size", None),
        ("parallel=null", "parallel.zero", 2),
        ("model=other", "model.name", "other"),
        ("model.name=other", "model.name", "other"),
        ("output=a=b", "output", "a=b"),
        ("output='7'", "output", "7"),
        (" ranks = 2", "ranks", 2),
        ("advanced.export.shard_size=1MiB", "export.shard_size", 1 << 20),
    ],
)
def test_overrides(tmp_path: Path, override: str, path: str, value: Any) -> None:
    loaded = load(tmp_path, EXAMPLE, override)
    found: Any = loaded.run
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value


def test_overrides_of_sources(tmp_path: Path) -> None:
    def paths(text: str, *overrides: str) -> list[tuple[str, str]]:
        return [(s.path, s.format) for s in load(tmp_path, text, *overrides).run.data.train]

    assert paths(SMALL, "data.train=x.txt") == [("x.txt", "auto")]
    assert paths(SMALL, "data.train=[x.txt, y.txt]") == [("x.txt", "auto"), ("y.txt", "auto")]
    assert paths(SMALL, "data.train.0=x.txt") == [("x.txt", "auto")]
    assert paths(SMALL, "data.train.0.format=chat") == [("chat.jsonl", "chat")]
    assert paths(EXAMPLE, "data.train.1.format=text") == [("chat.jsonl", "chat"), ("docs/*.txt", "text")]
    assert paths(EXAMPLE, "data.train.0.path=z.jsonl")[0] == ("z.jsonl", "chat")


def test_an_override_of_a_method_named_in_short(tmp_path: Path) -> None:
    method: Any = load(tmp_path, SMALL + "\nmethod: lora\n", "method.rank=4").run.method
    assert (method.type, method.rank) == ("lora", 4)


def test_later_overrides_win(tmp_path: Path) -> None:
    assert load(tmp_path, SMALL, "ranks=2", "ranks=3").run.ranks == 3


@pytest.mark.parametrize("text", ["train.steps", "=5", "train.=5", ".steps=5", "--steps 5", "train..steps=1"])
def test_what_is_no_override(tmp_path: Path, text: str) -> None:
    error = mistake(tmp_path, SMALL, text)
    assert (error.field, error.value) == ("override", text) and "train.learning_rate=1e-4" in error.remedy


@pytest.mark.parametrize("key", ["data.train.2", "data.train.-1", "data.train.first", "data.train.2.path"])
def test_index_beyond_a_list(tmp_path: Path, key: str) -> None:
    error = mistake(tmp_path, EXAMPLE, f"{key}=x")
    assert error.field == f"override {key}" and "list of 2" in error.problem and "0 to 1" in error.remedy


# --- origins -----------------------------------------------------------------------------------------------------


def test_origins(tmp_path: Path) -> None:
    loaded = load(tmp_path, EXAMPLE, "train.steps=5", "checkpoint={keep: 4}", "data.train.0=x.jsonl")
    expected = {
        "model.name": "run.yaml:2",
        "data.train.0.path": "command line",
        "data.train.0.format": "default",
        "data.train.1.path": "run.yaml:6",
        "data.train.1.format": "default",
        "data.eval": "run.yaml:7",
        "train.steps": "command line",
        "train.betas": "run.yaml:13",
        "train.eps": "default",
        "parallel.dp_shard_size": "run.yaml:19",
        "checkpoint.keep": "command line",
        "checkpoint.every": "default",  # the file's went with the section that was replaced
        "device": "default",
        "output": "run.yaml:26",
    }
    assert {path: loaded.origin_of(path) for path in expected} == expected


def test_origin_of_a_model_given_on_the_command_line(tmp_path: Path) -> None:
    loaded = load(tmp_path, "model: {name: m, revision: v1}\ndata: {train: a}", "model=other")
    assert loaded.run.model.revision is None
    assert [loaded.origin_of(f"model.{key}") for key in ("name", "revision")] == ["command line", "default"]


def test_origins_of_a_dict() -> None:
    loaded = load_run({"model": "m", "data": {"train": [{"path": "a"}]}})
    assert loaded.origin_of("data.train.0.path") == loaded.origin_of("model.name") == "given"


def test_command_line_prints_every_origin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwise.cli.main import main

    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "run.yaml").write_text(SMALL + "device: cpu\n")
    with pytest.raises(SystemExit) as left:
        main(["config", str(tmp_path / "run.yaml"), "train.seed=3"])
    assert left.value.code == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["model.name"].split()[1:] == ['"m"', "run.yaml:1"]
    assert lines["train.seed"].split()[1:] == ["3", "command", "line"]
    assert lines["parallel.zero"].split()[1:] == ["2", "default"]
    assert "auto: at most 2048 tokens per forward on cpu" in lines["train.micro_batch_size"]


# --- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("addition", "field", "value", "meant"),
    [
        ("tran: {steps: 1}", "tran", {"steps": 1}, "train"),
        ("train: {learning_rat: 1}", "train.learning_rat", 1, "train.learning_rate"),
        ("learning_rate: 1", "learning_rate", 1, "train.learning_rate"),
        ("train: {zero: 1}", "train.zero", 1, "parallel.zero"),
        ("sequence_lenght: 4", "sequence_lenght", 4, "data.sequence_length"),
        ("epoch: 1", "epoch", 1, "train.epochs"),
        ("train: {output: x}", "train.output", "x", "output"),
        ("background: 1", "background", 1, "advanced.async_save"),  # rather than backend, which is nearer by place
        ("lr: 1", "lr", 1, "train.learning_rate"),
        ("export: {max_steps: 7}", "export.max_steps", 7, "train.steps"),
        ("method: {type: lora, rnak: 4}", "method.rnak", 4, "method.rank"),
        ("method: {type: lora, r: 4}", "method.r", 4, "method.rank"),
        ("method: {type: qlora, lora_target_modules: q}", "method.lora_target_modules", "q", "method.target_modules"),
        ("lora_alpha: 32", "lora_alpha", 32, "method.alpha"),
        ("objective: {type: dpo, bta: 1}", "objective.bta", 1, "objective.beta"),  # and not train.betas
    ],
)
def test_unknown_key_names_the_nearest(tmp_path: Path, addition: str, field: str, value: Any, meant: str) -> None:
    error = mistake(tmp_path, SMALL + addition)
    assert (error.field, error.value) == (field, value)
    assert "unknown key (at run.yaml:4)" in error.problem and error.remedy == f"did you mean {meant}?"


def test_unknown_key_in_a_source(tmp_path: Path) -> None:
    error = mistake(tmp_path, "model: m\ndata:\n  train: [a]\n  eval:\n  - path: b\n    formt: chat\n")
    assert (error.field, error.remedy) == ("data.eval.0.formt", "did you mean data.eval.0.format?")
    assert error.problem == "unknown key (at run.yaml:6)"  # one mistake, not one per alternative of the union


def test_unknown_key_far_from_any_lists_the_known(tmp_path: Path) -> None:
    error = mistake(tmp_path, SMALL + "parallel: {xyz: 1}")
    assert error.remedy.startswith("known here: zero, ")


@pytest.mark.parametrize(
    ("addition", "field", "value", "problem", "remedy"),
    [
        ("method: lorra", "method", "lorra", "is not known", "did you mean lora?"),
        ("objective: grpo", "objective", "grpo", "is not known", "did you mean orpo?"),
        ("objective: reward", "objective", "reward", "is not known", "use one of causal, "),
        ("method: 3", "method", 3, "expected a name or a mapping", "use one of full, lora, "),
        ("method: {rank: 4}", "method", None, "no type", "add type: lora or qlora"),
        (
            "method: {type: ia3, rank: 4}",
            "method.rank",
            4,
            "unknown key",
            "rank is a setting of lora and qlora; ia3 takes",
        ),
        ("method: {type: lora, rank: 0}", "method.rank", 0, "at least 1", "method.rank: of the updates"),
        (
            "objective: {type: masked, mlm_probability: 2}",
            "objective.mlm_probability",
            2,
            "below 1",
            "objective.mlm_probability: share of the tokens",
        ),
        ("objective: distill", "objective.teacher", None, "is required", "add objective.teacher"),
        ("objective: {type: distill, teacher: t, cache: true}", "objective.cache", True, "top_k", "set top_k"),
    ],
)
def test_mistakes_in_a_section_of_several_kinds(
    tmp_path: Path, addition: str, field: str, value: Any, problem: str, remedy: str
) -> None:
    error = mistake(tmp_path, SMALL + addition)
    assert (error.field, error.value) == (field, value)
    assert problem in error.problem and error.remedy.startswith(remedy)


def test_unknown_key_on_the_command_line(tmp_path: Path) -> None:
    error = mistake(tmp_path, SMALL, "train.warm_up=5%")
    assert error.problem == "unknown key (on the command line)" and error.remedy == "did you mean train.warmup?"


def test_several_mistakes_are_counted(tmp_path: Path) -> None:
    error = mistake(tmp_path, SMALL + "parallel: {zero: 9}\nranks: -1\nlogg: 1\n")
    assert error.field == "logg" and "(and 2 more mistakes)" in error.problem


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("model: m\nmodel: n\n", "model", "run.yaml:2"),
        ("model: m\ntrain:\n  steps: 1\n  seed: 2\n  steps: 3\n", "train.steps", "run.yaml:5"),
        ("model: m\ntrain: {<<: {seed: 1}, steps: 1, steps: 2}\n", "train.steps", "run.yaml:2"),
    ],
)
def test_duplicate_keys(tmp_path: Path, text: str, field: str, words: str) -> None:
    error = mistake(tmp_path, text)
    assert error.field == field and "given twice" in error.problem and words in error.problem


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model: m\ndata: {train: a\ntrain: {}\n", 3),
        ("model: m\n  data: x\n", 2),
        ("model: m\n\tdata: x\n", 2),
        ("model: 'm\n", 2),
        ("model: m\ndata: *unknown\n", 2),
        ("model: m\ndata: !custom x\n", 2),
        ("model: m\nranks: 0b_\n", 2),
        ("model: m\n---\nmodel: n\n", 2),
    ],
)
def test_yaml_syntax_errors_name_the_line(tmp_path: Path, text: str, line: int) -> None:
    error = mistake(tmp_path, text)
    assert error.field == "RUN.yaml" and error.value == f"{tmp_path}/run.yaml:{line}"
    assert error.problem.startswith("not valid YAML: ")


@pytest.mark.parametrize("key", ["offload.disk", "output", "log.csv"])
def test_an_override_without_a_value(tmp_path: Path, key: str) -> None:
    """An unset variable of the shell must not put a folder back to its default in silence."""
    error = mistake(tmp_path, SMALL, f"{key}=")
    assert error.field == key and "no value" in error.problem


@pytest.mark.parametrize("text", ["", "# nothing\n", "null\n", "- a\n- b\n", "just words\n"])
def test_files_without_settings(tmp_path: Path, text: str) -> None:
    error = mistake(tmp_path, text)
    assert error.field == "RUN.yaml" and "model: smollm2-135m-instruct" in error.remedy


def test_files_that_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00\x80")
    (tmp_path / "control.yaml").write_text("model: \x01\n")
    for name, words in {
        "": "folder",
        "bytes.yaml": "not UTF-8",
        "control.yaml": "not valid YAML",
        "no": "no such",
    }.items():
        with pytest.raises(UserError) as caught:
            load_run(tmp_path / name)
        assert caught.value.field == "RUN.yaml" and words in caught.value.problem


def test_a_missing_file_names_a_similar_one(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(SMALL)
    with pytest.raises(UserError) as caught:
        load_run(tmp_path / "rum.yaml")
    assert caught.value.remedy == f"did you mean {tmp_path / 'run.yaml'}?"
    with pytest.raises(UserError) as caught:
        load_run(tmp_path / "nofile.yaml")  # alike in the ending alone
    assert "did you mean" not in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "field", "value", "problem", "remedy"),
    [
        ("data: {train: a}", "model", None, "is required, but", "model: smollm2"),
        ("model: m", "data", None, "is required, but", "data: {train: chat.jsonl}"),
        ("model: m\ndata: {packing: true}", "data.train", None, "is required, but", "data: {train: chat.jsonl}"),
        ("model: m\ndata: chat.jsonl", "data", "chat.jsonl", "expected a section", "data: {train: chat.jsonl}"),
        (SMALL + "train: 100", "train", 100, "expected a section", "steps, epochs, batch_size"),
        (SMALL + "parallel: {zero: 5}", "parallel.zero", 5, "at most 3", "ZeRO stage"),
        (SMALL + "parallel: {zero: yes}", "parallel.zero", True, "not true or false", "ZeRO stage"),
        (SMALL + "train: {steps: many}", "train.steps", "many", "expected a whole number", "optimizer steps"),
        (SMALL + "train: {steps: 1.5}", "train.steps", 1.5, "expected a whole number", "optimizer steps"),
        (SMALL + "train: {betas: [0.9]}", "train.betas", [0.9], "too few", "[0.9, 0.95]"),
        (SMALL + "train: {learning_rate: .nan}", "train.learning_rate", None, "finite", "2e-5"),
        (SMALL + "train: {schedule: step}", "train.schedule", "step", "'cosine'", "use one of"),
        (SMALL + "train: {micro_batch_size: x}", "train.micro_batch_size", "x", "or a whole number", "or auto"),
        (SMALL + "  eval: 150%", "data.eval", "150%", "below 1", "share held out"),
        (SMALL + "  eval: null", "data.eval", None, "expected a path", "share held out"),
        ("model: m\ndata: {train: []}", "data.train", [], "empty", "a path, or a list"),
        ("model: m\ndata: {train: [5]}", "data.train.0", 5, "expected a section", "path, name, format"),
        ("model: m\ndata: {train: ''}", "data.train.0.path", "", "is empty", "glob"),
        (SMALL + "timeout: 10 hours", "timeout", "10 hours", "unknown unit 'hours'", "10min"),
        (SMALL + "output: 5", "output", 5, "expected text", "folder"),
        ("model: {}\ndata: {train: a}", "model.name", None, "neither a name nor a config", "model: smollm2"),
        ("model: {name: m, config: {}}\ndata: {train: a}", "model.config", None, "besides", "remove model.name or"),
        ("model: {config: {a: 1}}\ndata: {train: a}", "model.config.model_type", None, "is needed", "llama"),
        ("model: {config: {model_type: x}}\ndata: {train: a}", "model.tokenizer", None, "from scratch", "tokenizer: s"),
        (SMALL + "parallel: {zero: three}", "parallel.zero", "three", "expected a whole number", "ZeRO stage"),
        (SMALL + "parallel: {quantize_weights: maybe}", "parallel.quantize_weights", "maybe", "true or false", "qwZ"),
        (SMALL + "train: {optimizer: adam_mini}", "train.optimizer", "adam_mini", "'adamw'", "did you mean adam-mini?"),
        (SMALL + "train: {schedule: cosin}", "train.schedule", "cosin", "'cosine'", "did you mean cosine?"),
        (SMALL + "precision: bfloat16", "precision", "bfloat16", "'bf16'", "did you mean bf16?"),
        (SMALL + "offload: {ratio: half}", "offload.ratio", "half", "'auto' or a share", "0 to 1 or e.g. 50%"),
        (SMALL + "offload: {disk: ''}", "offload.disk", "", "is empty", "folder for"),
        (SMALL + "advanced: {bucket: 1}", "advanced.bucket", 1, "a bare number is bytes", "200MB"),
        (SCRATCH + ", revision: r}\ndata: {train: a}", "model.revision", "r", "no meaning", "remove"),
    ],
)  # fmt: skip
def test_mistakes(tmp_path: Path, text: str, field: str, value: Any, problem: str, remedy: str) -> None:
    error = mistake(tmp_path, text)
    assert error.field == field and problem in error.problem and remedy in error.remedy
    assert value is None or error.value == value
    assert str(error).count("\n  → ") == 1


def test_a_long_value_is_shown_by_both_ends() -> None:
    place = "/data" + "/folder" * 40 + "/chat.jsonl:17"
    text = str(UserError("data.train.0", place, "bad", "mend it"))
    assert "'/data/folder" in text and "chat.jsonl:17'" in text and len(text) < 200


# --- what the rest of the program relies on ----------------------------------------------------------------------


def test_config_is_frozen(tmp_path: Path) -> None:
    run: Any = load(tmp_path, EXAMPLE).run
    for section, key in [(run, "ranks"), (run.train, "steps"), (run.data.train[0], "path")]:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, key, 1)


@pytest.mark.parametrize("text", [EXAMPLE, SMALL, SMALL + "  eval: [h.jsonl]\ntrain: {warmup: 0.0, epochs: 1.5}\n"])
def test_dump_and_load_give_the_same_run(tmp_path: Path, text: str) -> None:
    run = load(tmp_path, text).run
    dumped = json.loads(json.dumps(run.model_dump(mode="json")))
    again = Run.model_validate(dumped)
    assert again == run
    assert again.model_dump(mode="json") == dumped
    assert load_run(run.model_dump()).run == run


def _as_editors_read(text: str) -> Any:
    """YAML 1.2, as editors check it: 2e-4 and 1_024 are what our loader takes them for."""
    from shardwise.config.load import _Loader

    return yaml.load(text, _Loader)


def test_schema_accepts_what_is_documented(tmp_path: Path) -> None:
    from shardwise.demo.play import RUN

    schema = json_schema()
    demo = RUN.format(name="run.yaml", pairs="pairs.jsonl", epochs=3, ranks=2, output="out", save=20)
    short = (SMALL.replace("chat.jsonl", "{path: a}"), SMALL + "  eval: [a, {path: b}]\n")
    for text in (EXAMPLE, SMALL, demo, *short):
        load(tmp_path, text)
        assert complaints(_as_editors_read(text), schema, schema) == []
    dumped = as_written(load(tmp_path, EXAMPLE).run.model_dump(mode="json"))
    del dumped["log"]["csv"]
    assert complaints(dumped, schema, schema) == []


@pytest.mark.parametrize(
    "text",
    [
        "model: m",
        "model: m\ndata: {train: []}",
        "model: m\ndata: {train: [{format: chat}]}",
        SMALL + "tran: {}",
        SMALL + "parallel: {zero: 5}",
        SMALL + "parallel: {dp_shard_size: 0}",
        SMALL + "ranks: many",
        SMALL + "train: {betas: [0.9]}",
        SMALL + "train: {betas: [0.9, 1.5]}",
        SMALL + "train: {epochs: 0}",
        SMALL + "precision: float32",
        SMALL + "train: {schedule: {type: OneCycle}}",
        SMALL + "train: {schedule: {type: WarmupLR, warmup_steps: 3}}",
        SMALL + "advanced: {loss_scale: {minimum: 0}}",
    ],
)
def test_schema_refuses_what_we_refuse(tmp_path: Path, text: str) -> None:
    schema = json_schema()
    mistake(tmp_path, text)
    assert complaints(_as_editors_read(text), schema, schema)


def test_every_setting_is_described() -> None:
    schema = json_schema()
    advanced = schema["properties"]["advanced"]
    for name, section in {"Run": schema, **schema["$defs"], "advanced": advanced, **advanced["properties"]}.items():
        if "properties" not in section:
            continue
        for key, field in section["properties"].items():
            assert field.get("description"), f"{name}.{key} has no description, which is also its remedy"


@pytest.mark.parametrize("warmup", [0, 3, "3%", 0.1, "100%", 1.0])
def test_dumping_warns_of_nothing(warmup: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = load_run({"model": "m", "data": {"train": "a.jsonl"}, "train": {"warmup": warmup}}).run
        assert load_run(run.model_dump()).run == load_run(run.model_dump(mode="json")).run == run


def test_yes_is_no_number(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ndata: {train: d.jsonl}\nrestarts: yes\n")
    with pytest.raises(UserError, match=r"(?s)^restarts = True: expected a number, not true or false.*→ restarts: how"):
        load_run(file)


def test_going_back_needs_somewhere_to_go(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ndata: {train: d.jsonl}\nguard: {nan: back}\ncheckpoint: {every: null}\n")
    with pytest.raises(UserError, match=r"(?s)^guard.nan = 'back': goes back to a checkpoint.*set checkpoint.every"):
        load_run(file)


@pytest.mark.parametrize("name", ["weight", "epochs"])
def test_settings_of_the_mixture_are_refused_for_eval_sources(tmp_path: Path, name: str) -> None:
    """An evaluation reads each row once: they would do nothing."""
    data = {"train": "rows.jsonl", "eval": [{"path": "held.jsonl", name: 2}]}
    with pytest.raises(UserError, match=f"eval.0.{name}: has no effect"):
        load_run({"model": "m", "data": data})


def test_config_shows_of_advanced_what_is_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from shardwise.cli.main import main

    file = tmp_path / "run.yaml"
    file.write_text(SMALL + "device: cpu\nadvanced: {memory: {tiled_mlp: 64}}\n")

    def shown(*options: str) -> str:
        with pytest.raises(SystemExit) as left:
            main(["config", str(file), *options])
        assert not left.value.code
        return capsys.readouterr().out

    plain = shown()
    assert "advanced.memory.tiled_mlp" in plain and plain.count("advanced.") == 1 and "35 settings" in plain
    assert "advanced.bucket" in shown("--advanced") and "parallel.bucket" not in shown("--advanced")
    values = json.loads(shown("--json"))
    assert values["advanced"]["memory"]["tiled_mlp"] == 64 and "tiled_mlp" not in values
    assert load_run(values).notes == ()
