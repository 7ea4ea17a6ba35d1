"""All that is checked before a server is started or a GPU is taken: config, plan, data, model, reward.

Invariant: after `prepare` returned, nothing that the user wrote can be wrong in a way that could have been known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moonshift.core.config import LoadedConfig, load_config
from moonshift.core.config.schema import Config, DataSection
from moonshift.core.datasets.reading import Progress, silent
from moonshift.core.errors import ConfigError, DataError
from moonshift.core.plan import BatchPlan, make_plan
from moonshift.core.rewards import load_rewards
from moonshift.core.training.correction import correction_rule

from .disk_space import checkpoint_bytes, disk_warning
from .files import storage_errors
from .home import home, models_folder
from .prompt_sets import PromptSet, ReadSet, read_sets, refuse_bad_rows, render_set, sampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that can start."""

    loaded: LoadedConfig
    plan: BatchPlan
    model_folder: Path
    critic_folder: Path | None
    """model under the critic's value head; None: the initial policy, or no critic"""
    train: PromptSet
    validation: PromptSet
    examples: PromptSet
    """worked examples of the warm start; `answers` beside them"""
    example_answers: list[list[int]]
    stop_ids: tuple[int, ...]
    warnings: tuple[str, ...] = ()
    """what does not stop the run, but may later"""

    @property
    def config(self) -> Config:
        return self.loaded.config


_PREPARED: dict[tuple[str, tuple[str, ...]], Prepared] = {}


def prepare(config_path: str, overrides: tuple[str, ...] = (), progress: Progress = silent) -> Prepared:
    """Check everything; kept for the process, since the command line and the flow both ask.

    Raises:
        ConfigError, PlanError, DataError, ModelError, RewardError: each naming file, row or key and what to do.
    """
    asked = (config_path, overrides)
    if asked not in _PREPARED:
        _PREPARED[asked] = _prepare(load_config(Path(config_path) if config_path else None, overrides), progress)
    return _PREPARED[asked]


def _prepare(loaded: LoadedConfig, progress: Progress) -> Prepared:
    config = loaded.config
    refuse_unsupported(config)
    refuse_contradictions(config)
    rewards = load_rewards(config.reward)
    sets = read_sets(config, progress)
    refuse_bad_rows(config, sets)
    train, validation, examples = (item.read.prompts for item in sets)
    if config.warm_start.steps and not examples:
        raise DataError(
            f"warm_start.steps is {config.warm_start.steps} but warm_start.files names no worked examples; name some "
            "or set warm_start.steps to 0."
        )
    make_plan(config, len(train))  # what can be wrong is said before a model is brought into place
    rewards.check([*train, *validation])
    return _tokenize(loaded, sets, progress)


def look_at_data(loaded: LoadedConfig, progress: Progress = silent) -> tuple[PromptSet, PromptSet, PromptSet]:
    """The sets as a run would have them, with every row that it would refuse among those dropped; nothing is refused.

    Raises:
        DataError, ModelError: a file that cannot be read at all, or a model that is not there.
    """
    from moonshift.core.training.model import load_tokenizer

    config = loaded.config
    sets = read_sets(config, progress)
    trusted = config.actor_rollout_ref.model.trust_remote_code
    tokenizer = load_tokenizer(_model_folder(config), trust_remote_code=trusted)
    return _render(config.data, sets, tokenizer, strict=False, progress=progress)


def refuse_unsupported(config: Config) -> None:
    """Refuse what can be planned and configured, but not run by this version.

    Raises:
        ConfigError: naming every such key.
    """
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    parallel = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    sequence = actor.fsdp_config.ulysses_sequence_parallel_size
    unsupported = {
        f"actor_rollout_ref.rollout: a replica of {parallel} GPUs (TP × DP × PP); set them to 1": parallel > 1,
        f"actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size={sequence}; set it to 1": sequence > 1,
        f"actor_rollout_ref.rollout.name={rollout.name}; set it to transformers": rollout.name != "transformers",
        f"actor_rollout_ref.actor.strategy={actor.strategy}; set it to fsdp2": actor.strategy != "fsdp2",
    }
    found = [text for text, applies in unsupported.items() if applies]
    if found:
        raise ConfigError("This version plans it, but cannot run it:\n  - " + "\n  - ".join(found))


