"""The main function of a process of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from calibration.run.process import end_with_parent, take_core, use_loopback
from calibration.run.work import BETWEEN, Place, Station

HOST = "127.0.0.1"
STOP = "stop"
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a process is told when it starts."""

    place: Place
    parent: int  # process id
    port: int
    timeout: float  # s


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a process says before it ends because of an error."""

    reason: str
    is_consequence: bool  # it only lost the connection to another rank


def serve(order: Order, connection: Connection, positions: Any) -> None:
    """Sets the process up, then answers questions until it is told to stop.

    Args:
        order: what to do.
        connection: to the process that started this one.
        positions: shared integers, one a rank: where each is.
    """
    end_with_parent(order.parent)
    place = order.place

    def watch(position: int) -> None:
        positions[place.rank] = position

    try:
        station = _open(order, watch)
        watch(BETWEEN)
        connection.send(None)
        while True:
            question, options = connection.recv()
            if question == STOP:
                break
            connection.send(station.ask(question, options))
        if place.num_ranks > 1:
            dist.destroy_process_group()
    except EOFError:
        return
    except (Exception, SystemExit) as error:
        connection.send(_failure(error))


def _open(order: Order, watch: Callable[[int], None]) -> Station:
    place = order.place
    take_core(place.rank, place.num_ranks)
    if place.device.startswith("cuda"):
        torch.cuda.set_device(place.device)
    if place.num_ranks > 1:
        use_loopback()
        limit = timedelta(seconds=2 * order.timeout)
        store = TCPStore(HOST, order.port, is_master=False, timeout=limit)
        dist.init_process_group(
            place.backend, store=store, rank=place.rank, world_size=place.num_ranks, timeout=limit
        )
    return Station(place, watch)


def _failure(error: BaseException) -> Failure:
    text = " ".join(str(error).split())
    words = f"raised {type(error).__name__}: {text[:300]}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        words = f"ran out of memory ({text[:200]})"
    return Failure(reason=words, is_consequence=any(part in text for part in _LOST))
