"""The training engine of the policy, in one process or in several that share it: log-probs, policy updates.

The loss is chosen by name; what it needs over the whole mini-batch (a selection of tokens) is computed before its first
micro-batch, so that no result depends on the cut.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..algorithms import POLICY_LOSSES, RolloutCorrection, aggregate, correction_metrics, kl_penalty, rollout_correction
from ..batch import Batch, Ragged
from ..config.schema import Config
from ..plan import BatchPlan
from .correction import MEASURE_ONLY, bypass_rule, corrections_of_all
from .flops import ModelFlops
from .layout import TokenLayout, lay_out
from .log_probs import TokenScorer
from .lora import merged_weights
from .measures import mismatch
from .memory import MemoryLimit
from .micro_batches import micro_batches
from .mini_batch_trainer import MiniBatch, MiniBatchTrainer
from .optimizer import ModelOptimizer
from .parallel import Probe, device_of, ranks_of


class TorchTrainEngine(MiniBatchTrainer):
    """Trains one causal language model (`TrainEngine`)."""

    kind = "actor"

    def __init__(self, scorer: TokenScorer, config: Config, plan: BatchPlan, vocab_limit: int) -> None:
        actor = config.actor_rollout_ref.actor
        head = scorer.model.get_output_embeddings()
        optimizer = ModelOptimizer(scorer.model, actor.optim, actor.fsdp_config, head)
        super().__init__(plan.actor, optimizer, grad_clip=actor.grad_clip, steps=plan.steps)
        self.root = scorer
        if not self.ranks.alone:
            self.probe = Probe(scorer)  # its forward pass is the one that a shard waits in
        self.config = config
        self.plan = plan
        self.policy = scorer
        self.flops = ModelFlops.of(scorer.model, scorer.model.config, head)
        self.vocab_limit = vocab_limit
        self.drop_last = actor.drop_last
        self.forward_limit = MemoryLimit(
            "log_prob", plan.log_prob.micro_batch_size, plan.log_prob.max_tokens, shared=not self.ranks.alone
        )
        self.loss = POLICY_LOSSES[actor.policy_loss.loss_mode]
        self.agg_mode = self.loss.agg_mode or actor.loss_agg_mode
        self.bypass = bypass_rule(config)
        self._options = policy_loss_options(config, self.loss.options)
        self._selected: Tensor | None = None
        self._corrections: dict[int, list[RolloutCorrection]] = {}
        """parts of the update's mini-batches, by their index"""
        self._largest = 0.0
        """largest difference of probabilities seen in the update"""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """As of any model, an adapter merged in: what another engine serves, under the base model's names."""
        return merged_weights(self.model)

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> Batch:
        """`batch` with the ragged float32 columns `log_probs` and `entropy`, one value a response token."""
        return batch.with_columns(self.forward(self.policy, batch))

    def forward(self, scorer: TokenScorer, batch: Batch, limit: MemoryLimit | None = None) -> dict[str, Ragged]:
        """`log_probs` and `entropy` under the policy or the reference, in passes that fit the memory."""
        limit = limit or self.forward_limit

        def work(size: int, tokens: int | None) -> dict[str, Ragged]:
            return forward_log_probs(scorer, batch, size, self._scoring(), tokens)

        return self._without_backward(scorer, limit, work, batch)

    def _scoring(self) -> "Scoring":
        return Scoring(temperature=self.config.actor_rollout_ref.rollout.temperature, vocab_limit=self.vocab_limit)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Take the optimizer steps of training step `step` and raise the policy version to it.

        `batch` holds `prompt_ids, response_ids, loss_mask, advantages` (ragged), `old_log_probs` or, where the update
        is exactly on-policy, `rollout_log_probs` in their place (measured, never trained on), `ref_log_probs` where
        the loss has a KL term, and `weights` where the rollouts are corrected. Returns metrics under verl's names.
        """
        self._corrections, self._largest = {}, 0.0
        metrics = super().update(batch, step)
        if "old_log_probs" not in batch.names:
            metrics["training/rollout_probs_diff_max"] = max(self.ranks.gather(self._largest))
        found = [part for parts in self._corrections.values() for part in parts]
        return (
            metrics
            | correction_metrics(corrections_of_all(self.ranks, found))
            | {"training/optimizer_steps": float(self.optimizer_steps)}
        )

    def _begin(self, batch: Batch, mini_batch: MiniBatch, step: int) -> None:
        self._selected = self._select(batch, mini_batch, step)
        self._corrections[mini_batch.index] = []  # those of a try that ran out of memory are dropped

    def _select(self, batch: Batch, mini_batch: MiniBatch, step: int) -> Tensor | None:
        """The tokens that a loss singles out over the whole mini-batch, `[B, T]` bool by the rows of `batch`."""
        if self.loss.select is None:
            return None
        rows = batch.reorder(mini_batch.rows)
        current = self.forward(self.policy, rows)
        log_probs, mask = rows.with_columns(current).padded("log_probs")
        old = rows.padded("old_log_probs")[0] if "old_log_probs" in rows.names else log_probs
        trained = rows.padded("loss_mask")[0].bool() & mask
        options = policy_loss_options(self.config, self.loss.select_options)
        if "seed" in self.loss.select_options:
            options["seed"] = _selection_seed(self.config.run.seed, step, mini_batch.index)
        chosen = self.loss.select(log_probs, old, rows.padded("advantages")[0], trained, **options)
        whole = torch.zeros(len(batch), chosen.shape[1], dtype=torch.bool)
        whole[mini_batch.rows] = chosen
        return whole

    def _backward(self, batch: Batch, rows: Tensor, mini_batch: MiniBatch) -> dict[str, float]:
        actor = self.config.actor_rollout_ref.actor
        on_policy = "old_log_probs" not in batch.names
        layout = lay_out(batch.ragged("prompt_ids"), batch.ragged("response_ids"), rows, self.device)
        log_probs, entropy = self.policy(
            layout,
            temperature=self.config.actor_rollout_ref.rollout.temperature,
            vocab_limit=self.vocab_limit,
            entropy_use="gradient" if actor.entropy_coeff > 0 else "value" if on_policy else "none",
        )
        mask = self._dense(batch, "loss_mask", rows, layout).bool()
        old_log_probs = log_probs.detach() if on_policy else self._dense(batch, "old_log_probs", rows, layout)
        policy = self.loss.compute(
            log_probs,
            old_log_probs,
            self._dense(batch, "advantages", rows, layout),
            mask,
            weights=self._weights(batch, rows, layout, mini_batch, log_probs),
            **self._options,
            **self._selection(rows, layout),
        )
        terms = {"actor/pg_loss": self._mean(policy.token_losses, mask, mini_batch, self.agg_mode)}
        loss = terms["actor/pg_loss"]
        if entropy is not None and actor.entropy_coeff > 0:
            terms["actor/entropy_loss"] = self._mean(entropy, mask, mini_batch, actor.loss_agg_mode)
            loss = loss - actor.entropy_coeff * terms["actor/entropy_loss"]
        if actor.use_kl_loss:
            reference = self._dense(batch, "ref_log_probs", rows, layout)
            kl = kl_penalty(log_probs, reference, actor.kl_loss_type, response_mask=mask)
            terms["actor/kl_loss"] = self._mean(kl, mask, mini_batch, actor.loss_agg_mode)
            loss = loss + actor.kl_loss_coef * terms["actor/kl_loss"]
        loss.backward()
        terms["actor/loss"] = loss
        metrics = {key: float(value.detach()) for key, value in terms.items()} | self._work(layout)
        for key, (numerator, _) in policy.metrics.items():
            metrics[key] = float(numerator) / mini_batch.num_tokens
        if on_policy and entropy is not None:
            sampled = self._dense(batch, "rollout_log_probs", rows, layout)
            metrics |= self._mismatch(sampled, log_probs.detach(), entropy.detach(), mask, mini_batch)
        return metrics

    def _selection(self, rows: Tensor, layout: TokenLayout) -> dict[str, Tensor]:
        if self._selected is None:
            return {}
        return {"selected": self._selected[rows, : layout.response_ids.shape[1]].to(self.device)}

    def _weights(
        self, batch: Batch, rows: Tensor, layout: TokenLayout, mini_batch: MiniBatch, log_probs: Tensor
    ) -> Tensor | None:
        """Importance weights of the rollouts: stored with the batch, or, with two policies, of the current one."""
        if "weights" in batch.names:
            return self._dense(batch, "weights", rows, layout)
        if self.bypass is None:
            return None
        sampled = self._dense(batch, "old_log_probs", rows, layout)
        mask = self._dense(batch, "loss_mask", rows, layout).bool()
        found = rollout_correction(log_probs.detach(), sampled, mask, self.bypass)
        self._corrections[mini_batch.index].append(found)
        return found.weights

    def _mismatch(
        self, sampled: Tensor, trained: Tensor, entropy: Tensor, mask: Tensor, mini_batch: MiniBatch
    ) -> dict[str, float]:
        """On-policy, the update itself measures what the stage `log_probs` measures otherwise; shares of means."""
        self._corrections[mini_batch.index].append(rollout_correction(trained, sampled, mask, MEASURE_ONLY))
        share = int(mask.sum()) / mini_batch.num_tokens
        found = mismatch(sampled[mask], trained[mask], entropy[mask])
        self._largest = max(self._largest, found.pop("training/rollout_probs_diff_max", 0.0))
        return {key: value * share for key, value in found.items()}

    def _mean(self, losses: Tensor, mask: Tensor, mini_batch: MiniBatch, mode: str) -> Tensor:
        return aggregate(
            losses,
            mask,
            mode,
            num_tokens=mini_batch.num_tokens,
            num_sequences=mini_batch.num_sequences,
            scale_factor=self.config.actor_rollout_ref.actor.loss_scale_factor
            or float(self.config.data.max_response_length),
        )


def policy_loss_options(config: Config, names: frozenset[str]) -> dict[str, Any]:
    """Of the options that a loss takes, those that the config sets; the others keep the loss's own default."""
    actor = config.actor_rollout_ref.actor
    given = {
        "clip_ratio_low": actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        "clip_ratio_high": actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        "clip_ratio_c": actor.clip_ratio_c,
        "tau_pos": actor.policy_loss.tau_pos,
        "tau_neg": actor.policy_loss.tau_neg,
        "clip_cov_ratio": actor.policy_loss.clip_cov_ratio,
        "clip_cov_lb": actor.policy_loss.clip_cov_lb,
        "clip_cov_ub": actor.policy_loss.clip_cov_ub,
        "kl_cov_ratio": actor.policy_loss.kl_cov_ratio,
        "ppo_kl_coef": actor.policy_loss.ppo_kl_coef,
    }
    return {name: value for name, value in given.items() if name in names and value is not None}


