"""Renamed settings, options and commands: the old name does what the new one does, with a note, for one release."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import cli
from support.tiny import LLAMA, saved_model, tiny_run

from shardwise.checkpoint.integrity import MANIFEST, digest_file, read_manifest, write_manifest
from shardwise.cli.renamed import RENAMED_OPTIONS
from shardwise.config import Run, load_run
from shardwise.config.advanced import ADVANCED, FORMER_PLACES, as_written
from shardwise.config.explain import _keys_at
from shardwise.config.methods import METHODS
from shardwise.config.objectives import OBJECTIVES
from shardwise.config.paths import place
from shardwise.config.renamed import RENAMED, read_saved, rename
from shardwise.core.errors import UserError
from shardwise.train.describe import changed_settings
from shardwise.train.describe_method import check_same_method

# Old name: a value that is not the default, and what it cannot be given without.
EXAMPLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "apart.meet": ("10.0.0.1:29400", {}),
    "apart.every": (20, {"apart.meet": "10.0.0.1:29400"}),
    "apart.patience": ("5min", {"apart.meet": "10.0.0.1:29400"}),
    "apart": ("10.0.0.1:29400", {}),
    "parallel.shard": (2, {}),
    "parallel.secondary_shard": (2, {"parallel.zero": 3}),
    "parallel.gradient_feedback": (False, {"parallel.quantize_gradients": True}),
    "parallel.reduce": ("bf16", {}),
    "parallel.schedule": ("gpipe", {"parallel.pipeline": 2}),
    "parallel.chunks": (3, {"parallel.pipeline": 2, "parallel.pipeline_schedule": "interleaved"}),
    "train.masters": ("split", {}),
    "train.in_backward": (True, {}),
    "train.clip": (None, {}),
    "train.stop_early": ({"patience": 2}, {}),
    "train.final_learning_rate": ("10%", {}),
    "loss_scale.growth_every": (7, {}),
    "loss_scale.refill": (True, {}),
    "fp8.keep": ("down_proj", {"fp8.recipe": "rowwise"}),
    "fp8.least": (64, {"fp8.recipe": "rowwise"}),
    "fp8.fast": (True, {"fp8.recipe": "rowwise"}),
    "tile": (64, {}),
    "method.targets": (["q_proj"], {"method.type": "lora"}),
    "method.ranks": ({"*.mlp.*": 8}, {"method.type": "lora"}),
    "method.also": ("lm_head", {"method.type": "ia3"}),
    "method.feedforward": (["down_proj"], {"method.type": "ia3"}),
    "method.double": (False, {"method.type": "qlora"}),
    "objective.share": (0.3, {"objective.type": "masked"}),
    "objective.desirable": (2.0, {"objective.type": "kto"}),
    "objective.undesirable": (2.0, {"objective.type": "kto"}),
    "checkpoint.background": (False, {}),
    "guard.most": (3, {}),
    "log.samples.tokens": (8, {"log.samples.prompts": "Hello"}),
    "train.decay_norms": (True, {}),
    "train.master_weights": ("split", {}),
    "train.optimizer_state": ("bf16", {}),
    "parallel.bucket": ("200MB", {}),
    "parallel.prefetch": (2, {}),
    "parallel.error_feedback": (False, {"parallel.quantize_gradients": True}),
    "parallel.virtual_stages": (3, {"parallel.pipeline": 2, "parallel.pipeline_schedule": "interleaved"}),
    "backend": ("gloo", {}),
    "checkpoint.async_save": (False, {}),
    "loss_scale.initial": (4, {}),
    "loss_scale.growth_interval": (7, {}),
    "loss_scale.hysteresis": (2, {}),
    "loss_scale.consecutive_hysteresis": (True, {}),
    "loss_scale.minimum": (2, {}),
    "recompute_blocks": (2, {"recompute": "full"}),
    "recompute_group": (2, {"recompute": "full"}),
    "recompute_attention": (False, {"recompute": "full"}),
    "offload.activation_blocks": (2, {"offload.activations": "cpu"}),
    "tiled_mlp": (64, {}),
    "attention": ("plain", {}),
    "experts": ("plain", {}),
    "loss": ("plain", {}),
    "fp8.min_features": (64, {"fp8.recipe": "rowwise"}),
    "fp8.use_fast_accum": (True, {"fp8.recipe": "rowwise"}),
    "fp8.gather": ("bf16", {"fp8.recipe": "tensorwise"}),
    "data.packing_window": (100, {}),
    "data.workers": (2, {}),
    "data.refine.similarity": (0.9, {"data.refine.duplicates": "near"}),
    "method.feedforward_modules": (["down_proj"], {"method.type": "ia3"}),
    "method.double_quant": (False, {"method.type": "qlora"}),
    "guard.window": (7, {}),
    "guard.max_recoveries": (3, {}),
    "router.balance": ("micro_batch", {}),
    "export.shard_size": ("2GiB", {}),
    "export.check": (False, {}),
    "log.breakdown": (True, {}),
    "log.comms": (True, {}),
    "log.profile": ([1, 3], {}),
    "diloco.connect_timeout": ("5min", {"diloco.server": "10.0.0.1:29400"}),
}

BACK = {new: old for old, new in RENAMED.items()}
PLACES = {place: path for path, place in ADVANCED.items()}


def written(folder: Path, settings: dict[str, Any]) -> Path:
    values: dict[str, Any] = {"model": "m", "data": {"train": "chat.jsonl"}}
    for path, value in settings.items():
        place(values, path, value)
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return folder / "run.yaml"


def renamed(settings: dict[str, Any]) -> dict[str, Any]:
    return {FORMER_PLACES.get(path, path): value for path, value in settings.items()}


def test_the_table_names_settings_that_exist() -> None:
    assert set(EXAMPLES) == set(FORMER_PLACES)
    kinds = {"method": METHODS, "objective": OBJECTIVES}
    assert not set(ADVANCED) & set(RENAMED)
    for old, new in [*RENAMED.items(), *((new, inside) for inside, new in ADVANCED.items())]:
        *section, leaf = new.split(".")
        known = [key for kind in kinds.get(section[0], {}).values() for key in kind.model_fields] if section else []
        known = known or _keys_at(tuple(section))
        assert leaf in known and (old.rpartition(".")[0] != ".".join(section) or old.rpartition(".")[2] not in known)


def test_the_docs_list_them() -> None:
    page = (Path(__file__).parents[2] / "docs/renamed.md").read_text()
    assert all(f"| `{old}` | `{new}` | " in page for old, new in FORMER_PLACES.items())


@pytest.mark.parametrize("old", EXAMPLES)
def test_an_old_name_gives_the_same_run_with_a_note(old: str, tmp_path: Path) -> None:
    value, company = EXAMPLES[old]
    new = FORMER_PLACES[old]
    wanted = load_run(written(tmp_path / "new", renamed({**company, old: value})))
    loaded = load_run(written(tmp_path / "old", {**company, old: value}))
    assert loaded.run == wanted.run != load_run(written(tmp_path / "plain", renamed(company) or {"ranks": 1})).run
    note = f"{old} is now {new}; the old name works until the next release (run.yaml:"
    assert sum(one.startswith(note) for one in loaded.notes) == 1 and wanted.notes == ()
    inside = PLACES.get(new, new)
    assert loaded.origin_of(inside).startswith("run.yaml:") and (old == inside or old not in loaded.origin)

    raw = yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("...").strip()
    overridden = load_run(written(tmp_path / "override", renamed(company)), [f"{old}={raw}"])
    assert overridden.run == wanted.run and overridden.origin_of(inside) == "command line"
    assert overridden.notes == (f"{old} is now {new}; the old name works until the next release (command line)",)


@pytest.mark.parametrize("old", EXAMPLES)
def test_both_names_at_once_are_refused(old: str, tmp_path: Path) -> None:
    value, company = EXAMPLES[old]
    new = FORMER_PLACES[old]
    both = {**company, old: value, new: value}
    with pytest.raises(UserError, match=f"is the old name of {new}, which is given too"):
        load_run(written(tmp_path, both))
    raw = json.dumps(value)
    with pytest.raises(UserError, match=f"{old}: is the old name of {new}, which is given too"):
        load_run(written(tmp_path, renamed(company)), [f"{new}={raw}", f"{old}={raw}"])


def test_a_section_override_and_the_line_of_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ndata: {train: x}\ntrain:\n  steps: 3\n  clip: none at all\n")
    with pytest.raises(UserError, match=r"train\.max_grad_norm = 'none at all'.*\(at run\.yaml:5\)"):
        load_run(file)
    loaded = load_run(written(tmp_path, {"train.clip": 1.0}), ["train={clip: 2, steps: 5}"])
    assert loaded.run.train.max_grad_norm == 2 and loaded.origin_of("train.max_grad_norm") == "command line"
    assert len(loaded.notes) == 2  # of the file, and of the command line
    newer = load_run(written(tmp_path, {"train.clip": 1.0}), ["train.max_grad_norm=2"])
    assert newer.run.train.max_grad_norm == 2 and len(newer.notes) == 1, "the command line has the last word"
    short = load_run(written(tmp_path, {"apart": "h:1"}), ["diloco.sync_every=5"]).run.diloco
    assert short is not None and (short.server, short.sync_every) == ("h:1", 5)


@pytest.mark.parametrize(("wrong", "meant"), [("clip: 1", "train.max_grad_norm"), ("masters: fp32",
                         "advanced.master_weights"), ("train: {secondary_shard: 2}", "parallel.hpz_size")])  # fmt: skip
def test_an_old_name_in_the_wrong_section_is_told_the_new_one(wrong: str, meant: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model: m\ndata: {{train: x}}\n{wrong}\n")
    with pytest.raises(UserError) as told:
        load_run(file)
    assert told.value.remedy == f"did you mean {meant}?"


def test_a_dict_is_not_changed() -> None:
    given = {"model": "m", "data": {"train": "x"}, "train": {"clip": 2.0}}
    assert load_run(given).run.train.max_grad_norm == 2.0 and given["train"] == {"clip": 2.0}


def test_the_config_of_an_own_loop() -> None:
    from shardwise.train.engine import EngineConfig, _check

    old = {"accumulate": 2, "clip": 0.5, "parallel": {"reduce": "bf16"}, "loss_scale": {"growth_every": 3}}
    new = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "parallel": {"reduce_dtype": "bf16"},
           "loss_scale": {"growth_interval": 3}}  # fmt: skip
    with pytest.warns(FutureWarning, match="clip is now max_grad_norm") as told:
        assert _check(old) == EngineConfig.model_validate(new)
    assert len(told) == 4 and old["accumulate"] == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _check(new) == EngineConfig.model_validate(new)


@pytest.mark.parametrize(("command", "old"), [(c, old) for c, table in RENAMED_OPTIONS.items() for old in table])
def test_old_options(command: str, old: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from shardwise.cli.main import main

    new = RENAMED_OPTIONS[command][old]
    words = [command, *([str(tmp_path / "none.yaml")] if command == "node" else ["--port", "0", "--dtype", "fp64"])]
    for given in ([f"{old}=1"], [old, "1"]):
        with pytest.raises(SystemExit) as left:
            main([*words, *given])
        told = capsys.readouterr().err
        assert left.value.code == 2 and "no such option" not in told.lower()
        assert f"note: {old} is now {new}; the old name works until the next release" in told
    with pytest.raises(SystemExit):
        main([*words, old, "1", new, "1"])
    assert f"is the old name of {new}, which is given too" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert new in shown and f"{old} " not in shown


def test_the_old_command(capsys: pytest.CaptureFixture[str]) -> None:
    from shardwise.cli.main import main

    with pytest.raises(SystemExit) as left:
        main(["meet", "--port", "0", "--rate", "0"])
    told = capsys.readouterr().err
    assert left.value.code == 2 and "--outer-lr = 0.0: must be above 0" in told
    assert "note: shardwise meet is now shardwise diloco-server; the old name works until the next release" in told


def under_old_names(file: Path) -> None:
    """Saved settings as the previous version wrote them; a checkpoint's list of files is kept right."""
    values = json.loads(file.read_text())
    assert rename(values, table=BACK)
    file.write_text(json.dumps(values))
    if (file.parent / MANIFEST).exists():
        files: Any = read_manifest(file.parent)
        write_manifest(file.parent, files | {file.name: digest_file(file)})


