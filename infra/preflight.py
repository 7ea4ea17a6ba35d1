"""All that is checked before a server is started or a GPU is taken: config, plan, data, model, reward.

Invariant: after `prepare` returned, nothing that the user wrote can be wrong in a way that could have been known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from moonshift.core.config import LoadedConfig, load_config
from moonshift.core.config.schema import Config
from moonshift.core.datasets import load_prompts
from moonshift.core.errors import ConfigError, DataError
from moonshift.core.plan import BatchPlan, make_plan
from moonshift.core.rewards import check_reward, load_reward
from moonshift.core.training.correction import correction_rule
from moonshift.core.types import Prompt

from .disk_space import checkpoint_bytes, disk_warning
from .files import storage_errors
from .home import home, models_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts and their token ids, row by row."""

    prompts: list[Prompt]
    ids: list[list[int]]


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


@cache
def prepare(config_path: str, overrides: tuple[str, ...] = ()) -> Prepared:
    """Check everything; kept for the process, since the command line and the flow both ask.

    Raises:
        ConfigError, PlanError, DataError, ModelError, RewardError: each naming file, row or key and what to do.
    """
    loaded = load_config(Path(config_path) if config_path else None, overrides)
    config = loaded.config
    refuse_unsupported(config)
    refuse_contradictions(config)
    reward = load_reward(config.reward.function, config.reward.kwargs)
    prompts = _load(config, config.data.train_files)
    validation = _load(config, config.data.val_files)
    examples = _load(config, config.warm_start.files)
    if config.data.val_max_samples is not None:
        validation = validation[: config.data.val_max_samples]
    if config.warm_start.steps and not examples:
        raise DataError(
            f"warm_start.steps is {config.warm_start.steps} but warm_start.files names no worked examples; name some "
            "or set warm_start.steps to 0."
        )
    plan = make_plan(config, len(prompts))
    check_reward(reward, [*prompts, *validation])
    return _tokenize(loaded, plan, prompts, validation, examples)


def refuse_unsupported(config: Config) -> None:
    """Refuse what can be planned and configured, but not run by this version.

    Raises:
        ConfigError: naming every such key.
    """
    world = config.trainer.nnodes * config.trainer.n_gpus_per_node
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    unsupported = {
        f"trainer.nnodes × trainer.n_gpus_per_node = {world}; set both to 1": world > 1,
        f"actor_rollout_ref.rollout.name={rollout.name}; set it to transformers": rollout.name != "transformers",
        f"actor_rollout_ref.actor.strategy={actor.strategy}; set it to fsdp2": actor.strategy != "fsdp2",
    }
    found = [text for text, applies in unsupported.items() if applies]
    if found:
        raise ConfigError(
            "This version plans it, but trains and generates in one process and cannot run it:\n  - "
            + "\n  - ".join(found)
        )


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


def _load(config: Config, files: Sequence[str]) -> list[Prompt]:
    if not files:
        return []
    data = config.data
    return load_prompts(files, prompt_key=data.prompt_key, answer_key=data.answer_key, system_prompt=data.system_prompt)


def _tokenize(
    loaded: LoadedConfig,
    plan: BatchPlan,
    prompts: list[Prompt],
    validation: list[Prompt],
    examples: list[Prompt],
) -> Prepared:
    """Bring the model into place and turn every prompt into ids, with the function that the run uses."""
    from moonshift.core.training.model import load_tokenizer, resolve_model, stop_ids
    from moonshift.core.training.rendering import check_prompts, encode_text

    config = loaded.config
    model = config.actor_rollout_ref.model
    with storage_errors(models_folder()):
        folder = resolve_model(
            model.path,
            override_config=model.override_config,
            seed=config.run.seed,
            cache=models_folder(),
            trust_remote_code=model.trust_remote_code,
        )
    tokenizer = load_tokenizer(folder, trust_remote_code=model.trust_remote_code)
    stops = stop_ids(tokenizer, folder)

    def checked(rows: list[Prompt]) -> PromptSet:
        ids = check_prompts(
            rows,
            tokenizer,
            max_prompt_length=config.data.max_prompt_length,
            apply_chat_template=config.data.apply_chat_template,
        )
        return PromptSet(prompts=rows, ids=ids)

    answers = [
        [*encode_text(str(example.answer), tokenizer, where=f"row {example.uid}, answer"), stops[0]]
        for example in examples
    ]
    critic = _critic_folder(config) if config.needs_critic else None
    warning = disk_warning(config, checkpoint_bytes(config, folder, critic), home())
    return Prepared(
        loaded=loaded,
        plan=plan,
        model_folder=folder,
        critic_folder=critic,
        train=checked(prompts),
        validation=checked(validation),
        examples=checked(examples),
        example_answers=answers,
        stop_ids=stops,
        warnings=(warning,) if warning else (),
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
