"""A rollout in waves, each on the disk once it is whole: who takes the place of a lost worker draws only the rest.

Invariant: a wave depends on its own prompts, seeds and weights alone, and a later try cuts the waves alike. So what is
put together from the waves of two processes is to the last bit what one of them would have made.
"""

from collections.abc import Callable
from pathlib import Path

from moonshift.core.batch import Batch

from ..files import remove


class Waves:
    """The finished waves of one rollout, beside its output; they end with it, or as a leftover of its attempt."""

    def __init__(self, out: Path) -> None:
        self._folder = out.with_name(f".{out.name.removeprefix('.').removesuffix('.tmp')}.waves.tmp")
        self.num_kept = 0
        """prompts that were not generated again"""

    def all(self, prompts: range, size: Callable[[], int], generate: Callable[[range], Batch]) -> Batch:
        """The samples of `prompts`, of which `generate` makes those that no earlier try has.

        `size()`: prompts a wave from now on; it may shrink on the way.
        """
        parts: list[Batch] = []
        start = prompts.start
        while start < prompts.stop:
            found = self._find(start, prompts.stop)
            wave = found or range(start, min(start + size(), prompts.stop))
            if found is None:
                parts.append(generate(wave))
                if wave != prompts:  # a single wave is done with when the rollout is
                    self._keep(wave, parts[-1])
            else:
                parts.append(Batch.load(self._place(found)))
                self.num_kept += len(found)
            start = wave.stop
        return Batch.concat(parts)

    def end(self) -> None:
        """Delete them: the rollout is written."""
        if self._folder.exists():
            remove(self._folder)

    def _find(self, start: int, stop: int) -> range | None:
        """The wave from prompt `start` on, where it is kept and reaches no further than to `stop`."""
        for place in self._folder.glob(f"{start:08d}-*"):
            wave = range(start, int(place.name.partition("-")[2]))
            if wave.stop <= stop:
                return wave
        return None

    def _keep(self, wave: range, batch: Batch) -> None:
        """Written elsewhere and renamed, so that a kill leaves no half wave."""
        place = self._place(wave)
        half = place.with_name(f".{place.name}")
        if half.exists():
            remove(half)
        batch.save(half)
        half.rename(place)

    def _place(self, wave: range) -> Path:
        return self._folder / f"{wave.start:08d}-{wave.stop:08d}"
