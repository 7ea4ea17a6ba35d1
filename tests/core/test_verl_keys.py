"""verl 0.9's own command lines load: each key is ours, mapped, or ignored with a reason; none in silence."""

import pytest

from moonshift.core.config import LoadedConfig, load_config
from moonshift.core.config.keys import key_of
from moonshift.core.config.translate import Translation
from moonshift.core.config.verl_keys import ENTRIES
from moonshift.core.errors import ConfigError
from moonshift.core.plan import make_plan

COMMON = """
data.train_files=/data/gsm8k/train.parquet data.val_files=['/data/gsm8k/test.parquet']
data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024
data.filter_overlong_prompts=True data.truncation='error' actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=["console","wandb"]
trainer.project_name=verl_example_gsm8k trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20
trainer.test_freq=5 trainer.total_epochs=15
"""
GRPO = """
algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5 actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40 actor_rollout_ref.ref.fsdp_config.param_offload=True
trainer.experiment_name=qwen2_7b_function_rm
"""
PPO = """
algorithm.adv_estimator=gae actor_rollout_ref.rollout.n=1 actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576
actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24576
critic.optim.lr=1e-5 critic.model.path=Qwen/Qwen2-7B-Instruct critic.model.use_remove_padding=True
critic.model.enable_gradient_checkpointing=True critic.use_dynamic_bsz=True critic.ppo_max_token_len_per_gpu=24576
critic.fsdp.param_offload=False critic.fsdp.optimizer_offload=False trainer.balance_batch=True
trainer.experiment_name=qwen2_7b_ppo
"""


def load(*texts: str) -> LoadedConfig:
    return load_config(None, [pair for text in texts for pair in text.split()], environ={})


def fates(loaded: LoadedConfig) -> dict[str, Translation]:
    return {item.key: item for item in loaded.translations}


def test_the_grpo_example_loads_and_plans() -> None:
    loaded = load(COMMON, GRPO)
    found = fates(loaded)
    assert loaded.config.tracking.experiment == "verl_example_gsm8k"
    assert loaded.config.run.name == "qwen2_7b_function_rm"
    assert found["trainer.project_name"].target == "tracking.experiment"
    assert found["actor_rollout_ref.model.use_remove_padding"].fate == "ignored"
    assert all(item.reason for item in loaded.translations)
    plan = make_plan(loaded.config, 7473)
    assert (plan.rollout_replicas, plan.samples_per_step, plan.actor.micro_batches_per_mini_batch) == (4, 5120, 4)
    assert plan.actor.optimizer_steps_per_step == 4


def test_the_ppo_example_loads_and_plans() -> None:
    plan = make_plan(load(COMMON, PPO).config, 7473)
    assert plan.critic is not None and plan.critic.max_tokens == 24576
    assert plan.actor.optimizer_steps_per_step == 4


@pytest.mark.parametrize("text", [COMMON + GRPO, COMMON + PPO], ids=["grpo", "ppo"])
def test_no_key_is_dropped_in_silence(text: str) -> None:
    found = fates(load(text))
    for pair in text.split():
        key = pair.partition("=")[0]
        assert key in found or key_of(tuple(key.split("."))) is not None, key


def test_hydras_plus_names_the_same_key() -> None:
    loaded = load(COMMON, GRPO, "+actor_rollout_ref.model.override_config.attn_implementation=eager ++run.seed=3")
    assert loaded.config.actor_rollout_ref.model.override_config == {"attn_implementation": "eager"}
    assert loaded.config.run.seed == 3


def test_fsdp_is_fsdp2_and_greedy_validation_is_temperature_0() -> None:
    loaded = load(
        COMMON, GRPO, "actor_rollout_ref.actor.strategy=fsdp actor_rollout_ref.rollout.val_kwargs.do_sample=False"
    )
    assert loaded.config.actor_rollout_ref.actor.strategy == "fsdp2"
    assert loaded.config.actor_rollout_ref.rollout.val_kwargs.temperature == 0


def test_a_reward_file_and_its_name_become_one_key() -> None:
    keys = "custom_reward_function.path=/x/reward.py custom_reward_function.name=grade"
    assert load(COMMON, GRPO, keys).config.reward.function == "/x/reward.py:grade"
    assert load(COMMON, GRPO, keys.split()[0]).config.reward.function == "/x/reward.py:compute_score"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("actor_rollout_ref.rollout.multi_turn.enable=True", "conversations of several turns"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size=64", "_per_gpu"),
        ("critic.model.lora_rank=32", "trained whole"),
        ("reward_model.enable=True", "rewards are functions"),
        ("actor_rollout_ref.actor.shuffle=True", "replayed"),
    ],
)
def test_what_cannot_be_followed_is_an_error_and_not_ignored(key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(COMMON, GRPO, key)


def test_a_key_that_neither_knows_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.totl_epochs: unknown key; did you mean trainer\.total_epochs"):
        load(COMMON, GRPO, "trainer.totl_epochs=3")


def test_every_entry_maps_to_a_key_that_exists_and_says_why() -> None:
    for entry in ENTRIES:
        assert entry.reason
        assert entry.target is None or key_of(tuple(entry.target.split("."))) is not None


@pytest.mark.parametrize(
    ("keys", "mode"),
    [
        (("data.truncation=left",), "left"),
        (("data.truncation=right", "data.filter_overlong_prompts=False"), "right"),
        (("data.truncation=error", "data.filter_overlong_prompts=True"), "filter"),
        (("data.filter_overlong_prompts=True", "data.truncation=error"), "filter"),
        (("data.filter_overlong_prompts=True", "data.truncation=middle"), "filter"),
    ],
)
def test_long_prompts_are_filtered_before_they_are_cut_as_verl_does(keys: tuple[str, ...], mode: str) -> None:
    needed = ("data.train_files=sums:", "actor_rollout_ref.model.path=builtin:char-llama")
    config = load_config(None, (*needed, *keys, "data.reward_fn_key=origin"), environ={}).config
    assert (config.data.on_overlong, config.data.source_key) == (mode, "origin")
    with pytest.raises(ConfigError, match=r"on_overlong: is the text 'middle'; use one of error, filter, left, right"):
        load_config(None, (*needed, "data.truncation=middle"), environ={})
