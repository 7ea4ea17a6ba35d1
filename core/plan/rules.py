"""Every rule that batch sizes and devices must keep, in words and numbers, and the nearest values that keep them.

Invariant: a rule is data: when it applies, whether it holds, what to say, and which keys would mend it. The nearest
legal value of a key is found by trying values outwards under all rules, so that no suggestion breaks another one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .sizes import KEYS, Sizes

_REACH = 4096
"""How far from the given value a legal one is looked for."""


def _always(_: Sizes) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Something that must hold."""

    holds: Callable[[Sizes], bool]
    says: Callable[[Sizes], str]
    """the rule and its numbers, without the keys"""
    keys: tuple[str, ...]
    """fields of `Sizes` that mend it, best first"""
    applies: Callable[[Sizes], bool] = _always


def faults(sizes: Sizes) -> list[str]:
    """One text for each rule that fails: the rule in words and numbers, the keys, the nearest legal values."""
    return [_fault(rule, sizes) for rule in RULES if rule.applies(sizes) and not rule.holds(sizes)]


def _fault(rule: Rule, sizes: Sizes) -> str:
    ways = [way for key in rule.keys if (way := _way(rule, key, sizes))]
    keys = ", ".join(f"{KEYS[key]}={getattr(sizes, key)}" for key in rule.keys)
    advice = " or ".join(ways) if ways else "no value of one key alone mends it"
    return f"{rule.says(sizes)} [{keys}]. Nearest legal: {advice}."


def _way(rule: Rule, key: str, sizes: Sizes) -> str:
    """`data.train_batch_size=48 or 64`, under all rules on that key; where no value keeps all of them, under those
    that are best mended by it, and at the last under this rule alone."""
    related = [other for other in RULES if key in other.keys]
    foremost = [other for other in related if other.keys[0] == key or other is rule]
    tries = (_nearest(key, sizes, rules) for rules in (related, foremost, [rule]))
    found = next(filter(None, tries), [])
    return f"{KEYS[key]}={' or '.join(map(str, found))}" if found else ""


def _nearest(key: str, sizes: Sizes, rules: list[Rule]) -> list[int]:
    """The nearest value below and above the given one that keep `rules`, nearer first; at most two."""
    given = getattr(sizes, key)
    below = (value for value in range(given - 1, max(0, given - _REACH), -1))
    found = [_first_legal(key, sizes, rules, values) for values in (below, range(given + 1, given + _REACH))]
    return sorted((value for value in found if value), key=lambda value: abs(value - given))


def _first_legal(key: str, sizes: Sizes, rules: list[Rule], values: Iterator[int] | range) -> int | None:
    for value in values:
        changed = replace(sizes, **{key: value})
        if all(rule.holds(changed) for rule in rules if rule.applies(changed)):
            return value
    return None


def _nodes_fit(sizes: Sizes) -> bool:
    """A replica stays within a node, or covers whole nodes."""
    if sizes.replica_gpus <= sizes.gpus_per_node:
        return sizes.gpus_per_node % sizes.replica_gpus == 0
    return sizes.replica_gpus % sizes.gpus_per_node == 0


def _per_rank(sizes: Sizes, mini: int) -> int:
    """Samples of a mini-batch on one DP rank, rounded down."""
    return mini * sizes.n // sizes.dp


