"""What `shardwise serve` refuses before it starts, how models are named, and how the work is split up."""

from __future__ import annotations

import importlib.util
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.answering import question, running, submit
from support.tiny import LLAMA, saved_model

from shardwise.cli import main as cli
from shardwise.core.errors import UserError
from shardwise.core.network import bind, find_key, is_loopback
from shardwise.nn.generate import Sampling, reply
from shardwise.serve import vllm
from shardwise.serve.command import ServeOptions, serve
from shardwise.serve.models import Served, load_models, shared_bases, split_names
from shardwise.serve.prompts import make_asks
from shardwise.serve.protocol import ChatRequest, parse
from shardwise.serve.rate import Rate, parse_rate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_model(tmp_path_factory.mktemp("m") / "tiny", LLAMA)


def test_an_open_door_needs_a_key_or_a_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "10.0.0.1", "host.example")] == [
        True, True, True, False, False, False, False,
    ]  # fmt: skip
    with pytest.raises(UserError, match="anyone on the network"):
        serve(ServeOptions(["nothing"], host="0.0.0.0"))
    nothing = [str(tmp_path)]
    for options in (ServeOptions(nothing, host="0.0.0.0", port=0, open=True), ServeOptions(nothing, port=0)):
        with pytest.raises(UserError, match=r"has no config\.json"):  # past the door
            serve(options)
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(UserError, match="holds no key"):
        find_key("NO_KEY")


def test_a_port_that_is_taken() -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(UserError, match="in use"):
        bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UserError):
        bind("256.1.1.1", 0)
    if socket.has_ipv6:
        bind("::1", 0).close()


def test_without_the_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "uvicorn" else find(name, *a))
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", "nothing"])
    assert left.value.code == 2
    assert "pip install 'shardwise[serve]'" in capsys.readouterr().err


def test_names(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "a=b").mkdir()
    assert split_names(["org/model", f"{tmp_path}/run", f"{tmp_path}/a=b", "x=org/other"], None) == {
        "org/model": "org/model", "run": f"{tmp_path}/run", "a=b": f"{tmp_path}/a=b", "x": "org/other",
    }  # fmt: skip
    assert split_names(["org/model"], "mine") == {"mine": "org/model"}
    for words, name, problem in ((["a", "b"], "n", "several"), (["a", "a"], None, "taken"), (["=a"], None, "lacks")):
        with pytest.raises(UserError, match=problem):
            split_names(words, name)


def test_rates() -> None:
    assert parse_rate("60/min") == (60, 60.0) and parse_rate(" 5 / s") == (5, 1.0)
    for text in ("60", "0/min", "-1/s", "5/day", "x/min"):
        with pytest.raises(UserError):
            parse_rate(text)
    now = [0.0]
    rate = Rate(2, 60, lambda: now[0])
    assert [rate.allow("a"), rate.allow("a"), rate.allow("a"), rate.allow("b")] == [0, 0, 30, 0]
    now[0] = 29.9
    assert rate.allow("a") == 1, "being refused costs nothing"
    now[0] = 30.0
    assert rate.allow("a") == 0
    assert rate.allow("a") == 30


def test_a_changed_template_is_refused(folder: str, tmp_path: Path) -> None:
    """As `chat` does: the model would be asked in other words than it was trained with."""
    from transformers import AutoTokenizer

    from shardwise.data.fingerprint import write_fingerprint

    place = saved_model(tmp_path / "trained", LLAMA)
    tokenizer = AutoTokenizer.from_pretrained(place)
    write_fingerprint(tmp_path / "trained", tokenizer)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(place)
    with pytest.raises(UserError, match="chat template changed"):
        serve(ServeOptions([place], port=0))


def test_tools_reach_the_template(folder: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + tokenizer.chat_template
    served = Served("tiny", _causal(folder), tokenizer)
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "user", "content": "Hi"},
        ],
        "tools": [{"type": "function", "function": {"name": "look_up", "parameters": {}}}],
    }
    for change, shown in (({}, True), ({"tool_choice": "none"}, False)):
        asks, tokens = make_asks(served, parse(ChatRequest, body | change), 10, 1)
        text = tokenizer.decode(asks[0].prompt)
        assert text.startswith("[look_up]") == shown and "system\nBe brief." in text and tokens == len(asks[0].prompt)


