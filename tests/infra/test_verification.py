"""A run that is whole is found whole, and whatever is wrong with one is named."""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonshift.core.config import identity_hash, load_config, to_json
from moonshift.core.errors import LedgerError
from moonshift.infra import snapshots
from moonshift.infra.ledger import Lease, RunState, StageCommit
from moonshift.infra.run_config import CONFIG_EVENT
from moonshift.infra.verification import Kind, findings, scope, verify

from .small_run import RUN, SETTINGS, Make, NewLedger, Small, maker


@pytest.fixture
def make(tmp_path: Path, new_ledger: NewLedger) -> Iterator[Make]:
    with maker(tmp_path, new_ledger) as made:
        yield made


@pytest.fixture
def run(make: Make) -> Small:
    """A completed run that has told MLflow everything."""
    small = make()
    small.begin()
    small.end()
    small.sent()
    return small


def test_a_whole_run_is_found_whole(run: Small) -> None:
    assert run.found() == []
    assert scope(run.ledger, RUN) == "4 steps, 25 stages, 16 samples, 56 metric points, 1 checkpoints"


def test_a_run_is_whole_at_every_commit_on_its_way(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    small = make()
    assert small.found() == []
    commit = small.ledger.commit_stage

    def checked(lease: Lease, given: StageCommit) -> None:
        commit(lease, given)
        assert small.found() == [], f"after {given.name} of step {given.step}"

    monkeypatch.setattr(small.ledger, "commit_stage", checked)
    small.begin()
    small.end()


def flip(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])


@pytest.mark.parametrize(
    "place",
    ["stages/step-0000/validate", "stages/step-0001/rollout", "stages/step-0003/score", "stages/step-0004/update"],
)
def test_one_changed_byte_or_a_lost_file_of_a_stage_is_named(run: Small, place: str) -> None:
    file = run.folder / place / "part" / "data.bin"
    flip(file)
    assert [kind for kind, text in run.found() if place in text] == [Kind.STAGE]
    file.unlink()
    assert [kind for kind, text in run.found() if place in text] == [Kind.STAGE]
    shutil.rmtree(run.folder / place)
    [(kind, text)] = run.found()
    assert kind is Kind.STAGE and place in text and "no such folder" in text


def test_every_file_of_a_checkpoint_counts(run: Small) -> None:
    place = run.folder / "checkpoints" / "step-000004"
    for name in ("part/data.bin", "manifest.json"):
        flip(place / name)
        [(kind, text)] = run.found()
        assert kind is Kind.CHECKPOINT and name in text
        flip(place / name)
    (place / "more.json").write_text("{}")
    [(kind, text)] = run.found()
    assert kind is Kind.CHECKPOINT and "digest of the stage" in text
    shutil.rmtree(place)
    kinds = run.found()
    assert [kind for kind, _ in kinds] == [Kind.CHECKPOINT, *[Kind.STAGE] * 8], "no checkpoint covers the redo logs"


def test_a_manifest_written_anew_over_changed_files_is_found_out(run: Small) -> None:
    place = run.folder / "checkpoints" / "step-000004"
    flip(place / "part" / "data.bin")
    (place / "manifest.json").unlink()
    snapshots.seal(place, step=4, identity=identity_hash(run.config))
    texts = [text for _, text in run.found()]
    assert "manifest.json, SHA-256" in texts[0] and "digest of the stage" in texts[1] and len(texts) == 2


def test_a_redo_log_that_a_replay_needs_must_be_there(make: Make) -> None:
    small = make()
    small.begin()
    assert small.found() == []
    shutil.rmtree(small.folder / "stages" / "step-0003" / "advantage")
    [(kind, text)] = small.found()
    assert kind is Kind.STAGE and "step-0003/advantage" in text


DAMAGE = {
    "update runs set config_json = replace(config_json, '\"seed\":0', '\"seed\":1')": (Kind.CONFIG, "config_json"),
    "delete from steps where step = 2": (Kind.STEPS, "step 2: expected a committed step"),
    "update steps set step = 9 where step = 4": (Kind.STEPS, "step 4: expected a committed step"),
    "update steps set policy_version = 1 where step = 2": (Kind.STEPS, "expected policy version 2"),
    "delete from stages where step = 1 and name = 'score'": (Kind.STEPS, "a committed stage score"),
    "delete from stages where step = 0": (Kind.STEPS, "a committed stage validate"),
    "delete from stages where step = 2 and name = 'validate'": (Kind.STEPS, "a committed stage validate"),
    "delete from stages where step = 4 and name = 'checkpoint'": (Kind.STEPS, "a committed stage checkpoint"),
    "update stages set name = 'other' where step = 3 and name = 'update'": (Kind.STEPS, "stage other of step 3"),
    "delete from samples where step = 1 and uid = 'sums:1' and sample_index = 1": (Kind.SAMPLES, "uid sums:1"),
    "delete from samples where step = 1": (Kind.SAMPLES, "expected 4 rows"),
    "update samples set sample_index = 5 where step = 2 and sample_index = 1": (Kind.SAMPLES, "sample indices 0 to 1"),
    "update samples set uid = 'sums:7' where epoch = 0 and uid = 'sums:2'": (Kind.SAMPLES, "of the 4 prompts"),
    "update samples set epoch = 0, uid = 'sums:8' where step = 4 and epoch = 2 and uid = 'sums:0'": (
        Kind.SAMPLES,
        "epoch 1 or later, found epoch 0",
    ),
    "update metrics_outbox set value = 7 where key = 'critic/score/mean' and step = 2": (Kind.METRICS, "found 7.0"),
    "update metrics_outbox set value_text = 'inf' where key = 'critic/odd' and step = 2": (
        Kind.METRICS,
        "expected nan",
    ),
    "delete from metrics_outbox where key = 'timing_s/rollout' and step = 3": (
        Kind.METRICS,
        "timing_s/rollout of step 3",
    ),
    "update metrics_outbox set step = 5 where key = 'critic/score/mean' and step = 4": (
        Kind.METRICS,
        "no stage measured",
    ),
    "update checkpoints set manifest_sha256 = 'x' where step = 4": (Kind.CHECKPOINT, "manifest.json, SHA-256"),
    "update checkpoints set bytes = 1 where step = 4": (Kind.CHECKPOINT, "bytes"),
    "update checkpoints set state = 'kept'": (Kind.CHECKPOINT, "step 2: expected files"),
    "update checkpoints set state = 'deleted'": (Kind.CHECKPOINT, "a row of the ledger"),
    "update stages set digest = 'x' where step = 3 and name = 'rollout'": (
        Kind.STAGE,
        "input_digest of score of step 3",
    ),
    "update stages set input_digest = 'x' where step = 1 and name = 'update'": (Kind.STAGE, "input_digest of update"),
    "update stages set path = '../../x' where step = 1 and name = 'update'": (Kind.STAGE, "a folder of the run"),
    "update metrics_outbox set sent = false where step = 3": (Kind.UNSENT, "moonshift sync small-0001"),
}


