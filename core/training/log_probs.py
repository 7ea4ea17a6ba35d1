"""Log-probabilities of response tokens under a causal language model, without the logits of a whole batch.

Shift convention, stated once: the logits at position t score the token at t + 1. A response of R tokens after a prompt
of P tokens is scored by the logits at positions P-1 … P+R-2; the first token of a sequence has no log-prob.
"""

from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..errors import ModelError
from .attention import PACKED, use_attention
from .layout import TokenLayout

EntropyUse = Literal["none", "value", "gradient"]
"""Whether entropy is computed, and whether the graph keeps what its gradient needs."""
_AFTER_HEAD = ("final_logit_softcapping", "logits_scaling", "logit_scale")
_LOGITS_AT_ONCE = 2**27
"""float32 numbers: half a GiB, and a few times that while their gradient is computed"""


class TokenScorer(nn.Module):
    """A causal language model as training uses it: log-probs of response tokens, never the logits of a whole batch.

    A module of its own, so that one forward pass of it is all that a sharded model (`parallel.py`) has to know of.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, layout: TokenLayout, *, temperature: float, vocab_limit: int, entropy_use: EntropyUse
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs `[B, T]` and entropies `[B, T]` (nats) of the response tokens, 0 outside the mask.

        The distribution is softmax(logits / temperature) over the first `vocab_limit` ids: what the sampler drew from.
        Ids beyond the tokenizer (padded embedding rows) take part neither there nor here.

        Raises:
            ModelError: the model computes its logits in another way than by one linear layer.
        """
        score = partial(_scored, output_head(self.model), temperature, vocab_limit, entropy_use)
        hidden = hidden_states(self.model.base_model, layout).index_select(0, layout.predicted_from)
        targets = layout.response_ids[layout.response_mask]
        at_once = max(1, _LOGITS_AT_ONCE // self.model.config.vocab_size)
        keeps = torch.is_grad_enabled() and len(targets) > at_once  # one part alone gains nothing by being done twice
        parts = [
            checkpoint(score, states, ids, use_reentrant=False) if keeps else score(states, ids)
            for states, ids in zip(hidden.split(at_once), targets.split(at_once), strict=True)
        ]
        log_probs = layout.dense(torch.cat([values for values, _ in parts]))
        if entropy_use == "none":
            return log_probs, None
        return log_probs, layout.dense(torch.cat([entropy for _, entropy in parts]))


def output_head(model: PreTrainedModel) -> nn.Module:
    """The layer from hidden states to logits.

    Raises:
        ModelError: there is none, or the model does more to its logits than that layer.
    """
    for name in _AFTER_HEAD:
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise ModelError(f"{type(model).__name__} changes its logits by {name}, which training does not know.")
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no output embeddings; a causal language model is needed.")
    return head


def hidden_states(body: nn.Module, layout: TokenLayout) -> Tensor:
    """The last hidden states `[N, H]` of the packed tokens."""
    use_attention(cast(PreTrainedModel, body), PACKED)
    states = body(
        input_ids=layout.input_ids[None],
        position_ids=layout.position_ids[None],
        spans=layout.spans,
        use_cache=False,
    ).last_hidden_state
    return states.squeeze(0)


def _scored(
    head: nn.Module, temperature: float, vocab_limit: int, entropy_use: EntropyUse, states: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies `[R]` of `ids` `[R]` from hidden states `[R, H]`; no entropy: an empty tensor."""
    logits = head(states)[:, :vocab_limit].float()
    if temperature != 1.0:
        logits = logits / temperature
    normaliser = torch.logsumexp(logits, dim=-1)
    log_probs = logits.gather(1, ids[:, None]).squeeze(1) - normaliser
    if entropy_use == "none":
        return log_probs, log_probs.new_empty(0)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_use == "gradient"):
        probabilities = torch.exp(logits - normaliser[:, None])
        return log_probs, normaliser - (probabilities * logits).sum(-1)
