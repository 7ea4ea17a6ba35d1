"""What a model worker is asked to do, as it crosses the process border: ids and sizes, no tensors."""

from dataclasses import dataclass

from moonshift.core.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOrder:
    """What to generate: one entry a prompt, `params.n` seeds a prompt."""

    prompt_ids: list[list[int]]
    uids: list[str]
    epochs: list[int]
    seeds: list[int]
    params: SamplingParams

    def part(self, prompts: range) -> "RolloutOrder":
        """The same of some prompts only."""
        cut, count = slice(prompts.start, prompts.stop), self.params.n
        return RolloutOrder(
            prompt_ids=self.prompt_ids[cut],
            uids=self.uids[cut],
            epochs=self.epochs[cut],
            seeds=self.seeds[prompts.start * count : prompts.stop * count],
            params=self.params,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkedExamples:
    """Prompts and answers for supervised fine-tuning, as ids; one entry an example."""

    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
