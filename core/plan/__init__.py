"""The batch plan: prompts, responses and GPUs in, what each process does out; no GPU, no torch."""

from .batch_plan import BatchPlan, ForwardPlan, TrainPlan, make_plan
from .packing import balance, cut_sorted, pack
from .sizes import ModelShape

__all__ = ["BatchPlan", "ForwardPlan", "ModelShape", "TrainPlan", "balance", "cut_sorted", "make_plan", "pack"]
