"""Which GPU does what: inference replicas and training shard groups over the same devices."""

from dataclasses import dataclass

from ..config.schema import Config
from .batch_plan import BatchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One GPU's parts; every index counts from 0."""

    gpu: int
    """global rank"""
    node: int
    replica: int
    replica_rank: int
    """within the replica: its TP (and DP, PP) rank, TP fastest"""
    dp: int
    """training shard group"""
    parts: tuple[tuple[str, int], ...]
    """position within the shard group, such as (("sp", 1),) or (("tp", 0), ("cp", 0), ("pp", 1))"""


def places(config: Config, plan: BatchPlan) -> list[Place]:
    """Every GPU of the plan, in rank order.

    FSDP: ranks of one sequence-parallel group are neighbours. Megatron: tensor parallelism is innermost, then context
    parallelism, data parallelism, pipeline parallelism, as Megatron-core orders its groups.
    """
    return [_place(config, plan, gpu) for gpu in range(plan.world)]


def _place(config: Config, plan: BatchPlan, gpu: int) -> Place:
    actor = config.actor_rollout_ref.actor
    if actor.strategy == "megatron":
        tp, cp = actor.megatron.tensor_model_parallel_size, actor.megatron.context_parallel_size
        rest, tp_rank = divmod(gpu, tp)
        rest, cp_rank = divmod(rest, cp)
        pp_rank, dp = divmod(rest, plan.dp_size)
        parts = (("tp", tp_rank), ("cp", cp_rank), ("pp", pp_rank))
    else:
        dp, sp_rank = divmod(gpu, plan.model_parallel)
        parts = (("sp", sp_rank),)
    replica, replica_rank = divmod(gpu, plan.replica_gpus)
    node = gpu // config.trainer.n_gpus_per_node
    return Place(gpu=gpu, node=node, replica=replica, replica_rank=replica_rank, dp=dp, parts=parts)
