"""The rows of the ledger against the plan: steps, stages, samples, optimizer steps and metric points.

Invariant: what is expected comes from the config's plan and from other rows, never from the row that is checked.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator

from ..draws import POSITION, SELECT, TRAINED, round_name
from .facts import Facts, Finding, Kind, row

EACH_STEP = ("rollout", "score", "log_probs", "advantage", "update")
BEFORE = ("warm_start", "validate")
"""Stages before a run's first step."""
BETWEEN = (SELECT, "validate", "checkpoint")
"""Stages of a step that are there in some configs, or after some steps."""
EVERY_STEP_KEYS = ("critic/score/mean", "response_length/mean", "training/global_step", "training/optimizer_steps")


def config(facts: Facts) -> Iterator[Finding]:
    found = hashlib.sha256(facts.run.config_json.encode()).hexdigest()
    if found != facts.run.config_hash:
        yield Finding(
            kind=Kind.CONFIG, where=row("runs", facts, "config_json"), expected=facts.run.config_hash, found=found
        )


def steps(facts: Facts) -> Iterator[Finding]:
    """Steps 1 to n, none missing; all of them in a run that is COMPLETED. Those of a fork follow on its parent's."""
    first = facts.origin.step + 1
    where = row("steps", facts)
    numbers = [step for step, _ in facts.steps]
    end = facts.planned if facts.completed else facts.last
    for step in sorted(set(range(first, end + 1)) - set(numbers)):
        yield Finding(kind=Kind.STEPS, where=f"{where}, step {step}", expected="a committed step", found="none")
    for step, version in facts.steps:
        if not first <= step <= facts.planned:
            expected = f"steps from {first} to {facts.planned}"
            yield Finding(kind=Kind.STEPS, where=where, expected=expected, found=f"step {step}")
        if version != step:
            expected = f"policy version {step}"
            yield Finding(kind=Kind.STEPS, where=f"{where}, step {step}", expected=expected, found=str(version))


def due(facts: Facts) -> Iterator[Finding]:
    """Every stage that the plan asks for; none of a step that could not have begun, none of an unknown name."""
    start = facts.origin.step
    for step, name in facts.stages:
        base, dash, round_ = name.partition("-")
        drawn_again = dash and base in EACH_STEP[:2] and round_.isdecimal()
        known = BEFORE if step == start else (*EACH_STEP, *BETWEEN)
        if (name not in known and not drawn_again) or not start <= step <= facts.last + 1:
            expected = f"stages of steps {start} to {facts.last + 1} that this version knows"
            where = row("stages", facts)
            yield Finding(kind=Kind.STEPS, where=where, expected=expected, found=f"stage {name} of step {step}")
    for step in range(start, facts.last + 1) if facts.last > start else ():
        for name in _stages_due(facts, step):
            if (step, name) not in facts.stages:
                where = row("stages", facts, f"step {step}")
                yield Finding(kind=Kind.STEPS, where=where, expected=f"a committed stage {name}", found="none")


def _stages_due(facts: Facts, step: int) -> Iterator[str]:
    """What a step must have; what comes after the update of the last step may be yet to come."""
    ended = facts.completed or step < facts.last
    first = facts.config
    if step == facts.origin.step:
        if first.warm_start.steps and step == 0:
            yield "warm_start"
        if all(config.data.val_files and config.trainer.val_before_train for config in facts.configs):
            yield "validate"
        return
    yield from EACH_STEP
    if first.algorithm.filter_groups.enable:
        yield SELECT
        rounds = range(2, facts.rounds(step) + 1)
        yield from (round_name(stage, number) for number in rounds for stage in ("rollout", "score"))
    if ended and first.data.val_files and _is_due(facts, step, [config.trainer.test_freq for config in facts.configs]):
        yield "validate"
    if ended and _is_due(facts, step, [config.trainer.save_freq for config in facts.configs]):
        yield "checkpoint"


def _is_due(facts: Facts, step: int, frequencies: list[int]) -> bool:
    """Whether it is due after `step` by every config that the run had: no one knows which one the step ran under."""
    return step == facts.planned or all(frequency > 0 and step % frequency == 0 for frequency in frequencies)


def samples(facts: Facts) -> Iterator[Finding]:
    """Each sample of each prompt of an epoch once, and as many a step as were drawn."""
    for epoch, uid, count in facts.audit.broken_groups(facts.run.run_id, facts.plan.samples_per_prompt):
        where = row("samples", facts, f"epoch {epoch}, uid {uid}")
        expected = f"each of the sample indices 0 to {facts.plan.samples_per_prompt - 1} once in the whole run"
        yield Finding(kind=Kind.SAMPLES, where=where, expected=expected, found=f"{count} rows, or other indices")
    counted = {step: count for step, count, _, _ in facts.audit.sample_steps(facts.run.run_id)}
    for step in sorted(counted.keys() | {step for step, name in facts.stages if name == "score"}):
        drawn = _prompts_drawn(facts, step)
        if drawn is None:
            continue
        planned, found = drawn * facts.plan.samples_per_prompt, counted.get(step, 0)
        if found != planned:
            expected = f"{planned} rows ({drawn} prompts × {facts.plan.samples_per_prompt} responses)"
            where = row("samples", facts, f"step {step}")
            yield Finding(kind=Kind.SAMPLES, where=where, expected=expected, found=f"{found} rows")


