"""The worker that holds a model: it generates, scores tokens and trains, colocated in one process.

Invariant: batches come and go as folders on the shared disk; only paths, sizes and metrics cross the process border.
Alone, its rollout engine serves the very tensors that are trained, so a weight sync copies nothing. Several workers
(ranks) hold the trained models in shards and the served one whole; all are called alike, and rank 0 writes.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from moonshift.core.batch import Batch, Ragged
from moonshift.core.errors import CheckpointError
from moonshift.core.plan.packing import spans
from moonshift.core.training.advantages import Stages, compute_advantages
from moonshift.core.training.correction import needs_old_log_probs
from moonshift.core.training.critic import CriticEngine, load_critic
from moonshift.core.training.engine import TorchTrainEngine
from moonshift.core.training.fingerprint import weights_sha256
from moonshift.core.training.flops import peak_flops, utilisation
from moonshift.core.training.fused import use_liger
from moonshift.core.training.log_probs import TokenScorer
from moonshift.core.training.lora import (
    adapter_off,
    adapter_state,
    add_adapter,
    base_sha256,
    gathered_merged_state,
    load_adapter,
    save_adapter,
)
from moonshift.core.training.measures import length_metrics, mismatch
from moonshift.core.training.memory import MemoryLimit, once_more
from moonshift.core.training.micro_batches import sample_lengths
from moonshift.core.training.mini_batch_trainer import MiniBatchTrainer
from moonshift.core.training.model import load_model, load_tokenizer, stop_ids
from moonshift.core.training.parallel import gathered_state, recompute_blocks, shard
from moonshift.core.training.rendering import decode_response
from moonshift.core.training.supervised import fine_tune
from moonshift.core.types import RolloutEngine

from ..engines import build_engine
from ..rewards import Finished, RewardStream
from .generators import restore_generators, save_generators, seed_generators
from .memory_log import log_memory
from .orders import RolloutOrder, WorkedExamples
from .process_group import alone
from .rank import RankWorker
from .waves import Waves

Tensors = dict[str, torch.Tensor]
ADAPTER_FOLDER = "adapter"
"""in a checkpoint, beside `model`"""
Module = TypeVar("Module", bound=torch.nn.Module)


class ModelWorker(RankWorker):
    """Roles actor, rollout and, where the loss needs one, ref; one rank of `plan.world`."""

    def learned_divisors(self) -> dict[str, int]:
        """How far passes are cut smaller because the memory ran out, by kind."""
        return {limit.what: limit.divisor for limit in self.limits.values() if limit.divisor > 1}

    def load(
        self,
        initial: str,
        checkpoint: str | None,
        critic: str | None = None,
        divisors: Mapping[str, int] | None = None,
    ) -> int:
        """Load the initial policy, or a checkpoint of it, the reference and the critic; returns the policy version.

        `critic`: folder of the model under a fresh value head, where one is needed. `divisors`: how far passes were
        cut smaller before, by kind, when the memory ran out.
        """
        self.memory.begin("load")
        folder = Path(checkpoint) / "model" if checkpoint else Path(initial)
        parts = self.config.actor_rollout_ref
        remote = parts.model.trust_remote_code
        self.tokenizer = load_tokenizer(folder, trust_remote_code=remote)
        self.stop_ids = stop_ids(self.tokenizer, folder)
        fsdp = parts.actor.fsdp_config
        # the weights that are served and saved are float32, and on the device
        if self.mesh is None and (fsdp.dtype != "float32" or fsdp.param_offload):
            self.mesh = alone(self.device)
        recompute = parts.model.enable_gradient_checkpointing
        self.folder = folder
        self.adapted = parts.model.lora_rank > 0
        self.policy = self._load_adapted(Path(initial), checkpoint) if self.adapted else self._load_model(folder)
        policy = self._spread(TokenScorer(self.policy), recompute, fsdp.param_offload)
        self.reference: TokenScorer | None = None
        if self.config.needs_reference and not self.adapted:
            reference = TokenScorer(self._load_model(Path(initial)))
            self.reference = self._spread(reference, recompute=False, offload=parts.ref.fsdp_config.param_offload)
        self.vocab_limit = min(len(self.tokenizer), self.policy.config.vocab_size)
        self.train_engine = TorchTrainEngine(policy, self.config, self.plan, self.vocab_limit)
        self.rollout_engine = self._engine(folder)
        self.critic: CriticEngine | None = None
        if self.config.needs_critic:
            place = Path(checkpoint) / "critic" if checkpoint else Path(critic or initial)
            model = load_critic(place, device=self.device, trust_remote_code=remote)
            own = self.config.critic.model.enable_gradient_checkpointing
            self._spread(model, recompute if own is None else own, self.config.critic.fsdp.param_offload)
            self.critic = CriticEngine(model, self.config, self.plan)
        self.limits = self._new_limits(divisors or {})
        seed_generators(self.config.run.seed)
        if checkpoint:
            self._restore(Path(checkpoint))
        self.memory.loaded()
        return self.train_engine.version

    def _load_adapted(self, initial: Path, checkpoint: str | None) -> PreTrainedModel:
        """The initial policy under an adapter, a checkpoint's or a fresh one."""
        model = self._load_model(initial)
        self.base_sha256 = base_sha256(model)
        add_adapter(model, self.config.actor_rollout_ref.model, self.config.run.seed)
        if checkpoint:
            load_adapter(model, Path(checkpoint) / ADAPTER_FOLDER, self.base_sha256)
        return model

    def _engine(self, folder: Path) -> RolloutEngine:
        """The engine that serves: the trained model itself where its weights are whole, else weights of its own."""
        served = self.policy
        self.serves_policy = self.mesh is None and self.config.actor_rollout_ref.rollout.name == "transformers"
        if self.mesh is not None and self.config.actor_rollout_ref.rollout.name == "transformers":
            served = self._load_model(folder)
        previous = getattr(self, "rollout_engine", None)  # after a warm start a worker loads once more
        return build_engine(self.config, served, folder, self.vocab_limit, previous)

    def _serve(self) -> float:
        """Have the rollout engine serve the trained weights, where it does not yet; returns seconds."""
        started = time.perf_counter()
        if self.rollout_engine.version != self.train_engine.version:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # what the engine takes back must be free outside PyTorch's cache too
            self.rollout_engine.wake()
            # the trained model itself needs no merged weights: its adapter is on
            weights = self.policy.named_parameters() if self.serves_policy else self.train_engine.weights()
            self.rollout_engine.load_weights(weights, self.train_engine.version)
        self.memory.at("after_weight_sync")
        return time.perf_counter() - started

    def _load_model(self, folder: Path) -> PreTrainedModel:
        remote = self.config.actor_rollout_ref.model.trust_remote_code
        model = load_model(folder, device=self.device, trust_remote_code=remote)
        if self.config.actor_rollout_ref.model.use_liger:
            use_liger(model, self.device)
        return model

    def _spread(self, model: Module, recompute: bool, offload: bool) -> Module:
        """Make a model ready for its passes: in shards over the ranks, or whole where this is the only one.

        Offloaded, it is in shards anyway, those of this rank alone.
        """
        if recompute:
            recompute_blocks(model)
        mesh = self.mesh or (alone(self.device) if offload else None)
        if mesh is not None:
            dtype = getattr(torch, self.config.actor_rollout_ref.actor.fsdp_config.dtype)
            shard(model, mesh, dtype, offload=offload)
        return model

    def warm_start(self, examples: WorkedExamples, out: str) -> dict[str, float]:
        """Fine-tune on worked examples and write the model, the initial policy, to `out/model`.

        Rank 0 does it alone, with the whole model, so the numbers are those of one process; load it afterwards.
        """
        if self.rank:
            return {}
        batch = Batch(
            {
                "prompt_ids": Ragged.from_list(examples.prompt_ids, torch.int64),
                "response_ids": Ragged.from_list(examples.response_ids, torch.int64),
            }
        )
        self.rollout_engine.sleep()
        model = self.policy if self.mesh is None and not self.adapted else self._load_model(self.folder)
        metrics = fine_tune(
            model, batch, self.config.warm_start, seed=self.config.run.seed, vocab_limit=self.vocab_limit
        )
        model.save_pretrained(Path(out) / "model")
        self.tokenizer.save_pretrained(Path(out) / "model")
        return metrics

    @log_memory("rollout")
    def rollout(self, order: RolloutOrder, out: str, stream: RewardStream | None = None) -> dict[str, float]:
        """Generate, and write a batch of ids, log-probs and texts to `out`; each response is sent to `stream` when it
        is whole.

        Ranks share the prompts. Where there are several waves of `max_num_seqs` samples, each wave is one rank's, so
        its numbers are those of one process to the last bit; a wave that is split has the same ids, and log-probs
        within rounding. Waves that were whole when an earlier try at this `out` lost its worker are kept.
        """
        sync_s = self._serve()
        version = self.rollout_engine.version
        started = time.perf_counter()
        limit, count = self.limits["rollout"], order.params.n
        mine = spans(len(order.prompt_ids), self.ranks.size, max(1, limit.size // count))[self.rank]
        waves, prompts = Waves(Path(out)), mine or range(1)

        def wave_size() -> int:
            # vLLM refills its running batch from one queue: waves would make it wait for the longest of each
            in_waves = self.config.actor_rollout_ref.rollout.name == "transformers"
            return max(1, limit.size // count) if in_waves else len(prompts)

        def generate(wave: range) -> Batch:
            return self._generate(order.part(wave), stream if mine else None, wave.start * count)

        batch = waves.all(prompts, wave_size, generate)
        seconds = time.perf_counter() - started
        self.rollout_engine.sleep()
        self.memory.at("after_sleep")
        if not self.ranks.alone:
            batch = batch.reorder(torch.arange(len(mine) * count)).all_gather(self.ranks.group)
        if self.rank:
            return limit.metrics()
        texts = [decode_response(ids.tolist(), self.tokenizer, self.stop_ids) for ids in batch.rows("response_ids")]
        batch = batch.with_columns(
            {
                "group": torch.arange(len(order.uids)).repeat_interleave(count),
                "sample_index": torch.arange(count).repeat(len(order.uids)),
                "epoch": torch.tensor(order.epochs).repeat_interleave(count),
                "uid": [uid for uid in order.uids for _ in range(count)],
                "response": texts,
            }
        )
        Batch({name: batch[name] for name in batch.names}, {"policy_version": version}).save(Path(out))
        waves.end()
        metrics = length_metrics(batch, self.config.data.max_response_length)
        if waves.num_kept:  # drawn in another process's time
            speed = {"rollout/kept_samples": float(waves.num_kept * count)}
        else:
            speed = {"rollout/tokens_per_s": metrics["response_length/total"] / seconds}
        return metrics | speed | {"timing_s/generate": seconds, "timing_s/weight_sync": sync_s} | limit.metrics()

    def _generate(self, order: RolloutOrder, stream: RewardStream | None, first_row: int) -> Batch:
        """The engine's batch, in parts that fit the memory; its rows begin at `first_row` of the whole."""

        def send(row: int, ids: list[int]) -> None:
            assert stream is not None
            text = decode_response(ids, self.tokenizer, self.stop_ids)
            reason = "stop" if ids[-1] in order.params.stop_ids else "length"
            stream.send(Finished(row=first_row + row, response=text, finish_reason=reason, response_tokens=len(ids)))

        def generate(sequences: int, _: int | None) -> Batch:
            self.rollout_engine.budget(sequences)
            on_sample = None if stream is None else send
            return self.rollout_engine.generate(order.prompt_ids, order.params, order.seeds, on_sample=on_sample)

        longest = max(len(ids) for ids in order.prompt_ids) + order.params.max_new_tokens
        batch = self.limits["rollout"].run(generate, longest, lambda: None)
        if stream is not None:
            stream.flush()
        return batch

    @log_memory("log_prob")
    def log_probs(self, rollouts: str, out: str) -> dict[str, float]:
        """Log-probs of the sampled tokens under the policy, and under the reference where one is needed.

        Where the update is exactly on-policy it takes its own log-probs as the old ones, and the policy's are left out,
        unless something before the update reads them (`needs_old_log_probs`). The critic's values go with them.
        """
        batch = Batch.load(Path(rollouts))
        columns: dict[str, Ragged] = {}
        metrics: dict[str, float] = {}
        if needs_old_log_probs(self.config, self.plan.on_policy):
            scored = self.train_engine.log_probs(batch)
            old, entropy = scored.ragged("log_probs"), scored.ragged("entropy")
            columns = {"old_log_probs": old, "entropy": entropy}
            metrics = mismatch(batch.ragged("rollout_log_probs").values, old.values, entropy.values)
        if self.config.needs_reference:
            columns["ref_log_probs"] = self._reference_log_probs(batch)
        if self.critic is not None:
            columns["values"] = self.critic.values(batch)
        if self.rank == 0:
            Batch(columns).save(Path(out))
        return metrics | self.limits["log_prob"].metrics()

    def _reference_log_probs(self, batch: Batch) -> Ragged:
        """Of the initial policy: a model of its own, or the trained one with its adapter off."""
        limit = self.limits.get("reference")
        if self.reference is not None:
            return self.train_engine.forward(self.reference, batch, limit)["log_probs"]
        with adapter_off(self.policy):
            return self.train_engine.forward(self.train_engine.policy, batch, limit)["log_probs"]

    def advantage(self, stages: Stages, out: str, kl_coef: float | None) -> dict[str, float]:
        """Advantages, written with all that the update needs: the redo log of the step; rank 0's work alone."""
        if self.rank:
            return {}
        batch, metrics = once_more("advantage", lambda: compute_advantages(stages, self.config, kl_coef))
        batch.save(Path(out))
        return metrics

    def update(self, redo: str, step: int) -> dict[str, float]:
        """Apply the redo log of `step` to the weights of version `step - 1`; the next rollout serves them."""
        return self._update(redo, step) | self.memory.step()

    @log_memory("update")
    def _update(self, redo: str, step: int) -> dict[str, float]:
        if self.train_engine.version != step - 1:
            raise CheckpointError(
                f"Step {step} can be applied to policy version {step - 1} only; the worker holds version "
                f"{self.train_engine.version}. Start again with --resume."
            )
        batch = Batch.load(Path(redo))
        metrics = {"perf/total_num_tokens": float(sample_lengths(batch).sum())}
        if self.critic is not None:
            metrics |= self._train(self.critic, batch, step)
        if step > self.plan.critic_warmup:
            metrics |= self._train(self.train_engine, batch, step)
        self.train_engine.version = step
        metrics["training/optimizer_steps"] = float(self.train_engine.optimizer_steps)
        return metrics

    def _train(self, engine: MiniBatchTrainer, batch: Batch, step: int) -> dict[str, float]:
        """An engine's update, and which share of the devices' peak it reached, where that peak is known."""
        started = time.perf_counter()
        metrics = engine.update(batch, step)
        if self.device.type != "cuda":
            return metrics
        torch.cuda.synchronize()  # the last optimizer step is still under way
        seconds = time.perf_counter() - started
        dtype = getattr(torch, self.config.actor_rollout_ref.actor.fsdp_config.dtype)
        peak = peak_flops(torch.cuda.get_device_name(), dtype)
        return metrics | (utilisation(metrics, engine.kind, seconds, peak * self.plan.world) if peak else {})

    @log_memory("save")
    def save(self, out: str) -> dict[str, float]:
        """Write model, optimizer, random state and counters to `out`: whole tensors, whatever the number of ranks.

        An adapter is written twice: merged into `model/`, a folder like any other, and alone beside it, from which a
        run goes on.
        """
        weights = gathered_merged_state(self.policy) if self.adapted else gathered_state(self.policy)
        actor = weights, self.train_engine.optimizer.state()
        adapter = adapter_state(self.policy) if self.adapted else None
        critic = self.critic and (gathered_state(self.critic.critic), self.critic.optimizer.state())
        if self.rank == 0:
            once_more("checkpoint", lambda: self._save(Path(out), actor, adapter, critic))
        return {}

    def _save(
        self,
        folder: Path,
        actor: tuple[Tensors, Tensors],
        adapter: Tensors | None,
        critic: tuple[Tensors, Tensors] | None,
    ) -> None:
        """Of each model the weights and the optimizer's state, whole."""
        self.policy.save_pretrained(folder / "model", state_dict=actor[0])
        self.tokenizer.save_pretrained(folder / "model")
        save_file(_on_host(actor[1]), folder / "optimizer.safetensors")
        if adapter is not None:
            save_adapter(folder / ADAPTER_FOLDER, adapter, self.config.actor_rollout_ref.model, self.base_sha256)
        if critic is not None and self.critic is not None:
            self.critic.critic.save(folder / "critic", critic[0])
            self.tokenizer.save_pretrained(folder / "critic")
            save_file(_on_host(critic[1]), folder / "critic_optimizer.safetensors")
        state = {
            "version": self.train_engine.version,
            "optimizer_steps": self.train_engine.optimizer_steps,
            "critic_optimizer_steps": self.critic.optimizer_steps if self.critic is not None else 0,
            **save_generators(folder, self.device),
        }
        (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")

    def weights_sha256(self) -> str:
        """Hash of the weights that are served and trained now."""
        return weights_sha256(self.train_engine.weights())

    def _new_limits(self, divisors: Mapping[str, int]) -> dict[str, MemoryLimit]:
        """Every kind of pass by name, cut as small as the run has learned to."""
        engine, plan = self.train_engine, self.plan
        limits = {
            "actor": engine.limit,
            "log_prob": engine.forward_limit,
            "rollout": MemoryLimit("rollout", self.config.actor_rollout_ref.rollout.max_num_seqs),
        }
        if plan.reference is not None:
            limits["reference"] = MemoryLimit(
                "log_prob", plan.reference.micro_batch_size, plan.reference.max_tokens, shared=not self.ranks.alone
            )
        if self.critic is not None:
            limits |= {"critic": self.critic.limit, "values": self.critic.forward_limit}
        for limit in limits.values():
            limit.divisor = divisors.get(limit.what, 1)
        return limits

    def _restore(self, folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        self.train_engine.optimizer.load(load_file(folder / "optimizer.safetensors"))
        self.train_engine.version = state["version"]
        self.train_engine.optimizer_steps = state["optimizer_steps"]
        if self.critic is not None:
            self.critic.optimizer.load(load_file(folder / "critic_optimizer.safetensors"))
            self.critic.version = state["version"]
            self.critic.optimizer_steps = state["critic_optimizer_steps"]
        restore_generators(folder, state, self.device)


def _on_host(tensors: Tensors) -> Tensors:
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