def _train_rules(name: str, mini: str, micro: str, tokens: str, dynamic: Callable[[Sizes], bool]) -> list[Rule]:
    """The rules of a model that is trained: `actor` or `critic`; `mini`, `micro`, `tokens` are fields of `Sizes`."""

    def used(sizes: Sizes) -> bool:
        return name == "actor" or sizes.has_critic

    def is_static(sizes: Sizes) -> bool:
        return used(sizes) and not dynamic(sizes) and mini_fits(sizes)

    def is_dynamic(sizes: Sizes) -> bool:
        return used(sizes) and dynamic(sizes)

    def mini_of(sizes: Sizes) -> int:
        return getattr(sizes, mini)

    def micro_of(sizes: Sizes) -> int:
        return getattr(sizes, micro)

    def mini_fits(sizes: Sizes) -> bool:
        return mini_of(sizes) * sizes.n % sizes.dp == 0

    return [
        Rule(
            applies=used,
            holds=lambda s: s.train_batch % mini_of(s) == 0,
            says=lambda s: (
                f"a step must be whole {name} mini-batches: {s.train_batch} prompts a step are not a multiple of "
                f"{mini_of(s)} prompts an optimizer step"
            ),
            keys=(mini, "train_batch"),
        ),
        Rule(
            applies=used,
            holds=mini_fits,
            says=lambda s: (
                f"every DP rank must get the same number of samples of an {name} mini-batch: {mini_of(s)} prompts × "
                f"{s.n} responses = {mini_of(s) * s.n} samples over {s.dp} ranks"
            ),
            keys=(mini, "n"),
        ),
        Rule(
            applies=is_static,
            holds=lambda s: micro_of(s) <= _per_rank(s, mini_of(s)),
            says=lambda s: (
                f"an {name} micro-batch cannot be larger than a rank's share of the mini-batch: {micro_of(s)} samples "
                f"a pass, {_per_rank(s, mini_of(s))} samples a rank ({mini_of(s)} × {s.n} / {s.dp})"
            ),
            keys=(micro, mini),
        ),
        Rule(
            applies=lambda s: is_static(s) and micro_of(s) <= _per_rank(s, mini_of(s)),
            holds=lambda s: _per_rank(s, mini_of(s)) % micro_of(s) == 0,
            says=lambda s: (
                f"a rank's share of the {name} mini-batch must be whole micro-batches: {_per_rank(s, mini_of(s))} "
                f"samples ({mini_of(s)} × {s.n} / {s.dp}) in passes of {micro_of(s)}"
            ),
            keys=(micro, mini),
        ),
        Rule(
            applies=is_dynamic,
            holds=lambda s: getattr(s, tokens) * s.sequence_parallel >= s.longest,
            says=lambda s: (
                f"the longest sample must fit the {name}'s token budget: {s.max_prompt} + {s.max_response} = "
                f"{s.longest} tokens, budget {getattr(s, tokens)} × {s.sequence_parallel} sequence-parallel GPUs = "
                f"{getattr(s, tokens) * s.sequence_parallel}"
            ),
            keys=(tokens, "max_response", "max_prompt"),
        ),
    ]


def _budget_rule(name: str, tokens: str, used: Callable[[Sizes], bool]) -> Rule:
    return Rule(
        applies=used,
        holds=lambda s: getattr(s, tokens) * s.sequence_parallel >= s.longest,
        says=lambda s: (
            f"the longest sample must fit the token budget of {name} log-probs: {s.max_prompt} + {s.max_response} = "
            f"{s.longest} tokens, budget {getattr(s, tokens)} × {s.sequence_parallel} sequence-parallel GPUs = "
            f"{getattr(s, tokens) * s.sequence_parallel}"
        ),
        keys=(tokens, "max_response", "max_prompt"),
    )


_DEVICES = [
    Rule(
        holds=lambda s: s.world % s.model_parallel == 0,
        says=lambda s: (
            f"the GPUs must be whole training shard groups: {s.nnodes} × {s.gpus_per_node} = {s.world} GPUs in groups "
            f"of {s.model_parallel} "
            + (f"(TP {s.tp} × PP {s.pp} × CP {s.cp})" if s.megatron else f"(sequence parallel {s.sp})")
        ),
        keys=("gpus_per_node", "nnodes", "sp", "tp", "pp", "cp"),
    ),
    Rule(
        holds=lambda s: s.world % s.replica_gpus == 0,
        says=lambda s: (
            f"the GPUs must be whole inference replicas, or some would stand idle: {s.nnodes} × {s.gpus_per_node} = "
            f"{s.world} GPUs in replicas of {s.replica_gpus} (TP {s.rollout_tp} × DP {s.rollout_dp} × PP "
            f"{s.rollout_pp})"
        ),
        keys=("rollout_tp", "gpus_per_node", "nnodes"),
    ),
    Rule(
        applies=lambda s: s.nnodes > 1 and s.world % s.replica_gpus == 0,
        holds=_nodes_fit,
        says=lambda s: (
            f"a replica must lie within one node or cover whole nodes: {s.replica_gpus} GPUs a replica, "
            f"{s.gpus_per_node} a node"
        ),
        keys=("rollout_tp", "gpus_per_node"),
    ),
    Rule(
        applies=lambda s: s.rollout_ep > 1,
        holds=lambda s: s.rollout_ep == s.rollout_tp * s.rollout_dp,
        says=lambda s: (
            f"expert parallelism must span a replica's TP × DP: {s.rollout_ep} is not {s.rollout_tp} × {s.rollout_dp}"
        ),
        keys=("rollout_ep",),
    ),
    Rule(
        applies=lambda s: s.megatron,
        holds=lambda s: s.sp == 1,
        says=lambda s: (
            f"Ulysses sequence parallelism belongs to FSDP; Megatron splits sequences by context parallelism: {s.sp}"
        ),
        keys=("sp",),
    ),
    Rule(
        applies=lambda s: not s.megatron,
        holds=lambda s: s.tp == s.pp == s.cp == 1,
        says=lambda s: (
            f"TP {s.tp}, PP {s.pp} and CP {s.cp} of training are Megatron's and change nothing under "
            "actor_rollout_ref.actor.strategy=fsdp2; set that to megatron or these to 1"
        ),
        keys=("tp", "pp", "cp"),
    ),
]

