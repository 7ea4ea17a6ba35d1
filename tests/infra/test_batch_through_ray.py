"""A batch crosses a process border of Ray as its own bytes: nothing in it is unpickled."""

from collections.abc import Iterator

import pytest
import ray
import torch

from moonshift.core.batch import Batch, Ragged
from moonshift.infra.cluster import cluster


@pytest.fixture(scope="module")
def local_cluster() -> Iterator[None]:
    with cluster(120):
        yield


@pytest.mark.slow
def test_a_batch_comes_back_from_another_process_bit_by_bit(local_cluster: None) -> None:
    @ray.remote(num_cpus=0)
    def turned(batch: Batch) -> tuple[Batch, str]:
        return batch.reorder(torch.arange(len(batch)).flip(0)), batch.digest()

    batch = Batch(
        {
            "ids": Ragged.from_list([[5, 6], [], [7]], torch.int64),
            "score": torch.tensor([0.0, float("nan"), -0.0]),
            "text": ["a", "", "\U0001f600"],
            "rows": [{"k": [1]}, {"k": []}, None],
        },
        {"policy_version": 3},
    )
    back, digest = ray.get(turned.remote(batch), timeout=120)
    assert digest == batch.digest()
    assert back.reorder(torch.arange(len(batch)).flip(0)).digest() == batch.digest()
