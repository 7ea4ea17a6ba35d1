"""What must be the same in two runs of one config, whatever happened to one of them on the way."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any


class Home:
    """The home of one run, looked at from outside; nothing is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self, query: str, database: str = "ledger.db") -> list[tuple[Any, ...]]:
        """Rows of a query; none where the database or the table is not there yet."""
        path = self.folder / database
        if not path.exists():
            return []
        with closing(sqlite3.connect(path, timeout=30)) as connection:
            try:
                return connection.execute(query).fetchall()
            except sqlite3.OperationalError as error:
                if "no such table" in str(error):
                    return []
                raise

    @property
    def state(self) -> str:
        """State of the run in the ledger; empty where there is no run yet."""
        found = self.rows("select state from runs")
        return found[-1][0] if found else ""

    @property
    def num_stages(self) -> int:
        """Committed stages."""
        return (self.rows("select count(*) from stages") or [(0,)])[0][0]


BY_THE_CLOCK = " and ".join(f"key not like '{prefix}/%'" for prefix in ("timing_s", "rollout", "perf", "memory"))
LEDGER = {
    "runs": "select id, state from runs",
    "steps": "select step, state, policy_version from steps order by step",
    "stages": "select step, name, input_digest, digest, path from stages order by step, name",
    "metrics": f"select key, step, value, value_text from metrics_outbox where {BY_THE_CLOCK} order by key, step",
    "clock metrics": f"select key, step from metrics_outbox where not ({BY_THE_CLOCK}) order by key, step",
    "samples": "select step, uid, epoch, sample_index, reward, response_tokens, finish_reason from samples "
    "order by step, uid, epoch, sample_index",
    "checkpoints": "select step, path, manifest_sha256, bytes, state from checkpoints order by step",
}
MLFLOW = f"select key, step, value, is_nan from metrics where {BY_THE_CLOCK} order by key, step, value"
MLFLOW_KEYS = f"select key, step from metrics where not ({BY_THE_CLOCK}) order by key, step"


def differences(home: Home, reference: Home) -> list[str]:
    """Every way in which a finished run differs from the one that nobody struck; none is the pass mark.

    Compared are the weights, each stage by the digest of its output, metrics (in the ledger and as MLflow has them;
    those measured by the clock by key and step only), samples, and each checkpoint's files by their SHA-256.
    """
    found = [_difference(name, home.rows(query), reference.rows(query)) for name, query in LEDGER.items()]
    for name, query in (("MLflow", MLFLOW), ("MLflow clock metrics", MLFLOW_KEYS)):
        found.append(_difference(name, home.rows(query, "mlflow.db"), reference.rows(query, "mlflow.db")))
    found.append(_difference("weights", weights(home), weights(reference)))
    found.append(_difference("checkpoint files", _checkpoint_files(home), _checkpoint_files(reference)))
    unsent = home.rows("select key, step from metrics_outbox where not sent")
    found.append(f"metrics not sent to MLflow: {len(unsent)}, first {unsent[0]}" if unsent else "")
    return [fault for fault in (*found, *unsound(home)) if fault]


def unsound(home: Home) -> list[str]:
    """What must never be there, ended in order or not: a broken database, a half-written file, output without a row."""
    checked = home.rows("pragma integrity_check")
    faults = [] if checked in ([], [("ok",)]) else [f"ledger: {checked}"]
    left = [path for path in (home.folder / "runs").rglob("*") if path.suffix in (".tmp", ".part", ".deleted")]
    committed = {home.folder / "runs" / run / path for run, path in home.rows("select run_id, path from stages")}
    left += [path for path in (home.folder / "runs").glob("*/stages/*/*") if path not in {*committed, *left}]
    return faults + [f"left behind: {path.relative_to(home.folder)}" for path in sorted(left)]


def weights(home: Home) -> list[str]:
    """Fingerprints of the last weights; one, unless attempts disagree."""
    events = home.rows("select detail from events where kind = 'weights' order by id")
    return sorted({json.loads(detail)["sha256"] for (detail,) in events})


def metric_gap(home: Home, reference: Home) -> tuple[float, str]:
    """Largest relative difference of a metric, and where; infinite where one of the two has no such value.

    For runs that end in the same state by another way (memory that ran out cuts the batch differently), where the sums
    round differently. What was measured by the clock and counts of the injected fault itself are left out.
    """
    trained = "key like 'actor/%' or key like 'critic/%'"
    query = f"select key, step, value from metrics_outbox where ({trained}) and {BY_THE_CLOCK}"
    ours, theirs = ({row[:2]: row[2] for row in each.rows(query)} for each in (home, reference))
    worst, place = 0.0, "no metric"
    for at in theirs:
        value, wanted = ours.get(at), theirs[at]
        gap = abs(value - wanted) / max(1.0, abs(wanted)) if None not in (value, wanted) else float("inf")
        if value is None and wanted is None:
            gap = 0.0
        if gap > worst:
            worst, place = gap, f"{at[0]} of step {at[1]}"
    return worst, place


def _checkpoint_files(home: Home) -> list[tuple[str, str, str]]:
    """(checkpoint, file, SHA-256) by the manifests on disk."""
    files = []
    for manifest in sorted((home.folder / "runs").glob("*/checkpoints/step-*/manifest.json")):
        held = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        files += [(manifest.parent.name, name, str(entry["sha256"])) for name, entry in sorted(held.items())]
    return files


def _difference(name: str, ours: list[Any], theirs: list[Any]) -> str:
    """One line on the first difference of two lists, empty where there is none."""
    if ours == theirs:
        return ""
    pairs = zip(ours, theirs, strict=False)
    first = next((f"{left} instead of {right}" for left, right in pairs if left != right), "")
    if not first:
        longer = ours if len(ours) > len(theirs) else theirs
        extra = longer[min(len(ours), len(theirs))]
        first = f"{extra} is {'too much' if longer is ours else 'missing'}"
    return f"{name}: {len(ours)} rows for {len(theirs)}; {first}"
