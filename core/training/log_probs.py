"""Log-probabilities of response tokens under a causal language model.

Shift convention, stated once: the logits at position t score the token at t + 1. A response of R tokens after a prompt
of P tokens is scored by the logits at positions P-1 … P+R-2; the first token of a sequence has no log-prob.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel

from ..batch import Ragged

EntropyUse = Literal["none", "value", "gradient"]
"""Whether entropy is computed, and whether the graph keeps what its gradient needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLayout:
    """Prompts and responses of one micro-batch, padded on the right: causal attention needs no mask then."""

    input_ids: torch.Tensor
    """`[B, W]`, prompt then response then padding"""
    prompt_lengths: torch.Tensor
    """`[B]`"""
    response_ids: torch.Tensor
    """`[B, T]`"""
    response_mask: torch.Tensor
    """`[B, T]` bool, from lengths and never from ids"""


def lay_out(prompts: Ragged, responses: Ragged, rows: torch.Tensor, device: torch.device) -> TokenLayout:
    """Lay out the given rows (`[B]` int64) of ragged prompts and responses."""
    prompts, responses = prompts.take(rows), responses.take(rows)
    prompt_ids, _ = prompts.padded(None, "right", 0)
    response_ids, mask = responses.padded(max(1, int(responses.lengths.max())), "right", 0)
    width = int((prompts.lengths + responses.lengths).max())
    positions = torch.arange(width)
    # which token of its own prompt or response stands at each position
    from_prompt = positions.expand(len(rows), -1).clamp(max=prompt_ids.shape[1] - 1)
    from_response = (positions - prompts.lengths[:, None]).clamp(min=0, max=response_ids.shape[1] - 1)
    in_prompt = positions < prompts.lengths[:, None]
    input_ids = torch.where(in_prompt, prompt_ids.gather(1, from_prompt), response_ids.gather(1, from_response))
    return TokenLayout(
        input_ids=input_ids.to(device),
        prompt_lengths=prompts.lengths.to(device),
        response_ids=response_ids.to(device),
        response_mask=mask.to(device),
    )


def response_log_probs(
    model: PreTrainedModel, layout: TokenLayout, *, temperature: float, vocab_limit: int, entropy_use: EntropyUse
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs `[B, T]` and entropies `[B, T]` (nats) of the response tokens, 0 outside the mask.

    The distribution is softmax(logits / temperature) over the first `vocab_limit` ids: what the sampler drew from.
    Ids beyond the tokenizer (padded embedding rows) take part neither there nor here.
    """
    first = int(layout.prompt_lengths.min()) - 1
    width = layout.input_ids.shape[1]
    logits = model(input_ids=layout.input_ids, use_cache=False, logits_to_keep=width - first).logits
    steps = torch.arange(layout.response_ids.shape[1], device=logits.device)
    position = (layout.prompt_lengths[:, None] - 1 - first + steps).clamp(max=logits.shape[1] - 1)
    scored = logits.gather(1, position[:, :, None].expand(-1, -1, logits.shape[2]))[..., :vocab_limit].float()
    scored = scored / temperature
    normaliser = torch.logsumexp(scored, dim=-1)
    chosen = scored.gather(-1, layout.response_ids[:, :, None]).squeeze(-1)
    log_probs = torch.where(layout.response_mask, chosen - normaliser, 0.0)
    entropy = None
    if entropy_use != "none":
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_use == "gradient"):
            probabilities = torch.exp(scored - normaliser[..., None])
            entropy = torch.where(layout.response_mask, normaliser - (probabilities * scored).sum(-1), 0.0)
    return log_probs, entropy
