"""Forks of small runs made by hand: what is taken over, what is refused, and what a kill leaves."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import update

from moonshift.core.config import config_from_json, identity_hash, load_config, resume_diff, to_json
from moonshift.core.datasets.sampler import PromptSampler
from moonshift.core.errors import CheckpointError, ConfigError, LedgerError
from moonshift.infra import fork as fork_module
from moonshift.infra import snapshots
from moonshift.infra.completion import check_complete
from moonshift.infra.draws import Draws, Run
from moonshift.infra.files import folder_digest
from moonshift.infra.fork import make_fork
from moonshift.infra.kl_weight import kl_weight
from moonshift.infra.ledger import Ledger, NewRun, RunRecord, RunState
from moonshift.infra.ledger.engine import open_engine
from moonshift.infra.ledger.models import EventRow, RunRow, StageRow
from moonshift.infra.origin import FORK, START, Origin, origin_of, settle
from moonshift.infra.ownership import find_or_create
from moonshift.infra.report import summarize
from moonshift.infra.tracking import lineage_tags
from moonshift.infra.verification import Kind, scope, verify

from .small_run import RUN, SETTINGS, Small

LR = "actor_rollout_ref.actor.optim.lr"
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


class Forkable(Small):
    """A small run whose checkpoints hold what a fork reads, and whose data has the rows that it draws."""

    number = 1

    def stage(self, step: int, name: str, inputs: tuple[str, ...] = (), **given: Any) -> str:
        if name == "checkpoint":
            place = snapshots.folder_of(self.folder / "checkpoints", step)
            place.mkdir(parents=True)
            sampler = {"epoch": self.drawn // 3, "offset": self.drawn % 3, "num_rows": 3, "seed": 0, "batch_size": 2}
            (place / "sampler.json").write_text(json.dumps(sampler))
            (place / "state.json").write_text(json.dumps({"optimizer_steps": self.optimizer_steps, "version": step}))
            (place / "config.yaml").write_text("of its own\n")
        return super().stage(step, name, inputs, **given)

    def take_over(self, run: RunRecord) -> None:
        """Go on with another run of this ledger, as an attempt does."""
        self.lease = self.ledger.acquire(run.run_id, lease_s=600)
        self.folder = self.home / "runs" / run.run_id
        self.config = config_from_json(run.config_json)
        origin = origin_of(self.ledger, run)
        self.drawn, self.optimizer_steps = origin.data_position, origin.optimizer_steps


@pytest.fixture
def parent(
    moonshift_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger_url: str
) -> Iterator[Forkable]:
    """Three of four steps; the checkpoint of step 2 is kept, and the initial policy was warmed up."""
    monkeypatch.setenv("MOONSHIFT_LEDGER_URL", ledger_url)
    prompts = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(3)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    settings = SETTINGS | {
        "run.name": "small",
        "data.train_files": str(tmp_path / "sums.jsonl"),
        "warm_start.files": "sums:?max=9",
        "warm_start.steps": 1,
        "actor_rollout_ref.model.override_config": TINY,
        "actor_rollout_ref.rollout.val_kwargs.n": 1,
    }
    small = Forkable(home=moonshift_home, url=ledger_url, settings=settings)
    with small.ledger:
        small.stage(0, "warm_start")
        small.begin()
        yield small


def runs_folder(small: Small) -> list[str]:
    return sorted(path.name for path in (small.home / "runs").iterdir() if path.name != ".forks.lock")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def go_on(small: Forkable, run: RunRecord) -> None:
    """The fork's own steps 3 and 4."""
    small.take_over(run)
    small.stage(2, "validate", metrics={"val/score/mean": 0.6})
    small.step(3)
    assert found(small, run) == []
    small.step(4)
    small.stage(4, "validate", metrics={"val/score/mean": 0.7})
    small.checkpoint(4)
    small.ledger.release(small.lease, RunState.COMPLETED)
    small.ledger.mark_sent([point.id for point in small.ledger.pending_metrics(run.run_id)])


def found(small: Small, run: RunRecord) -> list[tuple[Kind, str]]:
    return [(finding.kind, str(finding)) for finding in verify(small.ledger, run.run_id, small.home)]


