"""A reward model of a few thousand random weights, made here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from moonshift.core.errors import RewardError
from moonshift.core.rewards import Graded, RewardSet, WeightedReward, load_reward
from moonshift.core.types import Prompt, Sample

SPEC = "moonshift.core.rewards.reward_model:reward_model"


def make(folder: Path, char_llama: Path, *, labels: int = 1) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(char_llama)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=tokenizer.pad_token_id, max_position_embeddings=64,
    )  # fmt: skip
    config.num_labels = labels
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def samples(*responses: str) -> list[Sample]:
    turns = ({"role": "user", "content": "1+1="},)
    prompt = Prompt(uid="a:0", messages=turns, text="1+1=", answer="2", source="a", extra={})
    return [Sample(prompt=prompt, response=each, finish_reason="stop", response_tokens=1) for each in responses]


def rewards(path: Path, **kwargs: Any) -> RewardSet:
    return RewardSet([WeightedReward(reward=load_reward(SPEC, {"path": str(path), **kwargs}))])


def scores(graded: list[Graded]) -> list[float]:
    assert [each.error for each in graded] == [None] * len(graded)
    return [each.components["score"] for each in graded if each.components]


def test_the_reward_is_the_models_logit_whatever_the_batch(tmp_path: Path, char_llama: Path) -> None:
    folder = make(tmp_path / "rm", char_llama)
    texts = ("2", "22", "1+1=2", "7")
    together = scores(rewards(folder, batch_size=3).grade(samples(*texts)))
    alone = [scores(rewards(folder).grade(samples(text)))[0] for text in texts]
    assert together == pytest.approx(alone, abs=1e-5)
    assert len(set(together)) == 4

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForSequenceClassification.from_pretrained(folder)
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "22"}]
    if tokenizer.chat_template:
        ids = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
    else:
        ids = tokenizer("1+1=\n22")["input_ids"]
    with torch.inference_mode():
        expected = float(model(torch.tensor([ids])).logits[0, 0])
    assert together[1] == pytest.approx(expected, abs=1e-5)


def test_a_sample_that_is_too_long_is_its_own_error(tmp_path: Path, char_llama: Path) -> None:
    folder = make(tmp_path / "rm", char_llama)
    graded = rewards(folder).grade(samples("2", "2" * 200))
    assert graded[0].components is not None
    assert "the reward model takes 1 to 64" in str(graded[1].error)


def test_what_is_no_reward_model_is_refused_before_the_start(tmp_path: Path, char_llama: Path) -> None:
    prompts = [each.prompt for each in samples("")]
    rewards(make(tmp_path / "rm", char_llama)).check(prompts)
    with pytest.raises(RewardError, match="has 2 labels; a reward model has one"):
        rewards(make(tmp_path / "two", char_llama, labels=2)).check(prompts)
    with pytest.raises(RewardError, match="is no reward model"):
        rewards(tmp_path / "nothing").check(prompts)
    with pytest.raises(RewardError, match="not a ForSequenceClassification with one label"):
        rewards(char_llama).check(prompts)
    with pytest.raises(RewardError, match="unexpected keyword argument 'pth'"):
        rewards(tmp_path, pth=1).check(prompts)
