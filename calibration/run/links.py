"""Sends, receives and sums of one rank over torch.distributed; every handle is waited for.

Gloo matches messages by tag and carries CPU memory only, so what is on a GPU is staged. NCCL
matches by order, so each direction between two ranks has a communicator of its own, on which both
ends post in the order of the messages' numbers.
"""

import torch
import torch.distributed as dist

from calibration.run.script import Message, Script

Tensor = torch.Tensor


class Links:
    """What is under way from and to this rank."""

    def __init__(self, rank: int, messages: tuple[Message, ...], backend: str) -> None:
        self.rank, self.backend = rank, backend
        self.sending: list[tuple[dist.Work, Tensor]] = []
        self.coming: dict[int, tuple[dist.Work, Tensor]] = {}
        pairs = sorted({(message.source, message.target) for message in messages})
        self.groups = (
            {pair: dist.new_group(list(pair)) for pair in pairs} if backend == "nccl" else {}
        )

    def send(self, tag: int, message: Message, payload: Tensor) -> None:
        """Starts to send."""
        staged = payload.cpu() if self.backend == "gloo" else payload
        group = self.groups.get((message.source, message.target))
        work = dist.isend(staged, message.target, group=group, tag=tag)
        if work is not None:
            self.sending.append((work, staged))

    def post(self, tag: int, message: Message, room: Tensor) -> None:
        """Starts to receive."""
        staged = room.cpu() if self.backend == "gloo" else room
        group = self.groups.get((message.source, message.target))
        work = dist.irecv(staged, message.source, group=group, tag=tag)
        if work is not None:
            self.coming[tag] = work, staged

    def take(self, tag: int) -> Tensor:
        """Waits for a message and returns what came."""
        work, staged = self.coming.pop(tag)
        work.wait()
        return staged

    def finish(self) -> None:
        """Waits until all that was sent has left."""
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()


class Copies:
    """Averages of gradients over the copies of a pipeline."""

    def __init__(self, script: Script) -> None:
        """Makes the groups of all stages, as all ranks do, and keeps this rank's."""
        groups = {each: dist.new_group(list(each)) for each in script.partners}
        self.ranks = next((each for each in groups if script.rank in each), ())
        self.group = groups.get(self.ranks)
        self.summing: list[tuple[dist.Work, Tensor, list[Tensor]]] = []

    def start(self, gradients: list[Tensor]) -> None:
        """Starts to average some gradients."""
        flat = torch.cat([each.reshape(-1) for each in gradients]).div_(len(self.ranks))
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        if work is not None:
            self.summing.append((work, flat, gradients))

    def finish(self) -> None:
        """Waits for all that was started, and puts the averages in place."""
        for work, flat, gradients in self.summing:
            work.wait()
            begin = 0
            for each in gradients:
                each.copy_(flat[begin : begin + each.numel()].view(each.shape))
                begin += each.numel()
        self.summing.clear()