def _prompts_drawn(facts: Facts, step: int) -> int | None:
    """Prompts of a step's committed scores; None while dynamic sampling has not said how many it drew."""
    if (step, "score") not in facts.stages:
        return 0
    if not facts.config.algorithm.filter_groups.enable:
        return facts.plan.prompts_per_step
    now, before = facts.stages.get((step, SELECT)), facts.stages.get((step - 1, SELECT))
    if now is None or (before is None and step > facts.origin.step + 1):
        return None
    return int(now.metrics[POSITION] - (before.metrics[POSITION] if before else facts.origin.data_position))


def epochs(facts: Facts) -> Iterator[Finding]:
    """No epoch begins before the one before it has ended, and every ended one has the same prompts: none skipped.

    The prompts of a fork's first epoch that come before its beginning are its parent's.
    """
    origin = facts.origin
    reached = origin.epoch
    for step, _, first, last in facts.audit.sample_steps(facts.run.run_id):
        if first < reached:
            where = row("samples", facts, f"step {step}")
            yield Finding(
                kind=Kind.SAMPLES, where=where, expected=f"epoch {reached} or later", found=f"epoch {first} again"
            )
        reached = max(reached, last)
    each = facts.audit.prompts(facts.run.run_id)
    whole = origin.num_rows or facts.audit.prompts_before(facts.run.run_id, reached)
    for epoch in range(origin.epoch, reached):
        own = whole - origin.offset if epoch == origin.epoch else whole
        if each.get(epoch, 0) != own:
            where = row("samples", facts, f"epoch {epoch}")
            expected = f"each of the {own} prompts of the epochs that have ended"
            yield Finding(kind=Kind.SAMPLES, where=where, expected=expected, found=f"{each.get(epoch, 0)} prompts")


def optimizer(facts: Facts) -> Iterator[Finding]:
    """The counter of optimizer steps, step by step: what the plan takes, less what was skipped and counted."""
    counter = planned = facts.origin.optimizer_steps
    for step in range(facts.origin.step + 1, facts.last + 1):
        update = facts.stages.get((step, "update"))
        if update is None:
            return  # named by `due`
        taken = _planned_steps(facts, step)
        planned += taken
        metrics = update.metrics
        missed = int(metrics.get("actor/skipped_updates", 0) + metrics.get("actor/empty_batches", 0))
        found = int(metrics.get("training/optimizer_steps", -1))
        where = row("stages", facts, f"update of step {step}, metric training/optimizer_steps")
        if found != counter + taken - missed:
            expected = f"{counter + taken - missed} ({counter} before, {taken} planned, {missed} skipped)"
            yield Finding(kind=Kind.OPTIMIZER, where=where, expected=expected, found=str(found))
        counter = found
        if facts.completed and step == facts.planned and counter < planned:
            expected = f"{planned} in a run that is COMPLETED"
            yield Finding(kind=Kind.OPTIMIZER, where=where, expected=expected, found=str(counter))


def _planned_steps(facts: Facts, step: int) -> int:
    """Optimizer steps of the policy in one step."""
    actor, plan = facts.config.actor_rollout_ref.actor, facts.plan
    if step <= plan.critic_warmup:
        return 0
    selected = facts.stages.get((step, SELECT))
    if selected is None:
        return plan.actor.optimizer_steps_per_step
    groups = int(selected.metrics[TRAINED]) or plan.prompts_per_step  # where none had signal, all are trained on
    mini = actor.ppo_mini_batch_size
    return (groups // mini if actor.drop_last else -(-groups // mini)) * actor.ppo_epochs


def metrics(facts: Facts) -> Iterator[Finding]:
    """Every value that a committed stage measured is one point of the outbox, and no other point is there."""
    points = facts.audit.points(facts.run.run_id)
    found = {(step, key): text or repr(value) for step, key, value, text in points}
    twice = [place for place, count in Counter((step, key) for step, key, *_ in points).items() if count > 1]
    for step, key in sorted(twice):
        where = row("metrics_outbox", facts, f"{key} of step {step}")
        yield Finding(kind=Kind.METRICS, where=where, expected="one value", found="several")
    measured = {
        (record.step, key): repr(value) for record in facts.stages.values() for key, value in record.metrics.items()
    }
    for place in sorted(measured.keys() | found.keys()):
        expected, value = measured.get(place), found.get(place)
        if expected != value:
            where = row("metrics_outbox", facts, f"{place[1]} of step {place[0]}")
            told = "no point: no stage measured it" if expected is None else expected
            yield Finding(kind=Kind.METRICS, where=where, expected=told, found=value or "no point")
    for step in range(facts.origin.step + 1, facts.last + 1):
        for key in EVERY_STEP_KEYS:
            if (step, key) not in measured and (step, key) not in found:
                where = row("metrics_outbox", facts, f"{key} of step {step}")
                yield Finding(kind=Kind.METRICS, where=where, expected="a value in every step", found="none")


COUNTS = (config, steps, due, samples, epochs, optimizer, metrics)
