"""The newest two versions of what a rank holds, in memory that outlives its process, here and on the next host.

    step 7 ends   forward of step 8                   before the norm of step 8  forward of step 9
                  thread: 7 into slot 1, to the buddy   it is complete             thread: 8 into slot 0, over 6

A rank votes for a step when the version before it is complete, also in the memory of its buddy if there are
several hosts. So when any rank has taken step 8, all have version 7; and when none has, all have version 6.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, final

from ...ops.comm.threads import OrderedThreads, ThreadJob
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
    SHARED,
    Slots,
    files_of,
    own_host,
    ranks_with_versions,
    versions_folder,
)
from ...utils.errors import XdsError
from ...utils.shared_file import SharedFile
from ...utils.sizes import size_text
from .image import FILE, Image, SharedRecord, image_step, record_of_frozen, write_frozen
from .io.tensor_file import TensorEntry, tensor_sums


@final
class Versions:
    """The versions of one rank, and those of its guests: the ranks of another host whose buddy it is."""

    def __init__(self, rank: int, store: tuple[str, int]) -> None:
        """store: the address of that of the launcher."""
        self._rank, self._store = rank, store
        self.host = own_host()
        self._slots = Slots(versions_folder(rank))  # of a former process: see `find`
        self._files = {path / FILE: SharedFile(path / FILE) for path in self._slots.paths}
        # the interpreter does not wait for it at its end, when a buddy may have ended
        self._thread = OrderedThreads("xds-versions")
        self._writing: tuple[ThreadJob, int] | None = None  # the step
        self._frozen: tuple[tuple[int, ...], SharedRecord] | None = (
            None  # sums of tensors, the file
        )
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
        for path in self._slots.paths:
            if image_step(path) is None:
                self._slots.drop(path)

    def reserve(
        self, hosts: Sequence[int], sizes_bytes: Sequence[int], frozen_bytes: Sequence[int]
    ) -> None:
        """Take the memory of all versions now: of this rank and its guests.

        By rank: its host, the bytes of a version, those that both versions share.
        Raises XdsError: there is too little.
        """
        guests = guests_of(buddies_of(hosts), self._rank)
        for rank in (self._rank, *guests):
            try:
                slots = Slots(versions_folder(rank))
                slots.reserve(FILE, sizes_bytes[rank])
                if frozen_bytes[rank]:
                    slots.reserve_shared(frozen_bytes[rank])
            except OSError as error:
                needs = [
                    NUM_SLOTS * sizes_bytes[rank] + frozen_bytes[rank]
                    for rank in (self._rank, *guests)
                ]
                for_guests = f", and {size_text(sum(needs[1:]))} for ranks of another host"
                raise XdsError(
                    f"recovery.enabled: each rank keeps {NUM_SLOTS} copies of its states, "
                    f"{size_text(needs[0])}{for_guests if guests else ''}, and "
                    f"{self._slots.folder.parent} has no memory for them "
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
        self._run(partial(self._write, image, self._slots.begin()), image.step)

    def _run(self, job: Callable[[], None], step: int) -> None:
        self._writing = self._thread.add(self._rank, job), step

    def _write(self, image: Image, path: Path) -> None:
        shared = self._share(image.frozen, path) if image.frozen else None
        image.write(path, self._files[path / FILE], shared)
        self._slots.commit(path, image.step)
        self._send(image.step)

    def _share(self, frozen: Sequence[TensorEntry], path: Path) -> SharedRecord:
        """Let the version in `path` have these values, which are written if a script has changed them."""
        sums = tensor_sums(frozen)
        record = self._frozen[1] if self._frozen is not None and self._frozen[0] == sums else None
        digest = hashlib.blake2b(repr(sums).encode(), digest_size=8).hexdigest()
        name = f"{SHARED}{digest}"
        if record is None and name not in self._slots.shared():
            record = write_frozen(frozen, self._slots.begin_shared(path, name), name)
        self._slots.share(path, name)
        self._frozen = sums, record or record_of_frozen(path / name)
        for old in files_of(path):
            if old.name.startswith(SHARED) and old.name != name:
                old.unlink()
        return self._frozen[1]

    def _send(self, step: int) -> None:
        if self._courier is not None and self._has_buddy:
            self._courier.send(step, self._slots, self._files)

    def begin_sending(self, step: int) -> None:
        """Send a version that is complete here, but not in the memory of the buddy."""
        assert self._writing is None
        self._run(partial(self._send, step), step)

    def complete(self, seconds: float) -> bool:
        """Whether the version that is being written is complete within `seconds`, here and in the next memory.

        Raises XdsError: it does not fit into the memory.
        """
        if self._writing is None:
            return True
        job = self._writing[0]
        if not job.wait(seconds):
            return False
        self._writing = None
        try:
            job.join()
        except OSError as error:
            raise XdsError(
                f"recovery.enabled: the copy of the states in {self._slots.folder} cannot be written "
                f"({error.strerror}): free memory there, or set recovery.enabled to false"
            ) from error
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

    def close(self, *, removes: bool) -> None:
        """This rank writes no more. removes: no version of it is needed any more."""
        with suppress(XdsError):
            self.stop()
        if self._courier is not None:
            self._courier.close()
        if removes:
            self._slots.remove()


def held_of(told: Sequence[Any]) -> list[Held]:
    """By rank: the steps that it has of other ranks, by their rank."""
    return [{int(rank): steps for rank, steps in each["held"]} for each in told]


__all__ = ["Versions", "held_of"]