def test_a_fork_is_a_run_of_its_own_with_the_state_of_its_parent(parent: Forkable) -> None:
    before = content(parent.folder)
    made = make_fork(parent.ledger, RUN, 2, (f"{LR}=1e-3",))
    assert (made.run_id, made.parent_run_id, made.base_step, made.steps_planned) == ("small-0002", RUN, 2, 4)
    assert made.state is RunState.CREATED and parent.ledger.last_step("small-0002") == 2
    origin = origin_of(parent.ledger, made)
    assert (origin.data_position, origin.epoch, origin.offset, origin.optimizer_steps) == (4, 1, 1, 4)
    folder = parent.home / "runs" / "small-0002"
    place, manifest = snapshots.newest(folder / "checkpoints") or pytest.fail("no checkpoint")
    config = config_from_json(made.config_json)
    assert (manifest.step, manifest.identity) == (2, identity_hash(config))
    assert config.actor_rollout_ref.actor.optim.lr == 1e-3 and config.run.id is None
    theirs = parent.folder / "checkpoints" / place.name
    assert (place / "part" / "data.bin").samefile(theirs / "part" / "data.bin"), "a hard link"
    assert (theirs / "config.yaml").read_text() == "of its own\n" != (place / "config.yaml").read_text()
    assert origin.initial(folder) == folder / "initial" / "model"
    assert content(folder / "initial") == content(parent.folder / "stages" / "step-0000" / "warm_start")
    assert content(parent.folder) == before
    assert runs_folder(parent) == [RUN, "small-0002"]
    assert lineage_tags(made) == {"moonshift.parent_run_id": RUN, "moonshift.base_step": "2"}
    assert lineage_tags(parent.ledger.run(RUN)) == {}


def test_a_fork_is_whole_on_its_way_and_when_its_parent_is_gone(parent: Forkable) -> None:
    made = make_fork(parent.ledger, RUN, 2, (f"{LR}=1e-3",))
    assert found(parent, made) == []
    go_on(parent, made)
    assert found(parent, made) == []
    assert scope(parent.ledger, made.run_id) == (
        "2 steps, 13 stages, 8 samples, 29 metric points, 1 checkpoints after small-0001@2"
    )
    shutil.rmtree(parent.home / "runs" / RUN)
    assert found(parent, made) == []
    summary = summarize(parent.ledger, made.run_id)
    assert (summary["steps"], summary["optimizer_steps"], summary["base_step"]) == (4, 8, 2)
    assert (summary["eval_before"], summary["eval_after"], summary["parent_run_id"]) == (0.6, 0.7, RUN)


DAMAGE = {
    "delete from events where kind = 'fork'": (Kind.ORIGIN, "1 event(s) fork"),
    "update runs set base_step = 1 where base_step > 0": (Kind.ORIGIN, "base_step"),
    "update runs set parent_run_id = id where base_step > 0": (Kind.ORIGIN, "parent_run_id"),
    "delete from steps where step = 3 and run_id = 'small-0002'": (Kind.STEPS, "step 3: expected a committed step"),
    "update steps set step = 2, policy_version = 2 where step = 3 and run_id = 'small-0002'": (
        Kind.STEPS,
        "steps from 3 to 4",
    ),
    "delete from stages where step = 2 and run_id = 'small-0002'": (Kind.STEPS, "a committed stage validate"),
    "delete from samples where run_id = 'small-0002' and epoch = 1 and uid = 'sums:2'": (Kind.SAMPLES, "of the 2 pro"),
}


@pytest.mark.parametrize("statement", DAMAGE)
def test_what_is_wrong_with_a_fork_is_named(parent: Forkable, statement: str) -> None:
    made = make_fork(parent.ledger, RUN, 2, ())
    go_on(parent, made)
    parent.sql(statement)
    kind, words = DAMAGE[statement]
    assert any(each is kind and words in text for each, text in found(parent, made)), found(parent, made)


@pytest.mark.parametrize(
    ("key", "words"), [("data_position", "epoch and offset"), ("optimizer_steps", "optimizer steps of the parent")]
)
def test_a_changed_event_of_a_fork_is_named(parent: Forkable, key: str, words: str) -> None:
    made = make_fork(parent.ledger, RUN, 2, ())
    go_on(parent, made)
    [event] = parent.ledger.events(made.run_id, FORK)
    changed = event.detail | {key: event.detail[key] + 1}
    parent.update(update(EventRow).filter_by(run_id=made.run_id, kind=FORK).values(detail=changed))
    assert any(kind is Kind.ORIGIN and words in text for kind, text in found(parent, made)), found(parent, made)


def test_a_changed_initial_policy_or_first_checkpoint_is_named(parent: Forkable) -> None:
    made = make_fork(parent.ledger, RUN, 2, ())
    folder = parent.home / "runs" / made.run_id
    for name, kind in (("initial", Kind.ORIGIN), ("checkpoints/step-000002", Kind.CHECKPOINT)):
        more = folder / name / "more.json"
        more.write_text("{}")
        assert [(each, name in text) for each, text in found(parent, made)] == [(kind, True)]
        more.unlink()
    assert found(parent, made) == []


