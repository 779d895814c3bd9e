"""The newest two versions of what a rank holds, in memory that outlives its process, here and on the next host.

    step 7 ends   forward of step 8                   before the norm of step 8  forward of step 9
                  thread: 7 into slot 1, to the buddy   it is complete             thread: 8 into slot 0, over 6

A rank votes for a step when the version before it is complete, also in the memory of its buddy if there are
several hosts. So when any rank has taken step 8, all have version 7; and when none has, all have version 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from ...recovery.buddies import (
    Held,
    buddies_of,
    guests_of,
    ranks_by_host,
    sources_of,
    teller_of,
)
from ...recovery.courier import Courier, as_address
from ...recovery.slots import (
    NONE,
    NUM_SLOTS,
    Slots,
    own_host,
    ranks_with_versions,
    versions_folder,
)
from ...utils.errors import XdsError
from ...utils.shared_file import SharedFile
from ...utils.sizes import size_text
from .image import FILE, Image, image_step


@final
class Versions:
    """The versions of one rank, and those of its guests: the ranks of another host whose buddy it is."""

    def __init__(self, rank: int, store: tuple[str, int]) -> None:
        """store: the address of that of the launcher."""
        self._rank, self._store = rank, store
        self.host = own_host()
        self._slots = Slots(versions_folder(rank))  # of a former process: see `find`
        self._files = {path / FILE: SharedFile(path / FILE) for path in self._slots.paths}
        self._thread = ThreadPoolExecutor(1, "xds-versions")
        self._writing: tuple[Future[None], int] | None = None  # the step
        self._courier: Courier | None = None  # where there are several hosts
        self._has_buddy = False
        self._neighbours: list[int] = []  # the ranks of this host

    @property
    def steps(self) -> list[int]:
        """Of the complete versions in the memory of this host, newest first; NONE where there are fewer."""
        return self._slots.steps

    @property
    def has_buddy(self) -> bool:
        """Another host has a second copy."""
        return self._has_buddy

    # -- at the start -----------------------------------------------------------------------------------

    def find(self) -> None:
        """Take over what a former process of this rank has left. Reads every byte."""
        self._slots = Slots(versions_folder(self._rank))
        self._slots.keep([step for step in map(image_step, self._slots.paths) if step is not None])

    def reserve(self, hosts: Sequence[int], sizes_bytes: Sequence[int]) -> None:
        """Take the memory of all versions now: of this rank and its guests. By rank: its host, its image.

        Raises XdsError: there is too little.
        """
        guests = guests_of(buddies_of(hosts), self._rank)
        for rank in (self._rank, *guests):
            try:
                Slots(versions_folder(rank)).reserve(FILE, sizes_bytes[rank])
            except OSError as error:
                own = f"{size_text(sizes_bytes[self._rank])} each"
                of_guests = [f"{NUM_SLOTS} of {size_text(sizes_bytes[guest])}" for guest in guests]
                for_next = f", and for ranks of another host {', '.join(of_guests)}"
                raise XdsError(
                    f"recovery.enabled: each rank keeps {NUM_SLOTS} copies of its states, {own}"
                    f"{for_next if guests else ''}, and {self._slots.folder.parent} has no memory for them "
                    f"({error.strerror}): enlarge it (mount -o remount,size=), start fewer ranks on this host, "
                    "or set recovery.enabled to false"
                ) from error

    def tell(self, generation: int, hosts: Sequence[int], lacking: Sequence[int]) -> Any:
        """What this rank tells the others, as JSON: its address, and what it has of the `lacking` ranks.

        hosts: by rank. Reads every byte of those versions. From now on others can have them.
        """
        if self._courier is None and len(set(hosts)) > 1:
            self._courier = Courier(self._rank, self._store)
        if self._courier is None:
            self._neighbours = list(range(len(hosts)))
            return {"address": None, "held": []}
        here = self._neighbours = ranks_by_host(hosts)[self.host]
        held = []
        for rank in sorted(set(lacking).intersection(ranks_with_versions())):
            if hosts[rank] != self.host and teller_of(rank, here) == self._rank:
                found = map(image_step, Slots(versions_folder(rank)).paths)
                held.append((rank, [step for step in found if step is not None]))
        self._courier.open(generation)
        return {"address": self._courier.address, "held": held}

    def hear(self, hosts: Sequence[int], told: Sequence[Any]) -> None:
        """What each rank has told: the buddy gets versions from now on."""
        buddy = buddies_of(hosts)[self._rank]
        self._has_buddy = buddy != NONE
        if self._has_buddy:
            assert self._courier is not None
            self._courier.begin(as_address(told[buddy]["address"]))

    def fetch_missing(self, step: int, own: Sequence[Sequence[int]], told: Sequence[Any]) -> None:
        """Get the version of `step`, if this rank has none. own: by rank the steps in the memory of its host.

        Raises PeerError: the rank that has it has failed.
        """
        source = sources_of(step, own, held_of(told)).get(self._rank)
        if source is not None:
            assert self._courier is not None
            self._courier.fetch(as_address(told[source]["address"]), step, self._slots)

    # -- of a step --------------------------------------------------------------------------------------

    def begin(self, image: Image) -> None:
        """Start to write a version over the older one. Masters and states must not change before `complete`."""
        assert self._writing is None
        self._writing = (self._thread.submit(self._write, image, self._slots.begin()), image.step)

    def _write(self, image: Image, path: Path) -> None:
        image.write(path, self._files[path / FILE])
        self._slots.commit(path, image.step)
        self._send(image.step)

    def _send(self, step: int) -> None:
        if self._courier is not None and self._has_buddy:
            self._courier.send(step, self._slots, self._files)

    def begin_sending(self, step: int) -> None:
        """Send a version that is complete here, but not in the memory of the buddy."""
        assert self._writing is None
        self._writing = (self._thread.submit(self._send, step), step)

    def complete(self, seconds: float) -> bool:
        """Whether the version that is being written is complete within `seconds`, here and in the next memory.

        Raises XdsError: it does not fit into the memory.
        """
        if self._writing is None:
            return True
        try:
            self._writing[0].result(seconds)
        except NotYet:
            return False
        except OSError as error:
            self._writing = None
            raise XdsError(
                f"recovery.enabled: the copy of the states in {self._slots.folder} cannot be written "
                f"({error.strerror}): free memory there, or set recovery.enabled to false"
            ) from error
        except BaseException:
            self._writing = None
            raise
        self._writing = None
        return True

    def stop(self) -> None:
        """Send nothing more, and keep nothing for others. What is being written here is complete afterwards."""
        if self._courier is not None:
            self._courier.end()
        while not self.complete(1.0):
            pass

    def is_kept(self, step: int) -> bool:
        """This version is complete here, or is being written."""
        return step in self._slots.steps or self._is_writing(step)

    def is_sent(self, step: int) -> bool:
        """This version is in the memory of the buddy, or on its way."""
        if self._courier is None or not self._has_buddy or self._is_writing(step):
            return True
        return self._courier.has(step)

    def _is_writing(self, step: int) -> bool:
        return self._writing is not None and self._writing[1] == step

    def folder_of(self, step: int) -> Path:
        """Where the image of a complete version is."""
        return self._slots.path_of(step)

    def drop_after(self, step: int) -> None:
        """Versions after `step` count no longer: other ranks do not have them."""
        self._slots.drop_after(step)
        if self._courier is not None:
            self._courier.forget()

    def drop_guests_after(self, step: int) -> None:
        """The same of versions of ranks of other hosts in this memory. No rank may send one now."""
        for rank in set(ranks_with_versions()).difference(self._neighbours):
            Slots(versions_folder(rank)).drop_after(step)

    def close(self) -> None:
        """No version is needed any more."""
        with suppress(XdsError):
            self.stop()
        if self._courier is not None:
            self._courier.close()
        self._thread.shutdown()
        self._slots.remove()


def held_of(told: Sequence[Any]) -> list[Held]:
    """By rank: the steps that it has of other ranks, by their rank."""
    return [{int(rank): steps for rank, steps in each["held"]} for each in told]


__all__ = ["Versions", "held_of"]