_DATA = [
    Rule(
        applies=lambda s: s.num_prompts is not None,
        holds=lambda s: s.train_batch <= (s.num_prompts or 0),
        says=lambda s: (
            f"a step cannot hold more prompts than the data: {s.train_batch} prompts a step, data.train_files holds "
            f"{s.num_prompts}"
        ),
        keys=("train_batch",),
    ),
    Rule(
        applies=lambda s: s.needs_groups,
        holds=lambda s: s.n >= 2,
        says=lambda s: (
            f"the advantage estimator compares the responses to one prompt and needs at least 2: {s.n} a prompt"
        ),
        keys=("n",),
    ),
    Rule(
        holds=lambda s: s.train_batch * s.n % s.dp == 0,
        says=lambda s: (
            f"every DP rank must get the same number of samples: {s.train_batch} prompts × {s.n} responses = "
            f"{s.train_batch * s.n} samples over {s.dp} ranks"
        ),
        keys=("train_batch", "n"),
    ),
    Rule(
        applies=lambda s: s.max_model_len > 0,
        holds=lambda s: s.longest <= s.max_model_len,
        says=lambda s: (
            f"prompt and response must fit the engine's context: {s.max_prompt} + {s.max_response} = {s.longest} "
            f"tokens, context {s.max_model_len}"
        ),
        keys=("max_model_len", "max_response", "max_prompt"),
    ),
    Rule(
        holds=lambda s: s.dynamic == s.log_prob_dynamic,
        says=lambda s: (
            "training and log-probs must be cut into micro-batches in one way, or the first update is not exactly "
            f"on-policy: actor.use_dynamic_bsz={s.dynamic}, rollout.log_prob_use_dynamic_bsz={s.log_prob_dynamic}"
        ),
        keys=(),
    ),
]

_MODEL = [
    Rule(
        applies=lambda s: s.shape is not None,
        holds=lambda s: s.shape is None or s.longest <= s.shape.max_positions,
        says=lambda s: (
            f"prompt and response must fit the model's positions: {s.max_prompt} + {s.max_response} = {s.longest} "
            f"tokens, the model has {s.shape.max_positions if s.shape else '?'}"
        ),
        keys=("max_response", "max_prompt"),
    ),
    Rule(
        applies=lambda s: s.shape is not None and s.sp > 1,
        holds=lambda s: s.shape is None or s.shape.attention_heads % s.sp == 0,
        says=lambda s: (
            f"sequence parallelism splits attention heads: {s.shape.attention_heads if s.shape else '?'} heads over "
            f"{s.sp} GPUs"
        ),
        keys=("sp",),
    ),
    Rule(
        applies=lambda s: s.shape is not None and s.rollout_tp > 1,
        holds=lambda s: s.shape is None or s.shape.attention_heads % s.rollout_tp == 0,
        says=lambda s: (
            f"tensor parallelism splits attention heads: {s.shape.attention_heads if s.shape else '?'} heads over "
            f"{s.rollout_tp} GPUs of a replica"
        ),
        keys=("rollout_tp",),
    ),
    Rule(
        applies=lambda s: s.shape is not None and s.megatron and s.tp > 1,
        holds=lambda s: s.shape is None or s.shape.attention_heads % s.tp == 0,
        says=lambda s: (
            f"tensor parallelism splits attention heads: {s.shape.attention_heads if s.shape else '?'} heads over "
            f"{s.tp} GPUs in training"
        ),
        keys=("tp",),
    ),
    Rule(
        applies=lambda s: s.shape is not None and s.megatron and s.pp > 1,
        holds=lambda s: s.shape is None or s.shape.layers % s.pp == 0,
        says=lambda s: (
            f"pipeline stages must hold the same number of layers: {s.shape.layers if s.shape else '?'} layers in "
            f"{s.pp} stages"
        ),
        keys=("pp",),
    ),
]

RULES: list[Rule] = [
    *_DEVICES,
    *_DATA,
    *_train_rules("actor", "mini", "micro", "max_tokens", lambda s: s.dynamic),
    *_train_rules("critic", "critic_mini", "critic_micro", "critic_tokens", lambda s: s.critic_dynamic),
    _budget_rule("the policy's", "log_prob_tokens", lambda s: s.log_prob_dynamic),
    _budget_rule("the reference's", "ref_tokens", lambda s: s.has_reference and s.ref_dynamic),
    *_MODEL,
]
"""In the order in which they are reported: devices, data, training, log-probs, model."""