def test_a_step_without_a_whole_checkpoint_is_refused_with_those_there_are(parent: Forkable) -> None:
    for step in (1, 3, 4):
        with pytest.raises(CheckpointError, match=rf"cannot be forked at step {step}.* can be forked at: 2\."):
            make_fork(parent.ledger, RUN, step, ())
    (parent.folder / "checkpoints" / "step-000002" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"state\.json.* can be forked at: none\."):
        make_fork(parent.ledger, RUN, 2, ())
    with pytest.raises(LedgerError, match="none-0001"):
        make_fork(parent.ledger, "none-0001", 2, ())
    assert runs_folder(parent) == [RUN] and len(parent.ledger.runs()) == 1


REFUSED = {
    "actor_rollout_ref.model.path=elsewhere": "",
    "actor_rollout_ref.model.override_config.hidden_size=32": "hidden_size: 16 → 32",
    "warm_start.lr=1": "warm_start.lr: 0.001 → 1",
    "trainer.total_training_steps=2": "to more than 2",
    "algorithm.adv_estimator=gae": "needs a critic",
    "trainer.total_training_steps=null": "no step to make",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_the_weights_do_not_fit_is_refused_and_nothing_is_left(parent: Forkable, override: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=REFUSED[override] or "elsewhere"):
        make_fork(parent.ledger, RUN, 2, (override,))
    assert runs_folder(parent) == [RUN] and len(parent.ledger.runs()) == 1


def test_epochs_do_not_count_the_steps_of_other_batches(parent: Forkable) -> None:
    changed = ("trainer.total_training_steps=null", "trainer.total_epochs=3", "data.train_batch_size=1")
    with pytest.raises(ConfigError, match=r"trainer\.total_training_steps"):
        make_fork(parent.ledger, RUN, 2, changed)
    assert make_fork(parent.ledger, RUN, 2, changed[:2]).steps_planned == 4


@pytest.mark.parametrize("failing", ["_copy_initial", "publish", "folder_digest"])
def test_an_error_on_the_way_leaves_nothing(parent: Forkable, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(fork_module, failing, fails)
    with pytest.raises(OSError, match="the disk is full"):
        make_fork(parent.ledger, RUN, 2, ())
    assert runs_folder(parent) == [RUN] and len(parent.ledger.runs()) == 1


def killed_at(name: str, parent: Forkable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork in a process that dies when `name` of the module is called."""
    number = os.fork()
    if number == 0:
        setattr(fork_module, name, lambda *_: os._exit(9))
        with Ledger.open(parent.url) as ledger:
            make_fork(ledger, RUN, 2, ())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 9


def test_a_kill_before_the_row_leaves_what_the_next_fork_deletes(
    parent: Forkable, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_at("learned_divisors", parent, monkeypatch)
    assert len(parent.ledger.runs()) == 1
    assert [name[:6] for name in runs_folder(parent)] == [".fork-", RUN[:6]]
    assert make_fork(parent.ledger, RUN, 2, ()).run_id == "small-0002"
    assert runs_folder(parent) == [RUN, "small-0002"]


def test_a_kill_after_the_row_leaves_a_run_that_goes_on(parent: Forkable, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fork(parent.ledger, RUN, 2, ())
    kept = folder_digest(parent.home / "runs" / "small-0002")
    calls = SimpleNamespace(count=0)

    def second(origin: Origin, folder: Path) -> None:  # the first call is for the parent
        calls.count += 1
        if calls.count == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(fork_module, "settle", second)
        make_fork(parent.ledger, RUN, 2, ())
    shutil.rmtree(parent.home / "runs" / RUN)
    made, folder = parent.ledger.run("small-0003"), parent.home / "runs" / "small-0003"
    assert not folder.exists()
    make_fork(parent.ledger, "small-0002", 2, ())  # deletes what nobody waits for
    folder.mkdir()
    (folder / "config.yaml").write_text("what `resume` writes first\n")
    for _ in range(2):  # a second time changes nothing
        settle(origin_of(parent.ledger, made), folder)
        (folder / "config.yaml").unlink(missing_ok=True)
        assert folder_digest(folder) == kept
    assert found(parent, made) == []
    assert not list((parent.home / "runs").glob(".fork-*"))


def test_a_fork_of_a_fork_keeps_the_oldest_initial_policy_and_the_position(parent: Forkable) -> None:
    first = make_fork(parent.ledger, RUN, 2, ("run.name=child",))
    again = make_fork(parent.ledger, first.run_id, 2, ())
    assert (first.run_id, again.run_id, again.parent_run_id) == ("child-0001", "child-0002", "child-0001")
    one, two = (origin_of(parent.ledger, run) for run in (first, again))
    assert one.digests["initial"] == two.digests["initial"]
    assert (one.data_position, one.optimizer_steps) == (two.data_position, two.optimizer_steps) == (4, 4)
    go_on(parent, again)
    assert found(parent, again) == []


def test_another_seed_keeps_the_built_model_as_reference(parent: Forkable, monkeypatch: pytest.MonkeyPatch) -> None:
    parent.sql("delete from stages where name = 'warm_start'")  # as if there had been none
    same, other = (make_fork(parent.ledger, RUN, 2, changes) for changes in ((), ("run.seed=7",)))
    assert "initial" not in origin_of(parent.ledger, same).digests
    initial = origin_of(parent.ledger, other).initial(parent.home / "runs" / other.run_id)
    assert initial is not None and other.seed == 7
    built = {place.name: content(place) for place in (parent.home / "models").iterdir() if place.is_dir()}
    assert [kept == content(initial) for kept in built.values()].count(True) == 1 and len(built) == 2


def test_resume_by_name_passes_over_forks(parent: Forkable) -> None:
    make_fork(parent.ledger, RUN, 2, ())
    latest = parent.ledger.latest_run("small", unfinished=True)
    assert latest is not None and latest.run_id == RUN


def test_a_resume_that_changes_the_mathematics_names_the_fork(parent: Forkable) -> None:
    config = load_config(None, (f"{LR}=1e-3",), environ={}, code=parent.settings | {"run.id": RUN}).config
    assert resume_diff(parent.config, config)
    prepared: Any = SimpleNamespace(config=config)
    with pytest.raises(ConfigError, match=rf"(?s){LR}: .*moonshift fork {RUN} --at-step N {LR}="):
        find_or_create(parent.ledger, prepared, True, None)


def test_draws_go_on_from_the_parents_position_in_batches_of_another_size(parent: Forkable) -> None:
    sampler = PromptSampler(num_rows=5, batch_size=2, seed=1, shuffle=True)

    def draws(origin: Origin, batch: int) -> Draws:
        config = load_config(None, (), environ={}, code=parent.settings | {"data.train_batch_size": batch}).config
        run = Run(run_id=RUN, folder=parent.folder, origin=origin)
        return Draws(parent.ledger, run, config, sampler)

    plain = draws(START, 2)
    assert [plain.rows(step, 1) for step in range(1, 9)] == [sampler.indices(step) for step in range(1, 9)]
    origin = Origin(parent_run_id=RUN, step=3, data_position=6)
    assert [draws(origin, 2).rows(step, 1) for step in range(4, 9)] == [sampler.indices(step) for step in range(4, 9)]
    three = draws(origin, 3)
    assert three.position(3) == 6 and three.position(5) == 12
    assert three.rows(4, 1) + three.rows(5, 1) == sampler.stretch(6, 6)


def test_the_adaptive_kl_weight_goes_on_unless_it_was_given(parent: Forkable) -> None:
    adaptive = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"}
    config = load_config(None, (), environ={}, code=parent.settings | adaptive).config
    assert kl_weight(parent.ledger, "other", config, START, 1) == 0.001
    assert kl_weight(parent.ledger, "other", config, Origin(step=2, kl_coef=0.5), 3) == 0.5
    assert kl_weight(parent.ledger, "other", parent.config, START, 1) is None
    metrics = {"actor/reward_kl_penalty_coeff": 0.2, "actor/reward_kl_penalty": 9.0}
    parent.update(update(StageRow).filter_by(step=2, name="advantage").values(metrics=metrics))
    parent.update(update(RunRow).values(config_json=to_json(config)))
    goes_on, begins = (make_fork(parent.ledger, RUN, 2, given) for given in ((), ("algorithm.kl_ctrl.kl_coef=0.001",)))
    origin = origin_of(parent.ledger, goes_on)
    assert origin.kl_coef == kl_weight(parent.ledger, RUN, config, START, 3) == pytest.approx(0.2 * (1 + 0.2 * 4 / 1e4))
    assert kl_weight(parent.ledger, goes_on.run_id, config, origin, 3) == origin.kl_coef
    assert origin_of(parent.ledger, begins).kl_coef is None


def test_a_fork_completes_with_its_parents_optimizer_steps_and_its_own() -> None:
    def taken(count: int) -> int:
        metrics = {"training/optimizer_steps": float(count)}
        ledger = SimpleNamespace(stage=lambda *_: SimpleNamespace(metrics=metrics), metric_series=lambda *_: [])
        actor = SimpleNamespace(optimizer_steps_per_step=2)
        attempt: Any = SimpleNamespace(
            ledger=ledger,
            run_id="small-0002",
            origin=Origin(step=2, optimizer_steps=3),  # one of the parent's four had been skipped
            plan=SimpleNamespace(steps=4, critic_warmup=0, actor=actor, prompts_per_step=2),
            config=load_config(None, (), environ={}, code=SETTINGS).config,
        )
        return check_complete(attempt)

    assert taken(7) == 7
    with pytest.raises(RuntimeError, match="6 of 7 planned"):
        taken(6)


def test_the_ledger_counts_a_forks_steps_from_its_base(parent: Forkable) -> None:
    new = NewRun(name="f", config_json="{}", config_hash="h", seed=0, steps_planned=4)
    for parent_run_id, base, planned in ((None, 2, 4), (RUN, 4, 4), (RUN, -1, 4)):
        with pytest.raises(LedgerError, match="names its parent"):
            parent.ledger.create_run(
                NewRun(**_values(new) | {"parent_run_id": parent_run_id, "base_step": base, "steps_planned": planned})
            )
    run = parent.ledger.create_run(NewRun(**_values(new) | {"parent_run_id": RUN, "base_step": 2}))
    lease = parent.ledger.acquire(run.run_id, lease_s=60)
    assert parent.ledger.last_step(run.run_id) == 2
    with pytest.raises(LedgerError, match="counted from 3"):
        parent.ledger.commit_step(lease, 2, 2)
    parent.ledger.commit_step(lease, 3, 3)
    with pytest.raises(LedgerError, match="3 of its 4 planned steps"):
        parent.ledger.set_run_state(lease, RunState.COMPLETED)
    parent.ledger.commit_step(lease, 4, 4)
    parent.ledger.set_run_state(lease, RunState.COMPLETED)
    with pytest.raises(LedgerError, match="event that says"):
        origin_of(parent.ledger, run)


def _values(new: NewRun) -> dict[str, Any]:
    return {name: getattr(new, name) for name in NewRun.__slots__}


def test_a_ledger_of_the_first_schema_is_brought_up_with_its_runs(ledger_url: str) -> None:
    from alembic import command
    from alembic.config import Config

    from moonshift.infra.ledger import engine as engine_module
    from moonshift.infra.ledger.models import LedgerModel

    engine = open_engine(ledger_url, busy_timeout_s=5)
    config = Config()
    config.set_main_option("script_location", str(engine_module._MIGRATIONS))
    with engine.begin() as connection:
        config.attributes |= {
            "connection": connection,
            "metadata": LedgerModel.metadata,
            "version_table": engine_module.VERSION_TABLE,
        }
        command.upgrade(config, "0001")
        columns = "id, name, state, config_json, config_hash, seed, steps_planned, t0_ms, created_at, updated_at"
        connection.exec_driver_sql(
            f"insert into runs ({columns}) values ('old-0001', 'old', 'FAILED', '{{}}', 'h', 0, 3, 0, 0, 0)"
        )
    engine.dispose()
    with Ledger.open(ledger_url) as ledger:
        run = ledger.run("old-0001")
        assert (run.base_step, run.parent_run_id) == (0, None)
        assert ledger.latest_run("old", unfinished=True) == run
        assert origin_of(ledger, run) == START and FORK not in {event.kind for event in ledger.events("old-0001")}


def test_a_folder_that_is_there_already_is_not_mixed_with_a_forks(tmp_path: Path) -> None:
    for place in (".fork-a/checkpoints", ".fork-a/initial", "f-0001/checkpoints"):
        (tmp_path / place).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"f-0001 already has checkpoints.* waits in .*\.fork-a"):
        settle(Origin(step=2, staged=".fork-a"), tmp_path / "f-0001")
    (tmp_path / "f-0001" / "checkpoints").rename(tmp_path / "away")
    settle(Origin(step=2, staged=".fork-a"), tmp_path / "f-0001")
    assert sorted(path.name for path in (tmp_path / "f-0001").iterdir()) == ["checkpoints", "initial"]
    assert not (tmp_path / ".fork-a").exists()
