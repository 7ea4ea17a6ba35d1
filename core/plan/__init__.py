"""The batch plan: prompts, responses and GPUs in, what each process does out; no GPU, no torch."""

from .batch_plan import BatchPlan, ForwardPlan, TrainPlan, make_plan
from .packing import balance, cut_in_order, pack
from .sizes import ModelShape

__all__ = ["BatchPlan", "ForwardPlan", "ModelShape", "TrainPlan", "balance", "cut_in_order", "make_plan", "pack"]
