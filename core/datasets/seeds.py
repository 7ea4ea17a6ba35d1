"""One seed for each sample, a pure function of what the sample is.

Invariant: the seed depends on nothing that a crash, a resume or another number of workers can change.
"""

import hashlib
import json


def sample_seed(run_seed: int, uid: str, epoch: int, sample_index: int) -> int:
    """Seed in [0, 2^63) of one response.

    `uid` is the prompt's, `epoch` counts from 0, `sample_index` is the place in the group, from 0.
    JSON keeps the four parts apart whatever characters the uid holds.
    """
    identity = json.dumps([run_seed, uid, epoch, sample_index]).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big") >> 1