@pytest.mark.parametrize("statement", DAMAGE)
def test_a_row_that_was_changed_lost_or_put_in_is_named(run: Small, statement: str) -> None:
    kind, words = DAMAGE[statement]
    run.sql(statement)
    found = run.found()
    assert kind in {each for each, _ in found}
    assert any(each is kind and words in text for each, text in found), found


def test_the_first_finding_stops_before_the_costly_checks(run: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    run.sql("delete from steps where step = 2")
    monkeypatch.setattr(snapshots, "verify", lambda folder: pytest.fail(f"{folder} was read"))
    first = next(findings(run.ledger, RUN, run.home))
    assert (first.kind, first.found) == (Kind.STEPS, "none")


def test_optimizer_steps_are_those_of_the_plan(make: Make) -> None:
    whole = make()
    whole.step(1)
    whole.step(2, optimizer_steps=1, skipped=1.0)
    assert [kind for kind, _ in whole.found() if kind is Kind.OPTIMIZER] == []
    lost, double = make(), make()
    lost.step(1)
    lost.step(2, optimizer_steps=1)
    assert "expected 4 (2 before, 2 planned, 0 skipped), found 3" in dict(lost.found())[Kind.OPTIMIZER]
    double.step(1, optimizer_steps=4)
    assert "expected 2 (0 before, 2 planned, 0 skipped), found 4" in dict(double.found())[Kind.OPTIMIZER]


def test_a_completed_run_with_too_few_optimizer_steps_is_named(make: Make) -> None:
    small = make()
    small.begin()
    small.step(4, optimizer_steps=1, skipped=1.0)
    small.stage(4, "validate")
    small.checkpoint(4)
    small.ledger.release(small.lease, RunState.COMPLETED)
    small.sent()
    [(kind, text)] = small.found()
    assert kind is Kind.OPTIMIZER and "expected 8 in a run that is COMPLETED, found 7" in text


def test_dynamic_sampling_is_counted_by_what_it_drew(make: Make) -> None:
    small = make(algorithm__filter_groups__enable=True, trainer__save_freq=-1, trainer__test_freq=-1)
    small.stage(0, "validate")
    for step in (1, 2, 3):
        small.step(step, again=True, optimizer_steps=1)
    assert small.found() == []
    small.sql("delete from samples where step = 2 and epoch = 1 and uid = 'sums:2'")
    assert any(
        kind is Kind.SAMPLES and "expected 6 rows (3 prompts × 2 responses)" in text for kind, text in small.found()
    )
    small.sql("delete from stages where step = 3 and name = 'select'")
    assert any("a committed stage select" in text for _, text in small.found())


def test_a_resumed_run_may_save_at_other_steps(make: Make) -> None:
    small = make()
    small.stage(0, "validate")
    later = load_config(None, (), environ={}, code=SETTINGS | {"trainer.save_freq": -1, "trainer.test_freq": 3}).config
    for step in (1, 2, 3):
        small.step(step)
    assert [kind for kind, _ in small.found()] == [Kind.STEPS] * 2, "checkpoint and validation after step 2"
    small.ledger.event(RUN, CONFIG_EVENT, {"json": to_json(later, masked=True)})
    assert small.found() == []


def test_a_run_of_an_older_schema_has_the_identity_of_its_checkpoints(run: Small) -> None:
    """A version that knows another key hashes the same config to something else."""
    older = to_json(run.config).replace('"gamma":1.0', '"gamma":0.5')
    assert older != to_json(run.config)
    run.sql(f"update runs set config_json = '{older}', config_hash = '{hashlib.sha256(older.encode()).hexdigest()}'")
    assert run.found() == []


def test_an_unknown_run_is_an_error(run: Small) -> None:
    for ask in (lambda: verify(run.ledger, "none-0001", run.home), lambda: scope(run.ledger, "none-0001")):
        with pytest.raises(LedgerError, match="none-0001"):
            ask()


def test_with_weights_a_pass_has_no_prompt_that_the_pass_before_had_not(make: Make) -> None:
    small = make(data__train_weights=[1.0])
    small.begin()
    small.end()
    small.sent()
    assert small.found() == []
    small.sql("update samples set epoch = epoch + 1 where epoch = 0 and uid != 'sums:0'")
    assert any("at most the" in told and "of the pass before" in told for _, told in small.found())
