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
from moonshift.core.types import Prompt

from .files import storage_errors
from .home import models_folder


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
    train: PromptSet
    validation: PromptSet
    examples: PromptSet
    """worked examples of the warm start; `answers` beside them"""
    example_answers: list[list[int]]
    stop_ids: tuple[int, ...]

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
        "algorithm.adv_estimator=gae; set it to grpo": config.needs_critic,
    }
    found = [text for text, applies in unsupported.items() if applies]
    if found:
        raise ConfigError(
            "This version plans it, but trains and generates in one process and cannot run it:\n  - "
            + "\n  - ".join(found)
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
    return Prepared(
        loaded=loaded,
        plan=plan,
        model_folder=folder,
        train=checked(prompts),
        validation=checked(validation),
        examples=checked(examples),
        example_answers=answers,
        stop_ids=stops,
    )
