"""The configuration: strict, five layers, YAML 1.2, every fault at once, no secret in what is shown."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshift.core.config import (
    LoadedConfig,
    Provenance,
    all_keys,
    config_from_json,
    config_hash,
    flatten,
    identity_hash,
    load_config,
    mask,
    resume_diff,
    to_json,
    to_yaml,
)
from moonshift.core.config.identity import LENGTH, MATHEMATICS, PLACEMENT
from moonshift.core.config.masking import is_secret
from moonshift.core.config.schema import Config
from moonshift.core.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
REQUIRED = {"data.train_files": "sums:?max=9", "actor_rollout_ref.model.path": "builtin:char-llama"}
MINIMAL = "data: {train_files: 'sums:?max=9'}\nactor_rollout_ref: {model: {path: builtin:char-llama}}\n"
KEYS = [info.key for info in all_keys()]


def load(
    folder: Path, text: str = MINIMAL, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> LoadedConfig:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, overrides, environ=environ or {})


def faults(folder: Path, text: str, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, overrides, environ)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return str(caught.value).replace(f"{folder}/", "")


def made(**changes: Any) -> Config:
    code = REQUIRED | {key.replace("__", "."): value for key, value in changes.items()}
    return load_config(None, environ={}, code=code).config


def test_every_key_has_a_description_and_no_key_is_taken_for_a_secret() -> None:
    assert [info.key for info in all_keys() if len(info.description) < 5] == []
    assert [info.key for info in all_keys() if is_secret(info.key)] == []
    assert {info.key for info in all_keys() if info.required} == set(REQUIRED)
    types = {info.key: info.type for info in all_keys()}
    assert types["trainer.device"] == "auto | cpu | cuda" and types["data.seed"] == "int or none"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_loads_and_is_read_back_from_what_is_written(example: Path, tmp_path: Path) -> None:
    config = load_config(example, environ={}).config
    assert load(tmp_path, to_yaml(config)).config == config
    assert config_from_json(to_json(config)) == config


@pytest.mark.case("C01")
def test_unknown_keys_are_named_with_the_nearest(tmp_path: Path) -> None:
    said = faults(tmp_path, "learning_rate: 1.0e-5\ntraining: {num-epochs: 2}")
    assert "run.yaml:1 learning_rate: unknown key; did you mean actor_rollout_ref.actor.optim.lr" in said
    assert "run.yaml:2 training.num-epochs: unknown key; did you mean trainer.total_epochs" in said
    said = faults(
        tmp_path, MINIMAL, ["trainer.totl_epochs=2", "--config.actor.optim.lr=1"], {"MOONSHIFT__RUN__SED": "1"}
    )
    assert "command line trainer.totl_epochs: unknown key; did you mean trainer.total_epochs?" in said
    assert "command line actor.optim.lr: unknown key; did you mean actor_rollout_ref.actor.optim.lr?" in said
    assert "MOONSHIFT__RUN__SED run.sed: unknown key; did you mean run.seed?" in said


@pytest.mark.case("C02")
def test_yaml_scalars_have_the_type_of_their_key(tmp_path: Path) -> None:
    text = (
        "actor_rollout_ref: {model: {path: builtin:char-llama}}\n"
        "warm_start: {lr: 1e-6, steps: 1e3}\nrun: {name: on, id: 0010, seed: 0x10}\n"
        "data: {train_files: 'sums:?max=9', answer_key: 12:30:00, prompt_key: 2026-01-01, system_prompt: no}\n"
    )
    config = load(tmp_path, text).config
    assert (config.warm_start.lr, config.warm_start.steps) == (1e-6, 1000)
    assert isinstance(config.warm_start.lr, float) and isinstance(config.warm_start.steps, int)
    assert (config.run.name, config.run.id, config.run.seed) == ("on", "0010", 16)
    assert (config.data.answer_key, config.data.prompt_key) == ("12:30:00", "2026-01-01")
    assert config.data.system_prompt == "no"
    assert load(tmp_path, MINIMAL, ["warm_start.lr=1e-6", "trainer.save_freq=1e1"]).config.trainer.save_freq == 10


def test_what_fits_no_type_is_a_fault_that_says_what_to_write(tmp_path: Path) -> None:
    said = faults(
        tmp_path,
        MINIMAL
        + "run: {name: ../x, seed: -1}\nwarm_start: {lr: '1e-6', steps: 2.5, batch_size: 1_000}\n"
        + "trainer: {device: gpu, val_before_train: no, save_freq: true, nnodes: }\n"
        + "tracking: {flush_timeout_s: .inf}\n",
        ["actor_rollout_ref.actor.optim.betas=[0.9, 1.5]", "reward.kwargs={x: [.nan]}", "data.train_files=[]"],
    )
    for line in (
        "run.yaml:3 run.name: is the text '../x'; it must match ",
        "run.yaml:3 run.seed: is -1; it must be at least 0",
        "run.yaml:4 warm_start.lr: is the text '1e-6'; write a number, such as 1e-6, without quotes",
        "run.yaml:4 warm_start.steps: is 2.5; write a whole number",
        "run.yaml:4 warm_start.batch_size: is the text '1_000'; write a whole number",
        "run.yaml:5 trainer.device: is the text 'gpu'; use one of auto, cpu, cuda; did you mean cpu?",
        "run.yaml:5 trainer.val_before_train: is the text 'no'; write true or false",
        "run.yaml:5 trainer.save_freq: is True; write a whole number",
        "run.yaml:5 trainer.nnodes: is empty; write a whole number",
        "run.yaml:6 tracking.flush_timeout_s: is inf; write a finite number",
        "command line actor_rollout_ref.actor.optim.betas: is 1.5 (item 2); it must be less than 1",
        "command line reward.kwargs.x: is not finite; write a finite number",
        "command line data.train_files: is []; name at least one",
    ):
        assert line in said, said
    assert said.startswith("The config has 13 fault(s):")


def test_missing_keys_are_named_with_what_they_are(tmp_path: Path) -> None:
    said = faults(tmp_path, "run: {seed: 1}")
    assert "run.yaml data.train_files: is missing; prompt files" in said
    assert "run.yaml actor_rollout_ref.model.path: is missing; Hugging Face folder" in said


def test_duplicate_keys_are_faults_with_both_lines(tmp_path: Path) -> None:
    said = faults(tmp_path, MINIMAL + "trainer:\n  save_freq: 1\n  test_freq: 1\n  save_freq: 2\nrun: {}\nrun: {}\n")
    assert "run.yaml:6 trainer.save_freq: is given twice; first on line 4" in said
    assert "run.yaml:8 run: is given twice; first on line 7" in said


def test_tags_run_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    said = faults(tmp_path, MINIMAL + f"reward:\n  kwargs:\n    x: !!python/object/apply:os.mkdir ['{marker}']\n")
    assert "run.yaml:5 reward.kwargs.x: the tag !!python/object/apply:os.mkdir is refused" in said
    assert not marker.exists()
    assert "the tag !env is refused" in faults(tmp_path, MINIMAL + "run: {name: !env HOME}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "run.yaml: is empty"),
        ("# nothing\n", "run.yaml: is empty"),
        ("- a\n", "run.yaml:1: holds no mapping"),
        ("5", "run.yaml:1: holds no mapping"),
        ("run:\n  name: a: b\n", "run.yaml:2:10: is not YAML: mapping values are not allowed here"),
        ("run: {name: [1\n", "run.yaml:2:1: is not YAML"),
        ("run: *missing\n", "run.yaml:1:6: is not YAML: found undefined alias"),
        ("run: 1\n--- \nrun: 2\n", "run.yaml:2:1: is not YAML"),
        ("a: 1\nb: \x00\n", "run.yaml:2:4: is not YAML: a character"),
        ("[" * 1000, "run.yaml: is nested too deeply"),
        ("reward: {kwargs: &a {x: [*a]}}\n", "contains itself through an alias"),
        (
            "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
            + "".join(
                f"{new}: &{new} [{','.join(['*' + old] * 10)}]\n" for old, new in zip("abcdef", "bcdefg", strict=True)
            ),
            "unfolds to more than 100000 values",
        ),
        (
            "trainer: 5\n" + MINIMAL,
            "run.yaml:1 trainer: is a section and takes no value; its keys: total_training_steps",
        ),
        ("trainer.save_freq: 5\n" + MINIMAL, "in a file write sections, not dots: trainer: {save_freq: …}"),
        ("run: {<<: {seed: 1}}\n" + MINIMAL, "merge keys are not read"),
        ("xyzzyqq: 1\n" + MINIMAL, "run.yaml:1 xyzzyqq: unknown key; sections: run, data,"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(text: str, said: str, tmp_path: Path) -> None:
    assert said in faults(tmp_path, text)


def test_a_missing_file_a_folder_and_foreign_bytes_are_faults(tmp_path: Path) -> None:
    (tmp_path / "nightly.yaml").write_bytes(b"run: {name: \xff}")
    for name, said in (
        ("nightli.yaml", "did you mean .*nightly.yaml"),
        ("", "cannot be read"),
        ("nightly.yaml", "UTF-8"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config(tmp_path / name, environ={})


def test_later_layers_win_and_say_what_they_overrode(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL + "trainer:\n  save_freq: 1\n", encoding="utf-8")
    command, environ = ["trainer.save_freq=2", "--config.trainer.save_freq=3"], {"MOONSHIFT__TRAINER__SAVE_FREQ": "4"}
    expected = [1, 3, 4, 5]
    calls: list[dict[str, Any]] = [
        {"environ": {}},
        {"overrides": command, "environ": {}},
        {"overrides": command, "environ": environ},
        {"overrides": command, "environ": environ, "code": {"trainer": {"save_freq": 5}}},
    ]
    loaded = [load_config(file, **call) for call in calls]
    assert [item.config.trainer.save_freq for item in loaded] == expected
    told = loaded[-1].provenance["trainer.save_freq"]
    assert (told.source, told.where, told.value) == ("code", "code", 5)
    assert [(below.where, below.value) for below in told.overrode] == [
        ("MOONSHIFT__TRAINER__SAVE_FREQ", 4),
        ("command line", 3),
        ("command line", 2),
        (f"{file}:4", 1),
        ("default", -1),
    ]
    assert loaded[0].provenance["run.seed"] == Provenance(source="default", where="default", value=0)
    assert set(loaded[0].provenance) == set(flatten(loaded[0].config))


def test_names_with_one_underscore_are_no_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONSHIFT_HOME", "/nowhere")
    monkeypatch.setenv("MOONSHIFT__RUN__SEED", "9")
    assert load_config(None, code=REQUIRED).config.run.seed == 9


def test_override_values_are_scalars_or_flow_values(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        MINIMAL + "reward: {kwargs: {a: 1, b: {c: 2}}}\n",
        [
            "data.system_prompt=Answer: yes, or no # not both",
            "data.train_files=[a.jsonl, 'b c.jsonl', sums:?max=9&split=val]",
            "actor_rollout_ref.actor.optim.betas=[0.9, 0.95]",
            "reward.kwargs.b.c=3",
            'run.name="007"',
            "trainer={save_freq: 7, test_freq: 8}",
        ],
    ).config
    assert config.data.system_prompt == "Answer: yes, or no # not both"
    assert config.data.train_files == ("a.jsonl", "b c.jsonl", "sums:?max=9&split=val")
    assert config.actor_rollout_ref.actor.optim.betas == (0.9, 0.95)
    assert config.reward.kwargs == {"a": 1, "b": {"c": 3}}
    assert (config.run.name, config.trainer.save_freq, config.trainer.test_freq) == ("007", 7, 8)
    emptied = load(tmp_path, MINIMAL + "reward: {kwargs: {a: 1}}\n", ["reward.kwargs={}", "data.system_prompt="]).config
    assert emptied.reward.kwargs == {} and emptied.data.system_prompt is None


def test_a_text_that_is_no_override_is_a_fault(tmp_path: Path) -> None:
    said = faults(tmp_path, MINIMAL, ["foo", "=1", "run.seed=[1"])
    assert "command line: 'foo' is no override; write key=value" in said and "'=1' is no override" in said
    assert "command line run.seed: is not YAML: expected ',' or ']'" in said


def test_values_from_code_are_plain() -> None:
    config = made(data__train_files=[Path("a.jsonl")], reward__kwargs={"words": ("a", "b")})
    assert config.data.train_files == ("a.jsonl",) and config.reward.kwargs == {"words": ["a", "b"]}
    with pytest.raises(ConfigError, match=r"code reward\.kwargs\.x: is a set"):
        made(reward__kwargs={"x": {1}})


def test_paths_are_found_beside_the_file_then_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, working = tmp_path / "configs", tmp_path / "work"
    for folder, names in ((beside, ["a.jsonl", "reward.py"]), (working, ["a.jsonl", "b.jsonl"])):
        folder.mkdir()
        for name in names:
            (folder / name).write_text("", encoding="utf-8")
    (beside / "model").mkdir()
    monkeypatch.chdir(working)
    text = (
        "data: {train_files: [a.jsonl, b.jsonl, c.jsonl, sums:?max=9], val_files: a.jsonl}\n"
        "reward: {function: reward.py:score}\nactor_rollout_ref: {model: {path: model}}\n"
    )
    config = load(beside, text).config
    assert config.data.train_files == (f"{beside}/a.jsonl", f"{working}/b.jsonl", "c.jsonl", "sums:?max=9")
    assert config.reward.function == f"{beside}/reward.py:score"
    assert config.actor_rollout_ref.model.path == f"{beside}/model"
    overridden = load(beside, text, ["data.train_files=a.jsonl", "actor_rollout_ref.model.path=org/name"]).config
    assert overridden.data.train_files == (f"{working}/a.jsonl",)
    assert overridden.actor_rollout_ref.model.path == "org/name"


@pytest.mark.filterwarnings("error")
def test_an_anchor_may_be_used_and_set_again(tmp_path: Path) -> None:
    text = MINIMAL + "run: {name: &a first, id: *a}\ntracking: {experiment: &a second}\nreward: {kwargs: {x: *a}}\n"
    config = load(tmp_path, text).config
    assert (config.run.id, config.reward.kwargs) == ("first", {"x": "second"})


def test_nothing_can_be_changed_after_loading() -> None:
    with pytest.raises(ValueError, match="frozen"):
        made().run.seed = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_a_path_that_code_gives_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "mine.py").write_text("")
    config = made(data__train_files=["rows.jsonl"], reward__function="mine.py:score")
    assert config.data.train_files == (str(tmp_path / "rows.jsonl"),)
    assert config.reward.function == f"{tmp_path / 'mine.py'}:score"


def test_flat_keys_unfold_free_mappings() -> None:
    flat = flatten(made(reward__kwargs={"a": {"b": 1}, "c": [1, {"d": 2}]}))
    assert flat["reward.kwargs.a.b"] == 1 and flat["reward.kwargs.c"] == [1, {"d": 2}]
    assert flat["actor_rollout_ref.model.override_config"] == {}


def test_hashes_are_of_the_content_alone(tmp_path: Path) -> None:
    config = made()
    assert config_hash(config) == config_hash(load(tmp_path).config)
    assert config_hash(config_from_json(to_json(config, masked=True))) == config_hash(config)
    assert config_hash(config) != config_hash(made(run__name="other"))
    assert json.loads(to_json(config))["run"]["seed"] == 0
    keys = ("a", "b")
    first, second = (made(reward__kwargs=dict.fromkeys(order, 1)) for order in (keys, keys[::-1]))
    assert to_json(first) == to_json(second)


def test_every_key_is_mathematics_placement_or_length() -> None:
    sections = {".".join(key.split(".")[:length]) for key in KEYS for length in range(1, len(key.split(".")))}
    assert all(entry.removesuffix(".*") in (sections if entry.endswith(".*") else KEYS) for entry in PLACEMENT)
    whole = tuple(entry.removesuffix("*") for entry in PLACEMENT if entry.endswith(".*"))
    placement = {key for key in KEYS if key in PLACEMENT or key.startswith(whole)}
    assert not placement & MATHEMATICS and placement | MATHEMATICS | set(LENGTH) == set(KEYS)
    assert "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size" in placement
    assert "actor_rollout_ref.actor.ppo_mini_batch_size" in MATHEMATICS


@pytest.mark.case("K09")
def test_mathematics_is_fixed_on_resume_and_placement_is_free() -> None:
    old = made(data__train_batch_size=8, actor_rollout_ref__actor__optim__lr=1e-6)
    new = made(data__train_batch_size=16, actor_rollout_ref__actor__optim__lr=5e-7, reward__kwargs={"x": 1})
    assert resume_diff(old, new) == [
        "data.train_batch_size: 8 → 16",
        "actor_rollout_ref.actor.optim.lr: 1e-06 → 5e-07",
        "reward.kwargs: {} → absent",
        "reward.kwargs.x: absent → 1",
    ]
    assert identity_hash(old) != identity_hash(new)
    moved = made(
        data__train_batch_size=8,
        trainer__save_freq=5,
        trainer__device="cpu",
        actor_rollout_ref__rollout__max_num_seqs=4,
        tracking__enabled=False,
        recovery__lease_s=5,
        run__name="other",
    )
    assert resume_diff(old, moved) == [] and identity_hash(old) == identity_hash(moved)


def test_a_run_may_be_lengthened_only_where_the_learning_rate_is_constant() -> None:
    short, long = made(trainer__total_training_steps=10), made(trainer__total_training_steps=20)
    assert resume_diff(short, long) == [] and identity_hash(short) == identity_hash(long)
    assert resume_diff(long, short) == ["trainer.total_training_steps: 20 → 10 (a run may only be lengthened)"]
    assert resume_diff(made(trainer__total_epochs=2), made()) == [
        "trainer.total_epochs: 2 → 1 (a run may only be lengthened)"
    ]
    assert resume_diff(short, made()) == ["trainer.total_training_steps: 10 → None (give it in both or in neither)"]
    cosine = {"actor_rollout_ref__actor__optim__lr_scheduler_type": "cosine"}
    short, long = made(trainer__total_training_steps=10, **cosine), made(trainer__total_training_steps=20, **cosine)
    assert resume_diff(short, long) == ["trainer.total_training_steps: 10 → 20"]
    assert identity_hash(short) != identity_hash(long)


@pytest.mark.case("S03")
def test_secrets_are_in_nothing_that_is_shown() -> None:
    kwargs = {"hub_token": "SECRET1", "env": {"WANDB_API_KEY": "SECRET3"}, "use_cls_token": True, "max_tokens": 4}
    code = REQUIRED | {"reward.kwargs": kwargs, "tracking.mlflow_uri": "http://u:SECRET2@h:5000"}
    loaded = load_config(None, environ={}, code=code)
    config = loaded.config
    flat = [str(mask(key, value)) for key, value in flatten(config).items()]
    shown = [to_yaml(config), to_json(config, masked=True), repr(loaded), str(config), *flat]
    assert [text for text in shown if "SECRET" in text] == []
    assert "use_cls_token: true" in shown[0] and "max_tokens: 4" in shown[0]
    assert "http://u:********@h:5000" in shown[0]
    assert "SECRET2" in to_json(config) and "SECRET3" in to_yaml(config, masked=False)
    rotated = load_config(None, environ={}, code=code | {"reward.kwargs": kwargs | {"hub_token": "new"}}).config
    assert resume_diff(config_from_json(to_json(config, masked=True)), rotated) == []


def test_faults_show_no_secret(tmp_path: Path) -> None:
    said = faults(
        tmp_path,
        MINIMAL + "hub_token: SECRET\n",
        ["tracking.experiment=[http://u:SECRET@h]", "password:SECRET@x", "wandb.api_key=SECRET"],
        {"MOONSHIFT__HF__TOKEN": "SECRET"},
    ).replace("'password:SECRET@x'", "")
    assert "SECRET" not in said and said.count("unknown key") == 3


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("db_password", "x", "********"),
        ("PASSWORD", 12345, "********"),
        ("openaiApiKey", "x", "********"),
        ("aws_secret_access_key", "x", "********"),
        ("private_key", "x", "********"),
        ("token", "x", "********"),
        ("hf_tokens", ["x", "y"], ["********", "********"]),
        ("credentials", {"user": "x"}, {"user": "********"}),
        ("reward.kwargs.secrets.a", "x", "********"),
        ("token", None, None),
        ("use_cls_token", True, True),
        ("pad_token", "<pad>", "<pad>"),
        ("max_tokens", 4, 4),
        ("tokenizer", "gpt2", "gpt2"),
        ("data.prompt_key", "prompt", "prompt"),
        ("url", "postgresql://me:p@ss/w@db:5432/x", "postgresql://me:********@db:5432/x"),
        ("url", "redis://:pw@h", "redis://:********@h"),
        ("url", "https://ghp_x@github.com/a", "https://********@github.com/a"),
        ("url", "http://h:5000/a", "http://h:5000/a"),
        ("url", "http://h/?api_key=x&n=2", "http://h/?api_key=********&n=2"),
        ("files", "sums:?max=99&split=train", "sums:?max=99&split=train"),
        ("list", [{"token": "x"}], [{"token": "********"}]),
    ],
)
def test_masking_goes_by_name_and_url(key: str, value: Any, shown: Any) -> None:
    assert mask(key, value) == shown


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.sampled_from("0123456789eExXoO.+-_:#'\"{}[]&*!|>%@` \n\ttrufalsn~ßé😀"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text("abc0", min_size=1, max_size=3), SCALARS | TEXTS | st.lists(SCALARS | TEXTS, max_size=3), max_size=4
    )
)
def test_any_plain_value_survives_yaml_and_json(
    tmp_path_factory: pytest.TempPathFactory, kwargs: dict[str, Any]
) -> None:
    config = made(reward__kwargs=kwargs)
    assert load(tmp_path_factory.mktemp("config"), to_yaml(config, masked=False)).config == config
    assert config_from_json(to_json(config)) == config


def test_a_stored_config_with_a_strange_key_is_refused() -> None:
    stored = json.loads(to_json(made()))
    stored["trainer"]["old_key"] = 1
    with pytest.raises(ConfigError, match=r"trainer\.old_key"):
        config_from_json(json.dumps(stored))
    with pytest.raises(ConfigError):
        config_from_json("{")


def test_importing_and_loading_take_little_and_pull_in_nothing_heavy() -> None:
    code = (
        "import sys, time; start = time.process_time(); import moonshift.core.config as c;"
        "c.load_config(None, environ={}, code={'data.train_files': 'a', 'actor_rollout_ref.model.path': 'b'});"
        "assert time.process_time() - start < 0.5, time.process_time() - start;"
        "assert not {'torch', 'numpy', 'ray', 'prefect', 'mlflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ), timeout=60)


@pytest.mark.case("L03")
def test_secrets_are_looked_for_in_a_long_text_in_no_time() -> None:
    long = "x" * 1_000_000
    assert mask("data.system_prompt", long) == long
    assert mask("data.system_prompt", f"{long} --hub_token=hf_x, b=c") == f"{long} --hub_token=********, b=c"
