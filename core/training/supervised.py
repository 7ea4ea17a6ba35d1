"""Supervised fine-tuning on worked examples: the warm start before reinforcement.

The loss is the mean negative log-likelihood of the answer's tokens (its stop token included); prompt tokens carry none.
"""

from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from ..batch import Batch
from ..config.schema import WarmStartSection
from .layout import lay_out
from .log_probs import TokenScorer


def fine_tune(
    model: PreTrainedModel,
    examples: Batch,
    settings: WarmStartSection,
    *,
    seed: int,
    vocab_limit: int,
    on_step: Callable[[int, float], None] | None = None,
) -> dict[str, float]:
    """Train `model` in place for `settings.steps` AdamW steps, the rate falling linearly to zero.

    `examples` holds the ragged columns `prompt_ids` and `response_ids`; batches are drawn with replacement from the
    seed. Returns the loss (nats a token) of the first and the last step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    scorer = TokenScorer(model)
    draws = np.random.Generator(np.random.Philox(key=seed))
    prompts, responses = examples.ragged("prompt_ids"), examples.ragged("response_ids")
    losses: list[float] = []
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * (1.0 - step / settings.steps)
        rows = torch.from_numpy(draws.integers(len(examples), size=settings.batch_size))
        layout = lay_out(prompts, responses, rows, model.device)
        log_probs, _ = scorer(layout, temperature=1.0, vocab_limit=vocab_limit, entropy_use="none")
        loss = -log_probs.sum() / layout.response_mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        if on_step is not None:
            on_step(step + 1, losses[-1])
    return {"warm_start/loss_first": losses[0], "warm_start/loss_last": losses[-1]}
