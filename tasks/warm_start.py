"""Stage `warm_start`: supervised fine-tuning on worked examples, before the first step."""

from pathlib import Path

from moonshift.core.types import StageRef
from moonshift.infra.attempt import Attempt, StageOutput
from moonshift.infra.workers.orders import WorkedExamples

from .policies import stage_task


@stage_task("warm_start")
def warm_start(attempt: Attempt, step: int = 0) -> StageRef:
    """The fine-tuned model becomes the initial policy and the reference; written as a Hugging Face folder."""

    def work(out: Path) -> StageOutput:
        attempt.roles.model.load(str(attempt.prepared.model_folder), None)
        examples = WorkedExamples(
            prompt_ids=list(attempt.prepared.examples.ids), response_ids=attempt.prepared.example_answers
        )
        return StageOutput(metrics=attempt.roles.model.warm_start(examples, str(out)))

    ref = attempt.stage(step, "warm_start", (), work)
    attempt.initial = Path(attempt.path(ref)) / "model"
    return ref
