"""The errors that a user of Moonshift can meet; every leaf is also the standard error of its kind.

    MoonshiftError
    ├── ConfigError (ValueError)        a key, a value or a combination of them
    ├── PlanError (ValueError)          batch sizes or devices that do not fit together
    ├── DataError (ValueError)          a data file or a row
    ├── ModelError (ValueError)         a model folder, file or name
    ├── RewardError (ValueError)        a reward function: cannot be loaded, or raised
    │   └── RewardContractError         it returned what is no reward, or not one reward a sample
    ├── LedgerError (RuntimeError)      the ledger refused: unknown run, changed config
    │   ├── LeaseHeldError              another process owns the run
    │   ├── LeaseLostError              this process owns the run no more
    │   └── LedgerAwayError             locked, or its server cannot be reached: it may pass
    │       └── CommitUnknownError      the connection was lost over a commit, which may have been kept
    ├── CheckpointError (RuntimeError)  a checkpoint that is missing, incomplete or changed
    ├── ServiceError (RuntimeError)     a server or the cluster did not start, answer or stop
    ├── StageError (RuntimeError)       a stage of a step failed
    │   ├── MemoryLimitError            the memory ran out with the smallest pass
    │   └── WorkerLostError             a worker process died or hangs; a new one can repeat the stage
    ├── NonFiniteError (ArithmeticError) a loss, gradient or reward is NaN or infinite
    └── StorageError (OSError)          no space, no permission, a read-only folder

A message says what was given, where (file, row, key) and what to do. All are picklable, because they cross
process borders: each takes one string.
"""


class MoonshiftError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(MoonshiftError, ValueError):
    """A configuration key, value or combination of values is wrong."""


class PlanError(MoonshiftError, ValueError):
    """Batch sizes or devices do not fit together."""


class DataError(MoonshiftError, ValueError):
    """A data file or one of its rows cannot be used."""


class ModelError(MoonshiftError, ValueError):
    """A model cannot be found, read or used."""


class RewardError(MoonshiftError, ValueError):
    """A reward function cannot be loaded, or it raised."""


class RewardContractError(RewardError):
    """A reward function returned something that is no reward, or not one reward a sample."""


class LedgerError(MoonshiftError, RuntimeError):
    """The ledger refused a request."""


class LeaseHeldError(LedgerError):
    """Another live process owns the run."""

    until = 0.0
    """when its lease runs out unless it is renewed, seconds since the epoch"""


class LeaseLostError(LedgerError):
    """This process owns the run no more: its lease was given back, or another attempt took over."""


class LedgerAwayError(LedgerError):
    """The ledger is locked or cannot be reached; it may pass."""


class CommitUnknownError(LedgerAwayError):
    """The connection was lost while a commit was on its way; whether it was kept is not known."""


class CheckpointError(MoonshiftError, RuntimeError):
    """A checkpoint is missing, incomplete or has changed since it was written."""


class ServiceError(MoonshiftError, RuntimeError):
    """A server or the cluster did not start, answer or stop in time."""


class StageError(MoonshiftError, RuntimeError):
    """A stage of a step failed."""


class MemoryLimitError(StageError):
    """The memory ran out, and smaller passes cannot help."""


class WorkerLostError(StageError):
    """A worker process died, or did not answer in time; its stage can be repeated by a new one."""


class NonFiniteError(MoonshiftError, ArithmeticError):
    """A loss, gradient or reward is NaN or infinite."""


class StorageError(MoonshiftError, OSError):
    """The disk is full, read-only or refuses access."""