def test_saved_settings(tmp_path: Path) -> None:
    method = {"type": "lora", "target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "rank_pattern": {"q*": 2}}
    values = {"method": method, "diloco": "h:1", "train.early_stopping": {"patience": 2}, "data.eval": 0.1}
    run = load_run(written(tmp_path, values)).run
    file = tmp_path / "run.json"
    file.write_text(run.model_dump_json())
    under_old_names(file)
    assert "target_modules" not in file.read_text() and "diloco" not in file.read_text()
    assert Run.model_validate(read_saved(file)) == run
    assert changed_settings(tmp_path, run) == []
    check_same_method(tmp_path, run)
    other = load_run(written(tmp_path, values | {"method": method | {"rank_pattern": {}}})).run
    with pytest.raises(UserError, match="saved by a run with other rank_pattern"):
        check_same_method(tmp_path, other)


@pytest.mark.timeout(300)
def test_a_run_of_the_previous_version_resumes(tmp_path: Path) -> None:
    """Trained under old names, its settings saved under old names: it resumes, exports and is read like any other."""
    from shardwise.evaluate.command import run_of
    from shardwise.export.command import export_folder
    from shardwise.watch.folder import RunFolder

    model = saved_model(tmp_path / "model", LLAMA)
    method = {"type": "lora", "rank": 2, "target_modules": ["q_proj", "v_proj"]}

    def the_run(name: str) -> dict[str, Any]:
        return tiny_run(tmp_path, model, method=method, train__steps=4, train__micro_batch_size=6, checkpoint__every=2,
                        train__batch_size=6, train__schedule="constant", output=str(tmp_path / name))  # fmt: skip

    code, out, err = cli.train(cli.write_run(tmp_path / "a", the_run("whole")))
    assert code == 0 and "is now" not in out + err, out + err
    run = the_run("out")
    rename(run, table=BACK)
    assert run["train"]["clip"] == 0.5 and run["method"]["targets"] == ["q_proj", "v_proj"]
    file = cli.write_run(tmp_path / "b", run)
    code, out, err = cli.train(file, "train.steps=2")
    assert code == 0 and out.count("train.clip is now train.max_grad_norm") == 1, out + err
    assert out.count("method.targets is now method.target_modules") == 1

    checkpoint = tmp_path / "out/checkpoints/step-00000002"
    under_old_names(checkpoint / "run.json")
    under_old_names(tmp_path / "out/model/shardwise_run.json")
    assert run_of(str(tmp_path / "out")) == Run.model_validate(read_saved(checkpoint / "run.json"))
    assert RunFolder(tmp_path / "out", "out").settings()["train.max_grad_norm"] == 0.5
    export_folder(checkpoint, tmp_path / "exported")
    code, out, err = cli.train(file)
    assert code == 0, out + err
    assert cli.losses(tmp_path / "out") == cli.losses(tmp_path / "whole")


def test_advanced_beside_short_forms_and_empty_sections(tmp_path: Path) -> None:
    text = "model: m\ndata: {train: x}\nmethod: qlora\nfp8: rowwise\ntrain:\nadvanced:\n  backend: gloo\n  log:\n"
    text += "  decay_norms: true\n  fp8: {min_features: 16}\n  method: {double_quant: false}\n"
    (tmp_path / "run.yaml").write_text(text)
    loaded = load_run(tmp_path / "run.yaml", ["diloco=h:1", "advanced.diloco.connect_timeout=5min"])
    run = loaded.run
    assert loaded.notes == () and loaded.origin_of("method.double_quant") == "run.yaml:11"
    assert (run.method.type, run.method.double_quant) == ("qlora", False)
    assert (run.fp8.recipe, run.fp8.min_features, run.train.decay_norms, run.backend) == ("rowwise", 16, True, "gloo")
    assert run.diloco is not None and (run.diloco.server, run.diloco.connect_timeout) == ("h:1", 300)
    with pytest.raises(UserError, match="the planner chooses all of it, but bucket is given too"):
        load_run({"model": "m", "data": {"train": "x"}, "parallel": "auto", "advanced": {"bucket": "1MB"}})
    with pytest.raises(UserError, match=r"train = 5: expected a section"):
        load_run({"model": "m", "data": {"train": "x"}, "train": 5, "advanced": {"decay_norms": True}})


def test_a_section_override_in_the_old_place(tmp_path: Path) -> None:
    file = written(tmp_path, {"advanced.bucket": "1MB", "parallel.zero": 1})
    loaded = load_run(file, ["parallel={zero: 3, bucket: 2MB}", "advanced={prefetch: 2}"])
    assert (loaded.run.parallel.zero, loaded.run.parallel.prefetch, loaded.run.parallel.bucket) == (3, 2, "auto")
    loaded = load_run(file, ["advanced={prefetch: 2}", "parallel={zero: 3, bucket: 2MB}"])
    assert (loaded.run.parallel.prefetch, loaded.run.parallel.bucket) == (2, 2_000_000)
    assert len(loaded.notes) == 1 and load_run(loaded.run).run == loaded.run
    with pytest.raises(UserError, match=r"method\.double_quant: is the old name of advanced\.method\.double_quant"):
        load_run(written(tmp_path, {"method": {"type": "qlora", "double": True, "double_quant": True}}))


def test_what_is_dropped_or_left_to_deepspeed(tmp_path: Path) -> None:
    schedule = {"type": "OneCycle", "cycle_min_lr": 1e-5}
    given = {"log.refresh": "500ms", "log.csv": "figures", "train.schedule": schedule}
    loaded = load_run(written(tmp_path, given))
    assert loaded.run.log.csv == "figures" and loaded.run.train.schedule.type == "OneCycle"
    assert [note.partition(" ")[0] for note in loaded.notes] == ["log.refresh", "log.csv", "train.schedule"]
    assert all("until the next release (run.yaml:" in note for note in loaded.notes)
    assert load_run(loaded.run).notes == ()


def test_settings_saved_before_advanced(tmp_path: Path) -> None:
    """Runs save settings where Run has them, as before; what is gone is left out."""
    run = load_run(written(tmp_path, {"advanced.bucket": "1MB", "advanced.memory.tiled_mlp": 64})).run
    values = json.loads(run.model_dump_json())
    assert values["parallel"]["bucket"] == 1_000_000 and values["tiled_mlp"] == 64 and "advanced" not in values
    values["log"]["refresh"] = 0.2
    (tmp_path / "run.json").write_text(json.dumps(values))
    assert Run.model_validate(read_saved(tmp_path / "run.json")) == run
    assert changed_settings(tmp_path, run.model_copy(update={"tiled_mlp": 32})) == ["advanced.memory.tiled_mlp 64 → 32"]
    assert load_run(as_written(run.model_dump())).run == run