def _selection_seed(seed: int, step: int, mini_batch: int) -> int:
    """A seed of its own for each mini-batch of a run."""
    digest = hashlib.blake2b(f"{seed}/{step}/{mini_batch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """The distribution that log-probs are taken under."""

    temperature: float
    vocab_limit: int


@torch.no_grad()
def forward_log_probs(
    scorer: TokenScorer, batch: Batch, micro_batch_size: int, scoring: Scoring, max_tokens: int | None = None
) -> dict[str, Ragged]:
    """`log_probs` and `entropy` of every response token, ragged float32 on the host."""
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    parts: list[Batch] = []
    order: list[torch.Tensor] = []
    ranks = ranks_of(scorer)
    passes = micro_batches(batch, torch.arange(len(batch)), micro_batch_size, max_tokens)
    for rows in (one.rows for one in ranks.share(passes)):
        order.append(rows)
        layout = lay_out(prompts, responses, rows, device_of(scorer))
        values, entropy = scorer(
            layout, temperature=scoring.temperature, vocab_limit=scoring.vocab_limit, entropy_use="value"
        )
        assert entropy is not None
        mask = layout.response_mask.cpu()
        named = {"log_probs": values, "entropy": entropy}
        parts.append(Batch({name: Ragged.from_padded(tensor.cpu(), mask) for name, tensor in named.items()}))
    whole = ranks.merged(Batch.concat(parts), torch.cat(order))
    return {name: whole.ragged(name) for name in ("log_probs", "entropy")}
