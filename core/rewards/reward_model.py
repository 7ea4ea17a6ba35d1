"""A reward model: sequence classification with one label, its logit being the reward.

Invariant: a sample's reward does not depend on the others of its batch, but for rounding; none is cut to fit.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RewardError
from ..types import Prompt, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """What `reward.kwargs` says of the model."""

    path: str
    """a Hugging Face folder, or a hub name that was fetched before"""
    batch_size: int = 8
    """sequences a forward pass"""
    max_length: int | None = None
    """tokens of prompt and response; None: what the model was made for"""
    device: str = "cpu"
    dtype: str = "auto"
    trust_remote_code: bool = False


class RewardModel:
    """Called with a list of samples; the model is loaded at the first call and kept for the process."""

    def __init__(self) -> None:
        self._loaded: dict[ModelSettings, tuple[Any, Any]] = {}
        self._lock = threading.Lock()

    def __call__(self, samples: Sequence[Sample], **settings: Any) -> list[float | Exception]:
        """One logit a sample; an error in the place of a sample that is too long.

        `settings`: `ModelSettings`' fields. The text is the conversation through the tokenizer's chat template; without
        one, prompt and response joined by a line break. Raises RewardError: no such model, or more than one label.
        """
        wanted = _settings(settings)
        with self._lock:
            if wanted not in self._loaded:
                self._loaded[wanted] = _load(wanted)
        model, tokenizer = self._loaded[wanted]
        rows = [_encoded(sample, tokenizer) for sample in samples]
        limit = wanted.max_length or getattr(model.config, "max_position_embeddings", None) or 10**9
        fitting = sorted((place for place, row in enumerate(rows) if 0 < len(row) <= limit), key=lambda p: len(rows[p]))
        found: list[float | Exception] = [
            ValueError(f"has {len(row)} tokens with its prompt; the reward model takes 1 to {limit}") for row in rows
        ]
        for start in range(0, len(fitting), wanted.batch_size):
            places = fitting[start : start + wanted.batch_size]
            for place, logit in zip(places, _logits(model, [rows[place] for place in places]), strict=True):
                found[place] = logit
        return found

    def check_setup(self, prompts: Sequence[Prompt], **settings: Any) -> None:
        """Check the settings and the model's own config without loading its weights.

        Raises RewardError as a call does.
        """
        _config(_settings(settings))


reward_model = RewardModel()
"""What `reward.function` names: moonshift.core.rewards.reward_model:reward_model."""


def _settings(settings: dict[str, Any]) -> ModelSettings:
    try:
        wanted = ModelSettings(**settings)
    except TypeError as error:
        raise RewardError(f"reward.kwargs of the reward model: {error}.") from error
    if wanted.batch_size < 1:
        raise RewardError(f"reward.kwargs.batch_size is {wanted.batch_size}; it must be at least 1.")
    return wanted


def _config(settings: ModelSettings) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(settings.path, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError) as error:
        kind = "folder" if Path(settings.path).exists() else "no folder here and no hub name that was fetched"
        raise RewardError(f"reward.kwargs.path {settings.path!r} is no reward model ({kind}): {error}") from error
    if config.num_labels != 1 and "ForSequenceClassification" not in " ".join(config.architectures or ()):
        raise RewardError(
            f"{settings.path} is {', '.join(config.architectures or ['no architecture'])}, and not a "
            f"ForSequenceClassification with one label; name a reward model."
        )
    if config.num_labels != 1:
        raise RewardError(f"{settings.path} has {config.num_labels} labels; a reward model has one.")
    return config


def _load(settings: ModelSettings) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    config = _config(settings)
    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.path, trust_remote_code=settings.trust_remote_code)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            settings.path,
            config=config,
            dtype=settings.dtype,
            trust_remote_code=settings.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise RewardError(f"The reward model {settings.path} cannot be loaded: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise RewardError(
            f"The reward model {settings.path} lacks weights, which would be random: {', '.join(missing[:5])}. "
            f"Name a model that was trained as a reward model."
        )
    return model.to(settings.device).eval(), tokenizer


def _encoded(sample: Sample, tokenizer: Any) -> list[int]:
    turns = [*sample.prompt.messages, {"role": "assistant", "content": sample.response}]
    if tokenizer.chat_template:
        return list(tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False))
    text = "\n".join([*(turn["content"] for turn in sample.prompt.messages), sample.response])
    return list(tokenizer(text)["input_ids"])


def _logits(model: Any, rows: Sequence[list[int]]) -> list[float]:
    """One logit a row. Padding stands on the right, and Transformers finds the last token by `pad_token_id`: where the
    model has none, each length is a batch of its own.
    """
    import torch

    pad = model.config.pad_token_id
    if pad is None and len({len(row) for row in rows}) > 1:
        return [logit for row in rows for logit in _logits(model, [row])]
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad or 0] * (width - len(row))] for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=model.device)
    with torch.inference_mode():
        return model(input_ids=ids, attention_mask=mask).logits[:, 0].double().tolist()
