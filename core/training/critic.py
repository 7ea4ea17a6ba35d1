"""The critic: a language model's body under a value head, its values, and its updates.

Shift convention as in `log_probs.py`: the value of response token t is read where its logits are, at position P-1+t, so
it is what the critic expects before the token was drawn.
"""

from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from ..algorithms import aggregate, value_loss
from ..batch import Batch, Ragged
from ..config.schema import Config
from ..errors import ModelError
from ..plan import BatchPlan
from .flops import ModelFlops
from .layout import TokenLayout, lay_out
from .log_probs import hidden_states
from .memory import MemoryLimit
from .micro_batches import micro_batches
from .mini_batch_trainer import MiniBatch, MiniBatchTrainer
from .model_folder import LOAD_FAULTS, check_folder, no_progress_bars
from .optimizer import ModelOptimizer

HEAD = "value_head.safetensors"


class ValueModel(nn.Module):
    """Hidden states of a causal language model to one number a position.

    The head begins at zero: the first values are 0, whatever the model, and the first advantages those of REINFORCE.
    """

    def __init__(self, body: PreTrainedModel) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(body.config.hidden_size, 1, device=body.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, layout: TokenLayout) -> Tensor:
        """Float32 values `[B, T]` at the response tokens, 0 outside the mask."""
        hidden = hidden_states(self.body, layout).index_select(0, layout.predicted_from)
        weight, bias = self.head.weight.float(), self.head.bias.float()  # a sharded pass may hold them in bfloat16
        return layout.dense(nn.functional.linear(hidden.float(), weight, bias).squeeze(-1))

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Write the body as a Hugging Face folder, and the head beside it; `state`: this model's, whole."""
        parts: dict[str, dict[str, Tensor]] = {"body": {}, "head": {}}
        for name, tensor in state.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor.cpu().contiguous()
        self.body.save_pretrained(folder, state_dict=parts["body"])
        save_file(parts["head"], folder / HEAD)


def load_critic(folder: Path, *, device: torch.device, trust_remote_code: bool) -> ValueModel:
    """A critic that `ValueModel.save` wrote, or a fresh one on any model's body.

    Raises:
        ModelError: for a folder that cannot be used.
    """
    check_folder(folder, trust_remote_code=trust_remote_code)
    try:
        with no_progress_bars():
            body = AutoModel.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, trust_remote_code=trust_remote_code
            )
    except LOAD_FAULTS as error:
        raise ModelError(f"Cannot load the critic's model in {folder}: {error}") from error
    model = ValueModel(body.to(device).eval())
    if (folder / HEAD).is_file():
        model.head.load_state_dict(load_file(folder / HEAD))
    return model


class CriticEngine(MiniBatchTrainer):
    """Trains one value model in this process."""

    kind = "critic"

    def __init__(self, model: ValueModel, config: Config, plan: BatchPlan) -> None:
        assert plan.critic is not None, "the plan has no critic"
        critic = config.critic
        optimizer = ModelOptimizer(model, critic.optim, critic.fsdp, model.head)
        super().__init__(plan.critic, optimizer, grad_clip=critic.grad_clip, steps=plan.steps)
        self.critic = model
        self.flops = ModelFlops.of(model, model.body.config, model.head)
        self.settings = critic
        self.max_response_length = config.data.max_response_length
        self.forward_limit = MemoryLimit(
            "log_prob", plan.critic.micro_batch_size, plan.critic.max_tokens, shared=not self.ranks.alone
        )
        self.drop_last = config.actor_rollout_ref.actor.drop_last

    @torch.no_grad()
    def values(self, batch: Batch) -> Ragged:
        """One float32 value a response token, in passes that fit the memory."""
        work = partial(self._values, batch)
        return self._without_backward(self.critic, self.forward_limit, work, batch)

    def _values(self, batch: Batch, size: int, tokens: int | None) -> Ragged:
        prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
        parts, order = [], []
        passes = micro_batches(batch, torch.arange(len(batch)), size, tokens)
        for rows in (one.rows for one in self.ranks.share(passes)):
            layout = lay_out(prompts, responses, rows, self.device)
            found = self.critic(layout).cpu()
            parts.append(Batch({"values": Ragged.from_padded(found, layout.response_mask.cpu())}))
            order.append(rows)
        return self.ranks.merged(Batch.concat(parts), torch.cat(order)).ragged("values")

    def _backward(self, batch: Batch, rows: Tensor, mini_batch: MiniBatch) -> dict[str, float]:
        layout = lay_out(batch.ragged("prompt_ids"), batch.ragged("response_ids"), rows, self.device)
        mask = self._dense(batch, "loss_mask", rows, layout).bool()
        found = value_loss(
            self.critic(layout),
            self._dense(batch, "values", rows, layout),
            self._dense(batch, "returns", rows, layout),
            mask,
            cliprange_value=self.settings.cliprange_value,
        )
        loss = aggregate(
            found.token_losses,
            mask,
            self.settings.loss_agg_mode,
            num_tokens=mini_batch.num_tokens,
            num_sequences=mini_batch.num_sequences,
            scale_factor=float(self.max_response_length),
        )
        loss.backward()
        metrics = {key: float(numerator) / mini_batch.num_tokens for key, (numerator, _) in found.metrics.items()}
        return metrics | {"critic/vf_loss": float(loss.detach())} | self._work(layout)
