"""Dynamic sampling: generate again while too few groups tell their samples apart, then keep those that do."""

from pathlib import Path

from moonshift.core.types import StageRef
from moonshift.infra.attempt import Attempt, StageOutput
from moonshift.infra.draws import POSITION, SELECT, part, write_selection

from .policies import stage_task
from .rollout import rollout
from .score import score

Generation = tuple[StageRef, StageRef]


def refilled(attempt: Attempt, step: int, rollouts: StageRef, scores: StageRef) -> Generation:
    """Rollouts and scores to train on: the first generation's as they are, unless groups are filtered."""
    if not attempt.config.algorithm.filter_groups.enable:
        return rollouts, scores
    generations = [(rollouts, scores)]
    buffer = attempt.draws.after(attempt.draws.begin(step), step, 1)
    while buffer.num_to_generate:
        round_ = len(generations) + 1
        more = rollout(attempt, step, round_)
        generations.append((more, score(attempt, step, more, round_)))
        buffer = attempt.draws.after(buffer, step, round_)
    selected = select(attempt, step, generations)
    return part(selected, "rollout"), part(selected, "score")


@stage_task(SELECT)
def select(attempt: Attempt, step: int, generations: list[Generation]) -> StageRef:
    """Write the groups that the step trains on, and those that the next one begins with."""
    buffer = attempt.draws.begin(step)
    drawn = 0
    for round_ in range(1, len(generations) + 1):
        drawn += buffer.num_to_generate
        buffer = attempt.draws.after(buffer, step, round_)

    def work(out: Path) -> StageOutput:
        surplus = attempt.draws.surplus(step) if buffer.carried else None
        folders = [(Path(attempt.path(rollouts)), Path(attempt.path(scores))) for rollouts, scores in generations]
        metrics = write_selection(out, buffer, folders, surplus)
        return StageOutput(metrics=metrics | {POSITION: float(attempt.draws.position(step - 1) + drawn)})

    return attempt.stage(step, SELECT, tuple(ref for generation in generations for ref in generation), work)