def test_vllm_is_used_where_it_can_be(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"tiny": folder}
    assert not vllm.wanted(ServeOptions([folder]), places)
    with pytest.raises(UserError, match=r"not installed|GPU"):
        vllm.wanted(ServeOptions([folder], engine="vllm"), places)
    with pytest.raises(UserError, match="is not known"):
        vllm.wanted(ServeOptions([folder], engine="tgi"), places)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert vllm.wanted(ServeOptions([folder]), places)
    assert not vllm.wanted(ServeOptions([folder], engine="transformers"), places)
    assert not vllm.wanted(ServeOptions([folder], rate="5/s"), places), "it has no rate: ours has"
    with pytest.raises(UserError, match="does not offer --rate"):
        vllm.wanted(ServeOptions([folder], rate="5/s", engine="vllm"), places)
    with pytest.raises(UserError, match="Hugging Face folder"):
        vllm.wanted(ServeOptions(["x"], engine="vllm"), {"x": "nothing"})
    line = vllm.command_line(ServeOptions([folder], max_concurrent=7, max_tokens=99, port=1), places)
    pairs = dict(zip(line[3::2], line[4::2], strict=True))
    assert pairs["--model"] == folder and pairs["--served-model-name"] == "tiny" and pairs["--max-num-seqs"] == "7"
    assert json.loads(pairs["--override-generation-config"]) == {"max_new_tokens": 99}


def write_adapter(folder: Path, base: str, seed: int) -> dict[str, torch.Tensor]:
    """A LoRA of rank 2 on q_proj, in PEFT's form; returns what it adds to each weight."""
    folder.mkdir()
    model = _causal(base)
    torch.manual_seed(seed)
    tensors, added = {}, {}
    for name, weight in model.named_parameters():
        if name.endswith("q_proj.weight"):
            a, b = torch.randn(2, weight.shape[1]), torch.randn(weight.shape[0], 2)
            key = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
            added[name] = (b @ a) * 2
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
    return added


def _causal(place: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(place).eval()


def test_which_models_share_a_base(folder: str, tmp_path: Path) -> None:
    one, two, alone = (str(tmp_path / name) for name in ("one", "two", "alone"))
    for place in (one, two):
        write_adapter(Path(place), folder, 0)
    Path(alone).mkdir()
    Path(alone, "adapter_config.json").write_text('{"base_model_name_or_path": "org/other"}')
    assert shared_bases({"1": one, "2": two, "3": alone, "4": "x"}) == {one: folder, two: folder}
    assert shared_bases({"1": one, "b": folder}) == {one: folder, folder: folder}
    assert shared_bases({"1": one, "3": alone}) == {}
    Path(alone, "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="names no base"):
        shared_bases({"3": alone})


def test_adapters_on_one_base_answer_under_their_own_names(folder: str, tmp_path: Path) -> None:
    """At the same time, as the merged models would alone."""
    pytest.importorskip("shardwise.nn.adapters.library")
    from shardwise.export.inference import load_for_inference

    loads: list[str] = []

    def load(place: str) -> tuple[Any, Any]:
        loads.append(place)
        return load_for_inference(place)

    added = {name: write_adapter(tmp_path / name, folder, seed) for seed, name in enumerate(("one", "two"))}
    models = load_models({"base": folder, **{n: str(tmp_path / n) for n in added}}, False, load)
    assert loads == [folder]
    expected = {}
    sampling = Sampling(max_tokens=24)
    for served in models:
        merged = _causal(folder)
        for name, delta in added.get(served.name, {}).items():
            merged.get_parameter(name).data += delta
        talk = [{"role": "user", "content": "Hi"}]
        expected[served.name] = reply(merged, served.tokenizer, talk, sampling).text
    assert len(set(expected.values())) == 3
    with running(*models) as engine:
        asked = [(served.name, submit(engine, question(served, "Hi", sampling))[1]) for served in [*models] * 3]
        for name, listener in asked:
            listener.end()
            assert listener.text == expected[name]
