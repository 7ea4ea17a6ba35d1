"""The one-process training engine: log-probs, policy updates, supervised steps, and its whole state.

Invariant: an update depends on the batch, the weights and the optimizer state alone. The gradient does not depend on
how a mini-batch is cut into micro-batches, because every loss is normalised by counts of the whole mini-batch.
The engine touches its model through `named_parameters` and the forward call only, so that a sharded model can take its
place.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from ..algorithms import POLICY_LOSSES
from ..algorithms.aggregate import aggregate
from ..algorithms.kl import kl_penalty
from ..batch import Batch, Ragged
from ..config.schema import Config
from ..errors import ModelError, NonFiniteError
from ..plan import BatchPlan
from .log_probs import TokenLayout, lay_out, response_log_probs
from .measures import mismatch
from .micro_batches import micro_batches, sample_lengths
from .schedule import learning_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """The rows of one optimizer step and the counts that its loss is divided by."""

    rows: torch.Tensor
    """`[M]` int64"""
    num_tokens: int
    num_sequences: int


class TorchTrainEngine:
    """Trains one causal language model in this process (`TrainEngine`)."""

    def __init__(self, model: PreTrainedModel, config: Config, plan: BatchPlan, vocab_limit: int) -> None:
        self.model = model
        self.config = config
        self.plan = plan
        self.vocab_limit = vocab_limit
        self.optimizer_steps = 0
        self.version = 0
        self.optimizer = self._new_optimizer()

    @property
    def device(self) -> torch.device:
        return self.model.device

    def _new_optimizer(self) -> torch.optim.AdamW:
        optim = self.config.actor_rollout_ref.actor.optim
        parameters = [parameter for _, parameter in self.weights()]
        return torch.optim.AdamW(
            parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
        )

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All parameters by name, tied ones once, in the model's order."""
        return self.model.named_parameters()

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> Batch:
        """`batch` with the ragged float32 columns `log_probs` and `entropy`, one value a response token."""
        cut = self.plan.log_prob
        columns = forward_log_probs(self.model, batch, cut.micro_batch_size, self._scoring(), cut.max_tokens)
        return batch.with_columns(columns)

    def _scoring(self) -> "Scoring":
        return Scoring(temperature=self.config.actor_rollout_ref.rollout.temperature, vocab_limit=self.vocab_limit)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Take the optimizer steps of training step `step` and raise the policy version to it.

        `batch` holds `prompt_ids, response_ids, loss_mask, advantages` (ragged), `old_log_probs` or, where the update
        is exactly on-policy, `rollout_log_probs` in their place (measured, never trained on), and `ref_log_probs`
        where the loss has a KL term. Returns metrics under verl's names, averaged over the optimizer steps.
        """
        rate = learning_rate(self.config.actor_rollout_ref.actor.optim, step, self.plan.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        totals: dict[str, list[float]] = {}
        for _ in range(self.config.actor_rollout_ref.actor.ppo_epochs):
            for mini_batch in self._mini_batches(batch):
                for key, value in self._optimizer_step(batch, mini_batch).items():
                    totals.setdefault(key, []).append(value)
        self.version = step
        metrics = {key: sum(values) / len(values) for key, values in totals.items()}
        for counter in ("actor/skipped_updates", "actor/empty_batches"):
            metrics[counter] = sum(totals.get(counter, []))
        metrics["training/dropped_samples"] = float(self._left_out(batch))
        return metrics | {"actor/lr": rate, "training/optimizer_steps": float(self.optimizer_steps)}

    def _mini_batches(self, batch: Batch) -> Iterator[MiniBatch]:
        """The rows of each optimizer step, in order; a smaller last one is normalised by its own counts."""
        masks = batch.ragged("loss_mask")
        before = torch.cat([masks.values.new_zeros(1, dtype=torch.int64), masks.values.long().cumsum(0)])
        trained = before[masks.offsets[1:]] - before[masks.offsets[:-1]]
        for rows in torch.arange(len(batch) - self._left_out(batch)).split(self.plan.actor.samples_per_mini_batch):
            yield MiniBatch(rows=rows, num_tokens=int(trained[rows].sum()), num_sequences=len(rows))

    def _left_out(self, batch: Batch) -> int:
        """Samples after the last whole mini-batch, where they are to be left out."""
        drops = self.config.actor_rollout_ref.actor.drop_last
        return len(batch) % self.plan.actor.samples_per_mini_batch if drops else 0

    def _optimizer_step(self, batch: Batch, mini_batch: MiniBatch) -> dict[str, float]:
        """Gradient accumulation over one mini-batch; no step on an empty batch or a gradient that is not finite."""
        skipped = {"actor/skipped_updates": 0.0, "actor/empty_batches": 0.0}
        if mini_batch.num_tokens == 0:
            return skipped | {"actor/empty_batches": 1.0}
        self.optimizer.zero_grad(set_to_none=True)
        metrics: dict[str, float] = {}
        try:
            cut = self.plan.actor
            for rows in micro_batches(mini_batch.rows, sample_lengths(batch), cut.micro_batch_size, cut.max_tokens):
                for key, value in self._backward(batch, rows, mini_batch).items():
                    earlier = metrics.get(key, 0.0)
                    metrics[key] = max(earlier, value) if key.endswith("_max") else earlier + value
            norm = float(clip_grad_norm_(self.model.parameters(), self.config.actor_rollout_ref.actor.grad_clip))
        except NonFiniteError:
            norm = math.nan
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            return metrics | skipped | {"actor/grad_norm": norm, "actor/skipped_updates": 1.0}
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer_steps += 1
        return metrics | skipped | {"actor/grad_norm": norm}

    def _backward(self, batch: Batch, rows: torch.Tensor, mini_batch: MiniBatch) -> dict[str, float]:
        """Loss and gradient of one micro-batch, as its share of the mini-batch."""
        actor = self.config.actor_rollout_ref.actor
        on_policy = "old_log_probs" not in batch.names
        layout = lay_out(batch.ragged("prompt_ids"), batch.ragged("response_ids"), rows, self.device)
        log_probs, entropy = response_log_probs(
            self.model,
            layout,
            temperature=self.config.actor_rollout_ref.rollout.temperature,
            vocab_limit=self.vocab_limit,
            entropy_use="gradient" if actor.entropy_coeff > 0 else "value" if on_policy else "none",
        )
        mask = self._dense(batch, "loss_mask", rows, layout).bool()
        old_log_probs = log_probs.detach() if on_policy else self._dense(batch, "old_log_probs", rows, layout)
        policy = POLICY_LOSSES["vanilla"](
            log_probs,
            old_log_probs,
            self._dense(batch, "advantages", rows, layout),
            mask,
            clip_ratio_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
            clip_ratio_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
            clip_ratio_c=actor.clip_ratio_c,
        )
        terms = {"actor/pg_loss": self._mean(policy.token_losses, mask, mini_batch)}
        loss = terms["actor/pg_loss"]
        if entropy is not None and actor.entropy_coeff > 0:
            terms["actor/entropy_loss"] = self._mean(entropy, mask, mini_batch)
            loss = loss - actor.entropy_coeff * terms["actor/entropy_loss"]
        if actor.use_kl_loss:
            reference = self._dense(batch, "ref_log_probs", rows, layout)
            kl = kl_penalty(log_probs, reference, actor.kl_loss_type, response_mask=mask)
            terms["actor/kl_loss"] = self._mean(kl, mask, mini_batch)
            loss = loss + actor.kl_loss_coef * terms["actor/kl_loss"]
        loss.backward()
        terms["actor/loss"] = loss
        metrics = {key: float(value.detach()) for key, value in terms.items()}
        for key, (numerator, _) in policy.metrics.items():
            metrics[key] = float(numerator) / mini_batch.num_tokens
        if on_policy:
            assert entropy is not None
            sampled = self._dense(batch, "rollout_log_probs", rows, layout)
            found = mismatch(sampled[mask], old_log_probs[mask], entropy[mask].detach())
            share = int(mask.sum()) / mini_batch.num_tokens
            metrics |= {key: value if key.endswith("_max") else value * share for key, value in found.items()}
        return metrics

    def _dense(self, batch: Batch, name: str, rows: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        values = batch.select([name]).reorder(rows)
        return values.padded(name, width=layout.response_ids.shape[1])[0].to(self.device)

    def _mean(self, losses: torch.Tensor, mask: torch.Tensor, mini_batch: MiniBatch) -> torch.Tensor:
        actor = self.config.actor_rollout_ref.actor
        return aggregate(
            losses,
            mask,
            actor.loss_agg_mode,
            num_tokens=mini_batch.num_tokens,
            num_sequences=mini_batch.num_sequences,
            scale_factor=actor.loss_scale_factor or float(self.config.data.max_response_length),
        )

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """AdamW's moments and step counts as flat tensors `<parameter>.<moment>`."""
        state: dict[str, torch.Tensor] = {}
        for name, parameter in self.weights():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                state[f"{name}.{key}"] = value
        return state

    def load_optimizer_state(self, state: dict[str, torch.Tensor]) -> None:
        """Inverse of `optimizer_state`.

        Raises:
            ModelError: when a tensor belongs to no parameter, or some parameters have state and others not.
        """
        self.optimizer = self._new_optimizer()
        remaining = dict(state)
        for name, parameter in self.weights():
            moments = {key: remaining.pop(f"{name}.{key}", None) for key in ("step", "exp_avg", "exp_avg_sq")}
            present = {key: value for key, value in moments.items() if value is not None}
            if present and len(present) != len(moments):
                raise ModelError(f"The optimizer state of {name} lacks {sorted(moments.keys() - present.keys())}.")
            if present:
                # AdamW keeps its step count on the host, the moments beside the parameter
                self.optimizer.state[parameter] = {
                    key: value.clone() if key == "step" else value.to(parameter.device).clone()
                    for key, value in present.items()
                }
        if remaining:
            raise ModelError(f"The optimizer state names parameters that the model lacks: {sorted(remaining)[:3]}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """The distribution that log-probs are taken under."""

    temperature: float
    vocab_limit: int


@torch.no_grad()
def forward_log_probs(
    model: PreTrainedModel, batch: Batch, micro_batch_size: int, scoring: Scoring, max_tokens: int | None = None
) -> dict[str, Ragged]:
    """`log_probs` and `entropy` of every response token, ragged float32 on the host."""
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    parts: list[Batch] = []
    order: list[torch.Tensor] = []
    for rows in micro_batches(torch.arange(len(batch)), sample_lengths(batch), micro_batch_size, max_tokens):
        order.append(rows)
        layout = lay_out(prompts, responses, rows, model.device)
        values, entropy = response_log_probs(
            model, layout, temperature=scoring.temperature, vocab_limit=scoring.vocab_limit, entropy_use="value"
        )
        assert entropy is not None
        mask = layout.response_mask.cpu()
        named = {"log_probs": values, "entropy": entropy}
        parts.append(Batch({name: Ragged.from_padded(tensor.cpu(), mask) for name, tensor in named.items()}))
    whole = Batch.concat(parts).reorder(torch.argsort(torch.cat(order)))
    return {name: whole.ragged(name) for name in ("log_probs", "entropy")}
