"""What is decided when ranks fail and hosts are lost: tables of events and commands, without processes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from xds.ops.watch.store import Store
from xds.recovery.decider import Decider, End, Fill, Kill, Place, Tell
from xds.recovery.generations import GONE_BACK, Lighthouse, Meeting

KILLED, RAISED = -9, 1


def hosts(*slots: int, spare: tuple[int, ...] = (), site: str = "") -> list[Place]:
    """Hosts a, b, ... with so many ranks each; those of `spare` have slots alone."""
    found, first = [], 0
    for number, count in enumerate(slots):
        ranks = () if number in spare else tuple(range(first, first + count))
        first += len(ranks)
        found.append(Place("abcdef"[number], ranks, count, site))
    return found


class Play:
    """A decider whose ranks say what the test lets them say."""

    def __init__(
        self,
        places: list[Place],
        units: list[tuple[int, ...]] | None = None,
        spares: int = 0,
        least: int = 1,
        **kind: bool,
    ) -> None:
        self.store = HashStore()
        num_ranks = sum(len(place.ranks) for place in places)
        self.units = units or [(rank,) for rank in range(num_ranks)]
        self.lighthouse = Lighthouse(Store(self.store, "recovery", -1), num_ranks)
        self.decider = Decider(self.lighthouse, places, spares)
        self.least, self.kind, self.num_ranks = least, kind, num_ranks
        self.number = 0

    def meeting(self, rank: int) -> Meeting:
        return Meeting(self.store, "recovery", rank, self.units)

    def announce(self) -> None:
        for rank in range(self.num_ranks):
            self.meeting(rank).announce(self.least, **self.kind)

    def ready(self, rank: int, attempt: int) -> None:
        self.meeting(rank).ask_to_join(attempt)

    def joined(self, rank: int, attempt: int, step: int = 7) -> None:
        self.meeting(rank).say_joined(attempt, step)

    def stopped(self, host: int, *ranks: int) -> None:
        self.decider.stopped(host, ranks)

    def look(self, seconds: float = 0.1) -> None:
        self.decider.look(seconds)

    def said(self) -> list[str]:
        """What was decided, and the generation if there is a new one."""
        found = []
        for command in self.decider.take_commands():
            if isinstance(command, Fill):
                found.append(f"{'abcdef'[command.host]}: rank {command.rank} as {command.attempt}")
            elif isinstance(command, Kill):
                found.append(f"{'abcdef'[command.host]}: kill {command.ranks}")
            elif isinstance(command, End):
                found.append("end")
            elif isinstance(command, Tell):
                found.append(command.text)
        generation = self.lighthouse.generation
        if generation.number != self.number:
            self.number = generation.number
            found.append(f"units {generation.units}")
        return found


ALONE = [Place("", (0, 1, 2, 3), 4)]
PAIRS = [(0, 1), (2, 3)]
WAITS = "; the other ranks wait for a new process"
# name: a play, and events with what is decided after each of them
TABLE: dict[str, tuple[dict, list[tuple[tuple, list[str]]]]] = {
    "a rank is lost": (
        {"places": ALONE},
        [
            (("announce",), []),
            (("ended", 2, 0, KILLED), ["rank 2 was ended by SIGKILL; ranks 0, 1, 3 go on (generation 1)",
                                       "units (0, 1, 3)"]),
            (("ended", 0, 0, RAISED, "E: no"),
             ["rank 0 ended with code 1 (E: no); ranks 1, 3 go on (generation 2)", "units (1, 3)"]),
        ],
    ),
    "new processes that are ready together take part together": (
        {"places": ALONE, "spares": 2},
        [
            (("announce",), []),
            (("ended", 2, 0, KILLED), ["rank 2 was ended by SIGKILL; ranks 0, 1, 3 go on (generation 1)",
                                       "a: rank 2 as 1", "units (0, 1, 3)"]),
            (("ended", 1, 0, KILLED), ["rank 1 was ended by SIGKILL; ranks 0, 3 go on (generation 2)",
                                       "a: rank 1 as 2", "units (0, 3)"]),
            (("ready", 1, 2), []),
            (("ready", 2, 1), []),
            (("look",), ["units (0, 1, 2, 3)"]),
        ],
    ),
    "before all can recover": ({"places": ALONE}, [(("ended", 2, 0, KILLED), ["end"])]),
    "fewer than the least": (
        {"places": ALONE, "least": 4}, [(("announce",), []), (("ended", 2, 0, KILLED), ["end"])],
    ),
    "the others of a unit end, and spares take all its places": (
        {"places": ALONE, "units": PAIRS, "spares": 1},
        [
            (("announce",), []),
            (("ended", 1, 0, KILLED), ["rank 1 was ended by SIGKILL; ranks 2, 3 go on (generation 1)",
                                       "a: kill (0,)", "units (1,)"]),
            (("look",), []),
            (("ended", 0, 0, KILLED), ["a: rank 0 as 1", "a: rank 1 as 2"]),
            (("ready", 0, 1), []),
            (("look",), []),  # the other one is not ready
            (("ready", 1, 2), []),
            (("look",), ["units (0, 1)"]),
            (("joined", 0, 1), []),
            (("joined", 1, 2), []),
            (("look",), ["ranks 0, 1 are there again (generation 2)"]),
        ],
    ),
    "with one copy, a new process whose script ends before it takes part": (
        {"places": ALONE, "has_one_copy": True},
        [
            (("announce",), []),
            (("ended", 2, 0, KILLED), [f"rank 2 was ended by SIGKILL{WAITS}", "a: rank 2 as 1"]),
            (("ended", 2, 1, 0), [f"rank 2 ended with code 0{WAITS}", "a: rank 2 as 2"]),
            (("ended", 2, 2, 0), [f"rank 2 ended with code 0{WAITS}", "a: rank 2 as 3"]),
            (("ended", 2, 3, 0), ["rank 2 ended with code 0, and so did 3 of its new processes after the same "
                                  "step: the run ends", "end"]),
        ],
    ),
    "with one copy, a rank raises, and the others cannot go back in their process": (
        {"places": ALONE, "has_one_copy": True},
        [
            (("announce",), []),
            (("ended", 2, 0, RAISED), [f"rank 2 ended with code 1{WAITS}", "a: rank 2 as 1"]),
            (("ended", 0, 0, GONE_BACK), [f"rank 0 ended with code 75{WAITS}", "a: rank 0 as 2"]),
            (("ended", 1, 0, GONE_BACK), [f"rank 1 ended with code 75{WAITS}", "a: rank 1 as 3"]),
            (("ended", 3, 0, GONE_BACK), [f"rank 3 ended with code 75{WAITS}", "a: rank 3 as 4"]),
        ],
    ),
    "a new process ends well before anybody has seen that it takes part": (
        {"places": ALONE, "has_one_copy": True},
        [
            (("announce",), []),
            (("ended", 2, 0, KILLED), [f"rank 2 was ended by SIGKILL{WAITS}", "a: rank 2 as 1"]),
            (("joined", 2, 1), []),
            (("ended", 2, 1, 0), []),
        ],
    ),
    "new processes have no states yet": (
        {"places": ALONE, "units": PAIRS, "spares": 1},
        [
            (("announce",), []),
            (("ended", 1, 0, KILLED), ["rank 1 was ended by SIGKILL; ranks 2, 3 go on (generation 1)",
                                       "a: kill (0,)", "units (1,)"]),
            (("ended", 0, 0, KILLED), ["a: rank 0 as 1", "a: rank 1 as 2"]),
            (("ready", 0, 1), []),
            (("ready", 1, 2), []),
            (("look",), ["units (0, 1)"]),
            (("ended", 3, 0, KILLED), ["rank 3 was ended by SIGKILL; no other rank has the states yet, so the "
                                       "run ends", "end"]),
        ],
    ),
    "a new process fails before it takes part, and another one comes": (
        {"places": ALONE, "spares": 1},
        [
            (("announce",), []),
            (("ended", 3, 0, RAISED), ["rank 3 ended with code 1; ranks 0, 1, 2 go on (generation 1)",
                                       "a: rank 3 as 1", "units (0, 1, 2)"]),
            (("ended", 3, 1, RAISED), ["a: rank 3 as 2"]),
            (("ready", 3, 2), []),
            (("look",), ["units (0, 1, 2, 3)"]),
            (("ended", 3, 2, KILLED), ["a: rank 3 as 3", "units (0, 1, 2)"]),
        ],
    ),
    "new processes fail in turn before they take part": (
        {"places": ALONE, "spares": 1},
        [
            (("announce",), []),
            (("ended", 3, 0, KILLED), ["rank 3 was ended by SIGKILL; ranks 0, 1, 2 go on (generation 1)",
                                       "a: rank 3 as 1", "units (0, 1, 2)"]),
            (("ended", 3, 1, RAISED), ["a: rank 3 as 2"]),
            (("ended", 3, 2, KILLED), ["a: rank 3 as 3"]),
            (("ended", 3, 3, RAISED), ["a: rank 3 as 4"]),
            (("ended", 3, 4, RAISED), ["rank 3 ended with code 1, the last of 3 new processes in turn that "
                                       "have failed before they took part: no other one takes its place"]),
            (("look",), []),
        ],
    ),
    "others have ended well": (
        {"places": ALONE},
        [(("announce",), []), (("ended", 0, 0, 0), []), (("ended", 1, 0, KILLED), ["end"])],
    ),
    "nobody waits for new processes": (
        {"places": ALONE, "spares": 1},
        [
            (("announce",), []),
            (("ended", 3, 0, KILLED), ["rank 3 was ended by SIGKILL; ranks 0, 1, 2 go on (generation 1)",
                                       "a: rank 3 as 1", "units (0, 1, 2)"]),
            (("ended", 0, 0, 0), []), (("ended", 1, 0, 0), []), (("ended", 2, 0, 0), []),
            (("look",), ["a: kill (3,)"]),
        ],
    ),
    "a rank is stopped": (
        {"places": hosts(2, 2)},
        [
            (("announce",), []),
            (("stopped", 1, 2), []),
            *[(("look", 0.3), [])] * 5,  # more than 0.2 s between looks: this process was stopped itself
            (("look", 0.2), ["b: kill (2,)"]),
            (("ended", 2, 0, KILLED), ["rank 2 on b was stopped for 1 s, so the launcher has ended it; ranks "
                                       "0, 1, 3 go on (generation 1)",
                                       "units (0, 1, 3)"]),
        ],
    ),
    "somebody stops the whole run": (
        {"places": hosts(1, 1)},
        [
            (("announce",), []),
            (("stopped", 1, 1), []),
            (("stopped", 0, 0), []),
            *[(("look", 0.2), [])] * 9,
            (("stopped", 0), []),
            *[(("look", 0.2), [])] * 4,  # the second continues as well
            (("stopped", 1), []),
            *[(("look", 0.2), [])] * 9,
        ],
    ),
    "groups that train alone are told of stopped ones, and end one by one": (
        {"places": ALONE, "units": PAIRS, "are_alone": True},
        [
            (("announce",), []),
            (("look",), []),
            (("stopped", 0, 2), []),
            *[(("look", 0.2), [])] * 9,
            (("ended", 0, 0, 0), []),
            (("ended", 1, 0, 0), ["units (1,)"]),
            (("look", 0.2), ["ranks 2 are stopped, and all other groups have ended: the run ends",
                             "a: kill (2, 3)"]),
            (("ended", 2, 0, KILLED), []),
            (("ended", 3, 0, KILLED), []),
        ],
    ),
    "a host is lost: one generation": (
        {"places": hosts(2, 2)},
        [
            (("announce",), []),
            (("lost", 1), ["host b was lost (no message); ranks 0, 1 go on (generation 1)", "units (0, 1)"]),
            (("look",), []),
            (("ended", 2, 0, KILLED), []),  # what it says late
            (("ended", 1, 0, KILLED), ["rank 1 on a was ended by SIGKILL; ranks 0 go on (generation 2)",
                                       "units (0,)"]),
        ],
    ),
    "the host of rank 0 is lost with a unit that has ranks elsewhere": (
        {"places": hosts(1, 3), "units": PAIRS},
        [
            (("announce",), []),
            (("lost", 0), ["host a was lost (no message); ranks 2, 3 go on (generation 1)", "b: kill (1,)",
                           "units (1,)"]),
        ],
    ),
    "a spare host takes all ranks of a lost one, and the host that comes back is spare then": (
        {"places": hosts(2, 2, 1, 3, spare=(2, 3))},
        [
            (("announce",), []),
            # the first spare host has too few slots
            (("lost", 1), ["host b was lost (no message); ranks 0, 1 go on (generation 1)",
                           "d: rank 2 as 1", "d: rank 3 as 2", "units (0, 1)"]),
            (("ready", 3, 2), []),
            (("look",), ["units (0, 1, 3)"]),
            (("came", 1), ["host b is there again"]),
            (("ready", 2, 1), []),
            (("look",), []),  # another generation would end the opening of groups of this one
            (("joined", 3, 2), []),
            (("look",), ["rank 3 is there again (generation 2)", "units (0, 1, 2, 3)"]),
            (("joined", 2, 1), []),
            (("look",), ["rank 2 is there again (generation 3)"]),
            (("lost", 0), ["host a was lost (no message); ranks 2, 3 go on (generation 4)",
                           "b: rank 0 as 3", "b: rank 1 as 4", "units (2, 3)"]),
        ],
    ),
    "a lost host takes its own places when it comes back": (
        {"places": hosts(2, 1)},
        [
            (("announce",), []),
            (("lost", 1), ["host b was lost (no message); ranks 0, 1 go on (generation 1)", "units (0, 1)"]),
            (("look",), []),
            (("came", 1), ["host b is there again"]),
            (("look",), ["b: rank 2 as 1"]),
            (("ended", 2, 1, RAISED), []),  # without --spares one process for each time that it comes
            (("look",), []),
        ],
    ),
    "a spare host is lost": (
        {"places": hosts(1, 1, 1, spare=(2,))},
        [
            (("announce",), []),
            (("lost", 2), ["host c was lost (no message); it had no ranks"]),
            (("lost", 1), ["host b was lost (no message); ranks 0 go on (generation 1)", "units (0,)"]),
        ],
    ),
    "a host that is lost before all can recover": (
        {"places": hosts(1, 1)}, [(("lost", 1), ["host b was lost (no message)", "end"])],
    ),
    "spare hosts serve their own site": (
        {"places": [*hosts(1, site="x"), Place("b", (1,), 1, "y"),
                    Place("c", (), 1, "x"), Place("d", (), 1, "y")]},
        [
            (("announce",), []),
            (("lost", 1), ["host b was lost (no message); ranks 0 go on (generation 1)", "d: rank 1 as 1",
                           "units (0,)"]),
        ],
    ),
    "one copy: a new process on the same host": (
        {"places": hosts(1, 2), "has_one_copy": True},
        [
            (("announce",), []),
            (("ended", 2, 0, KILLED), ["rank 2 on b was ended by SIGKILL" + WAITS,
                                       "b: rank 2 as 1"]),
            (("ended", 1, 0, KILLED), ["rank 1 on b was ended by SIGKILL" + WAITS,
                                       "b: rank 1 as 2"]),
            (("ready", 2, 1), []),
            (("look",), []),
            (("ready", 1, 2), []),
            (("look",), ["units (0, 1, 2)"]),
            (("joined", 1, 2), []),
            (("joined", 2, 1), []),
            (("look",), ["new processes of ranks 1, 2 take part (generation 1)"]),
        ],
    ),
    "one copy: a lost host has the only one": (
        {"places": hosts(1, 2, 2, spare=(2,)), "has_one_copy": True},
        [
            (("announce",), []),
            (("lost", 1), ["host b was lost (no message) with the only copy of the states of ranks 1, 2, so "
                           "the run ends; start it again from its last checkpoint", "end"]),
        ],
    ),
    "one copy and one on the next host": (
        {"places": hosts(1, 2, 2, spare=(2,)), "has_one_copy": True, "has_buddies": True},
        [
            (("announce",), []),
            (("lost", 1), ["host b was lost (no message); the other ranks wait for new processes on c",
                           "c: rank 1 as 1", "c: rank 2 as 2"]),
            (("ready", 1, 1), []),
            (("ready", 2, 2), []),
            (("look",), ["units (0, 1, 2)"]),
            (("lost", 0), ["host a was lost (no message), and no spare host has 1 slots for its ranks, so the "
                           "run ends; mark one as `spare` in the hostfile", "end"]),
        ],
    ),
    "one copy: it fails again and again": (
        {"places": hosts(1, 1), "has_one_copy": True},
        [
            (("announce",), []),
            (("ended", 1, 0, RAISED), ["rank 1 on b ended with code 1" + WAITS,
                                       "b: rank 1 as 1"]),
            (("ended", 1, 1, RAISED), ["rank 1 on b ended with code 1" + WAITS,
                                       "b: rank 1 as 2"]),
            (("ended", 1, 2, RAISED), ["rank 1 on b ended with code 1" + WAITS,
                                       "b: rank 1 as 3"]),
            (("ended", 1, 3, RAISED), ["rank 1 on b ended with code 1, and so did 3 of its new processes after "
                                       "the same step: the run ends", "end"]),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_what_is_decided(name: str) -> None:
    given, rows = TABLE[name]
    # places have a state of their own
    places = [Place(p.name, p.ranks, p.num_slots, p.site) for p in given["places"]]
    play = Play(**{**given, "places": places})
    for (event, *words), wanted in rows:
        if event == "ended":
            play.decider.ended(*words)
        elif event == "lost":
            play.decider.host_lost(*words, "no message")
        elif event == "came":
            play.decider.host_came(*words)
        else:
            getattr(play, event)(*words)
        assert play.said() == wanted, (event, *words)
    if name.startswith("groups"):
        assert Store(play.store, "recovery", 0).read("xds/recovery/stopped") == "[1]"
    assert play.decider.failed <= play.decider._failed
    assert bool(play.decider.failed) <= play.decider.is_ending


def test_failures_are_those_of_a_run_that_ended_for_them() -> None:
    play = Play(hosts(2, 1))
    play.announce()
    play.decider.ended(2, 0, KILLED)  # the run goes on without it
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda rank: play.meeting(rank).gather(play.lighthouse.generation), (0, 1)))
    for rank in (0, 1):
        play.decider.ended(rank, 0, 0)
    assert play.decider.is_done and not play.decider.failed

    play = Play(hosts(2, 1))
    play.announce()
    play.decider.ended(0, 0, RAISED)  # after the last step of the others, who do not notice it
    for rank in (1, 2):
        play.decider.ended(rank, 0, 0)
    assert play.decider.is_done and play.decider.failed == {0}
    assert "nobody did what rank 0 had still to do" in " ".join(play.said())

    play = Play(hosts(2, 1), has_one_copy=True)
    play.announce()
    play.decider.ended(0, 0, RAISED)
    for rank in (1, 2):  # before the new process is there, or while it waits for them
        play.decider.ended(rank, 0, 0)
    play.decider.look(0.1)
    assert "nobody did what rank 0 had still to do" in " ".join(play.said())
    play.decider.ended(0, 1, KILLED)
    assert play.decider.is_done and play.decider.failed == {0}

    play = Play(hosts(2, 1), has_one_copy=True)
    play.announce()
    play.decider.ended(0, 0, RAISED)
    play.decider.ended(1, 0, 0)
    play.decider.ended(0, 1, RAISED)  # the new process, while rank 2 runs
    assert play.decider.is_ending and play.decider.failed == {0}

    play = Play(hosts(2, 1))
    play.decider.ended(2, 0, RAISED)
    play.decider.ended(0, 0, -15)
    assert play.decider.is_ending and play.decider.failed == {0, 2} and not play.decider.is_done