def refuse_contradictions(config: Config) -> None:
    """Refuse choices of the algorithm that exclude each other.

    Raises:
        ConfigError: naming the keys.
    """
    correction_rule(config)
    algorithm = config.algorithm
    if algorithm.adv_estimator == "gdpo" and algorithm.use_kl_in_reward:
        raise ConfigError(
            "algorithm.adv_estimator=gdpo reads the components of the reward and not the rewards of tokens, so "
            "algorithm.use_kl_in_reward would do nothing; set actor_rollout_ref.actor.use_kl_loss instead."
        )
    if algorithm.filter_groups.enable and not config.needs_groups:
        raise ConfigError(
            f"algorithm.filter_groups keeps groups whose samples differ, and {algorithm.adv_estimator} compares no "
            "groups; set algorithm.filter_groups.enable to false."
        )
    if algorithm.rollout_correction.bypass_mode and algorithm.use_kl_in_reward:
        raise ConfigError(
            "algorithm.rollout_correction.bypass_mode computes no log-probs before the update, and "
            "algorithm.use_kl_in_reward needs them; set one of them to false."
        )
    shortest = min(config.recovery.stage_timeout_s, config.recovery.stage_patience_s)
    if 3 * config.reward.timeout_s > shortest:
        raise ConfigError(
            f"reward.timeout_s is {config.reward.timeout_s:g}, and one sample that hangs may take three times as long "
            f"in the end: more than a stage is given, {shortest:g} s. Lower it, or raise recovery.stage_patience_s and "
            "recovery.stage_timeout_s."
        )


def _tokenize(loaded: LoadedConfig, sets: Sequence[ReadSet], progress: Progress) -> Prepared:
    """Bring the model into place and turn every prompt into ids, with the function that the run uses."""
    from moonshift.core.training.model import load_tokenizer, stop_ids
    from moonshift.core.training.rendering import encode_text

    config = loaded.config
    folder = _model_folder(config)
    tokenizer = load_tokenizer(folder, trust_remote_code=config.actor_rollout_ref.model.trust_remote_code)
    stops = stop_ids(tokenizer, folder)
    train, validation, examples = _render(config.data, sets, tokenizer, strict=True, progress=progress)
    plan = make_plan(config, len(train.prompts))  # fewer than were read, where some are left out
    sampler(config, train)
    answers = [
        [*encode_text(str(example.answer), tokenizer, where=f"row {example.uid}, answer"), stops[0]]
        for example in examples.prompts
    ]
    critic = _critic_folder(config) if config.needs_critic else None
    warning = disk_warning(config, checkpoint_bytes(config, folder, critic), home())
    return Prepared(
        loaded=loaded,
        plan=plan,
        model_folder=folder,
        critic_folder=critic,
        train=train,
        validation=validation,
        examples=examples,
        example_answers=answers,
        stop_ids=stops,
        warnings=(warning,) if warning else (),
    )


def _render(
    data: DataSection,
    sets: Sequence[ReadSet],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    strict: bool,
    progress: Progress,
) -> tuple[PromptSet, PromptSet, PromptSet]:
    from moonshift.core.training.rendering import Renderer

    renderer = Renderer(tokenizer, apply_chat_template=data.apply_chat_template)
    train, validation, examples = (render_set(item, renderer, data, strict=strict, progress=progress) for item in sets)
    return train, validation, examples


def _model_folder(config: Config) -> Path:
    from moonshift.core.training.model import resolve_model

    model = config.actor_rollout_ref.model
    with storage_errors(models_folder()):
        return resolve_model(
            model.path,
            override_config=model.override_config,
            seed=config.run.seed,
            cache=models_folder(),
            trust_remote_code=model.trust_remote_code,
        )


def _critic_folder(config: Config) -> Path | None:
    from moonshift.core.training.model import resolve_model

    path = config.critic.model.path
    if path is None or path == config.actor_rollout_ref.model.path:
        return None
    with storage_errors(models_folder()):
        return resolve_model(
            path,
            override_config={},
            seed=config.run.seed,
            cache=models_folder(),
            trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
        )
