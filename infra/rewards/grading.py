"""The loop of one process that grades: samples in, results out, in its main thread."""

import json
import os
import socket
from typing import Any

from moonshift.core.config.schema import RewardSection
from moonshift.core.errors import MoonshiftError
from moonshift.core.rewards.reward_set import RewardSet, load_rewards

from .wire import HEADER, frame, packed_graded, unpacked_sample


def serve(channel: socket.socket, reward: RewardSection, rewards: RewardSet | None) -> None:
    """Answer each call by its number until the pool's end closes; `rewards` None: load them first.

    What a reward function raises is a result; what ends the process is the pool's to find out.
    """
    me = os.getpid()
    if rewards is None:
        try:
            rewards = load_rewards(reward)
        except MoonshiftError as error:
            channel.sendall(frame({"failed": str(error)}))
            return
    channel.sendall(frame({"together": together(rewards)}))
    while (call := _read(channel)) is not None:
        graded = rewards.grade([unpacked_sample(packed) for packed in call["samples"]])
        if os.getpid() != me:
            os._exit(0)  # a copy that the function made of us must not answer for us
        channel.sendall(frame({"call": call["call"], "graded": [packed_graded(each) for each in graded]}))


def together(rewards: RewardSet) -> int:
    """Samples that one call takes: 0 where it takes all there are."""
    return 0 if rewards.batched else rewards.concurrency


def _read(channel: socket.socket) -> dict[str, Any] | None:
    header = _exactly(channel, HEADER.size)
    body = _exactly(channel, HEADER.unpack(header)[0]) if header else None
    return json.loads(body) if body else None


def _exactly(channel: socket.socket, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        part = channel.recv(min(count, 2**20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
