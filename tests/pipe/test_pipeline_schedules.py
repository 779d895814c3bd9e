"""Tests of the schedules: literal tables, simulated times, torch's own orders, tables of a user."""

import importlib
from itertools import product

import pytest

from xds.pipe.schedules.actions import (
    COMPUTE,
    FLOW_BACK,
    MAKES_GRADIENTS,
    RECEIVES,
    SENDS,
    Action,
    DeadlockError,
    Op,
    Placement,
    ScheduleError,
    computed,
)
from xds.pipe.schedules.build import SCHEDULES, build_forward_table, build_table, choose
from xds.pipe.schedules.lowering import received, with_messages, with_states
from xds.pipe.schedules.plan import SchedulePlan
from xds.pipe.schedules.simulation import Costs, simulate

EQUAL = Costs(1, 1, 1)


def lines(orders):
    return [" ".join(map(str, order)) for order in orders]


def cases(ranks, micro_batches):
    """Schedule, ranks, micro-batches and chunks, where the schedule can run them."""
    for name, schedule in SCHEDULES.items():
        for p in ranks:
            for m in micro_batches:
                if m < max(1, schedule.micro_batches_a_rank * p):
                    continue
                for chunks in (2, 3, 4) if name == "interleaved_1f1b" else (0,):
                    yield name, p, m, chunks


# ---- literal tables

ORDERS = {
    ("gpipe", 2, 3): ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"],
    ("1f1b", 3, 4): [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ],
    ("interleaved_1f1b", 2, 4): [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ],
    ("interleaved_1f1b", 2, 5): [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 0B2 2B3 2B4 0B3 0B4",
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4",
    ],
    ("zero_bubble", 3, 4): [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ],
    ("zbv", 2, 4): [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0B0 3F2 3I2 3W2 0B1 3F3 3I3 3W3 0B2 0B3",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
    ],
    ("dualpipev", 2, 4): [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0B2 0B3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ],
}


def test_the_order_of_small_pipelines():
    for case, order in ORDERS.items():
        assert lines(computed(build_table(*case).rows)) == order, case


def test_messages_are_sent_at_once_and_received_one_action_ahead():
    assert lines(build_table("1f1b", 2, 3).rows) == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


def test_a_message_says_which_earlier_ones_have_arrived() -> None:
    table, send_f, send_b = build_table("1f1b", 2, 4), Op.SEND_F, Op.SEND_B
    assert table.answers(0) == {
        Action(send_b, 1, number): [Action(send_f, 0, number)] for number in range(4)
    }
    assert table.answers(1) == {
        Action(send_f, 0, number): [Action(send_b, 1, number - 2)] if number > 1 else []
        for number in range(4)
    }


def test_a_value_that_stays_on_its_rank_needs_no_message():
    middle = build_table("zbv", 2, 2).rows[1]
    assert not {a.stage for a in middle if a.op is Op.SEND_F} & {1}  # stages 1 and 2 are neighbours
    assert not [
        a for row in build_table("interleaved_1f1b", 1, 4).rows for a in row if a.op in SENDS
    ]


def test_receives_start_in_the_order_of_the_sends():
    """Rank 0 makes the inputs of stage 3 before those of stage 1, which rank 1 uses first."""
    zero = [Action(Op.FORWARD, 2, 0), Action(Op.FORWARD, 0, 1), Action(Op.FORWARD, 0, 0)]
    one = [Action(Op.FORWARD, 1, 0), Action(Op.FORWARD, 1, 1), Action(Op.FORWARD, 3, 0)]
    table = with_messages([zero, one], Placement(2, 2), 2)
    assert lines(table.rows)[1].startswith("3RECV_F0 1RECV_F1 1RECV_F0 1F0 1SEND_F0 1F1")


STATES = {
    (False, False): [
        "0UNSHARD 0F0 0F1 2UNSHARD 2F0 2B0 2F1 2B1 2RESHARD 2REDUCE_GRAD 0B0 0B1 0RESHARD 0REDUCE_GRAD",
        "1UNSHARD 1F0 1F1 1I0 1W0 1I1 1W1 1RESHARD 1REDUCE_GRAD",
    ],
    (True, True): [
        "0UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 2F0 2B0 2REDUCE_GRAD0 2F1 2B1 2RESHARD 2REDUCE_GRAD1 "
        "0UNSHARD 0B0 0REDUCE_GRAD0 0B1 0RESHARD 0REDUCE_GRAD1",
        "1UNSHARD 1F0 1F1 1I0 1W0 1REDUCE_GRAD0 1I1 1W1 1RESHARD 1REDUCE_GRAD1",
    ],
}


@pytest.mark.parametrize("each", STATES, ids=str)
def test_gather_drop_and_reduce(each):
    text = "0F0,0F1,2F0,2B0,2F1,2B1,0B0,0B1\n1F0,1F1,1I0,1W0,1I1,1W1\n"
    orders = [[action(cell) for cell in row.split(",")] for row in text.split()]
    table = with_messages(orders, Placement(2, 2), 2)
    table = with_states(table, gathers_each=each[0], reduces_each=each[1])
    rows = [[a for a in row if a.op not in SENDS | RECEIVES] for row in table.rows]
    assert lines(rows) == STATES[each]


def action(cell):
    return Action(Op(cell[1]), int(cell[0]), int(cell[2]))


def test_the_send_stays_next_to_the_action_that_makes_its_value():
    table = with_states(build_table("1f1b", 2, 2), gathers_each=False, reduces_each=False)
    assert lines(table.rows)[1].endswith("1B1 1SEND_B1 1RESHARD 1REDUCE_GRAD")


# ---- simulated tables


COUNTED = (Op.FORWARD,), FLOW_BACK, MAKES_GRADIENTS  # BACKWARD is of both of the last two


def check_complete(rows, placement, num_micro_batches):
    """Each rank computes each part of each micro-batch once, on each of its stages."""
    for rank, row in enumerate(rows):
        wanted = sorted(product(placement.stages_of(rank), range(num_micro_batches)))
        for ops in COUNTED:
            assert sorted((a.stage, a.micro_batch) for a in row if a.op in ops) == wanted


def check(name, p, m, chunks):
    """No deadlock, each action once, each message once and received in the order of sending, bounded memory."""
    table = build_table(name, p, m, chunks)
    check_complete(table.rows, table.placement, m)
    run = simulate(table, EQUAL)
    for rank, row in enumerate(table.rows):
        for peer in range(p):
            for op in SENDS:
                sends = [a for a in row if a.op is op and table.placement.peer_of(a) == peer]
                back = {received(a) for a in sends}
                receives = [a for a in table.rows[peer] if a in back]
                assert receives == [received(a) for a in sends]
        if name == "1f1b":
            assert run.peak_activations(rank) == min(m, p - rank)
        elif name == "zero_bubble":
            assert run.peak_activations(rank) == p
        elif name == "zbv":
            assert run.peak_activations(rank) <= 2 * p  # halves of a stage: the memory of 1F1B
        elif name == "dualpipev":
            assert run.peak_activations(rank) <= 2 * p + 1
    sends = sum(a.op in SENDS for row in table.rows for a in row)
    assert sends == sum(a.op in RECEIVES for row in table.rows for a in row)
    assert all((count(row, COMPUTE) > 0) for row in table.rows)


def count(row, ops):
    return sum(a.op in ops for a in row)


def test_every_schedule_ends_and_is_complete():
    for case in cases((1, 2, 3, 5, 8), (1, 2, 3, 5, 8, 13, 16, 19)):
        check(*case)


def test_a_receive_is_at_most_one_action_ahead():
    """The memory of the messages: between a receive and its user there is one compute action."""
    for case in cases((2, 4), (4, 8)):
        for row in build_table(*case).rows:
            for index, receive in enumerate(row):
                if receive.op not in RECEIVES:
                    continue
                ops = {Op.FORWARD} if receive.op is Op.RECEIVE_F else {Op.INPUT, Op.BACKWARD}
                ahead = [a for a in row[index:] if a.op in COMPUTE][:2]
                users = [
                    a.op in ops and (a.stage, a.micro_batch) == (receive.stage, receive.micro_batch)
                    for a in ahead
                ]
                assert any(users), f"{case}: {receive} is early"


@pytest.mark.parametrize(("p", "times"), [(2, 1), (4, 3), (8, 2)])
def test_the_bubble_has_the_length_of_the_formula(p, times):
    m = times * p
    assert bubble("gpipe", p, m) == pytest.approx((p - 1) / (m + p - 1))
    assert bubble("1f1b", p, m) == pytest.approx((p - 1) / (m + p - 1))
    for v in (2, 3, 4):
        assert bubble("interleaved_1f1b", p, m, v) == pytest.approx((p - 1) / (v * m + p - 1))
    costs = Costs(2, 3, 1)
    idle = simulate(build_table("zero_bubble", p, m), costs).makespan_seconds - 6 * m
    assert idle == pytest.approx((p - 1) * (2 + 3 - 1))


def bubble(name, p, m, chunks=0):
    return simulate(build_table(name, p, m, chunks), EQUAL).bubble


def test_times_of_a_message():
    run = simulate(build_table("gpipe", 2, 1), Costs(2, 1, 1, message=5))
    assert run.ends[0][-1] == run.makespan_seconds == 2 + 5 + 2 + 2 + 5 + 2
    assert run.starts[1][1] == 7  # the forward of the second rank
    slow = simulate(run.table, [Costs(2, 1, 1), Costs(4, 1, 1)])  # one for each stage
    assert slow.makespan_seconds == 2 + 4 + 2 + 2
    assert run.busy_seconds(0) == 4 and run.bubble_of(0) == pytest.approx(1 - 4 / 18)


def test_a_message_waits_for_its_receive():
    """Rank 1 starts to receive micro-batch 2 after its first forward; all outputs are ready long before."""
    run = simulate(build_table("gpipe", 2, 3), [Costs(1, 1, 1, 5), Costs(3, 3, 3, 5)])
    starts = dict(zip(map(str, run.table.rows[1]), run.starts[1], strict=True))
    assert [starts[f"1F{m}"] for m in range(3)] == [6, 9, 14]


def test_evaluation_runs_forwards_alone_in_any_number():
    for name, p, _, chunks in cases((1, 2, 3, 8), (16,)):
        placement = SCHEDULES[name].placement(p, chunks)
        for m in (1, 2, 5, 9, 24):
            run = simulate(build_forward_table(placement, m), EQUAL)
            assert (
                sum(count(row, {Op.FORWARD}) for row in run.table.rows) == m * placement.num_stages
            )
    table = build_forward_table(Placement(4), 8)
    assert simulate(table, EQUAL).makespan_seconds == 11
    table = with_states(table, gathers_each=False, reduces_each=False)
    assert [count(row, {Op.GATHER, Op.DROP, Op.REDUCE}) for row in table.rows] == [2, 2, 2, 2]


def test_auto_takes_the_shortest_step_then_the_least_memory():
    assert choose(EQUAL, 1, 4) in ("1f1b", "zero_bubble", "zbv")  # one rank: all are as long
    assert choose(EQUAL, 4, 16) == "zbv"
    uneven = [Costs(1, 1, 1), Costs(2, 3, 1)]  # one for each rank
    steps = {
        name: simulate(table, [uneven[table.placement.rank_of(s)].divided(v) for s in range(2 * v)])
        for name, table in ((name, build_table(name, 2, 4)) for name in SCHEDULES)
        for v in [table.placement.num_chunks]
    }
    shortest = min(run.makespan_seconds for run in steps.values())
    assert steps[choose(uneven, 2, 4)].makespan_seconds == shortest < steps["1f1b"].makespan_seconds
    with pytest.raises(ScheduleError, match="costs are given for 3 ranks"):
        choose([EQUAL] * 3, 4, 16)
    with pytest.raises(ScheduleError, match="costs are given for 3 stages"):
        simulate(build_table("1f1b", 2, 2), [EQUAL] * 3)
    assert choose(EQUAL, 4, 3) == "gpipe"  # fewer micro-batches than ranks
    assert choose(Costs(1, 2, 0), 4, 16) == "interleaved_1f1b"  # nothing to delay
    assert choose(Costs(1, 1, 1, message=1), 4, 16) != choose(EQUAL, 4, 16)


# ---- torch's orders

TORCH = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def torch_orders(name, p, m, chunks):
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    schedules = importlib.import_module("torch.distributed.pipelining.schedules")
    found = visualizer.get_schedule_ops(
        schedules.get_schedule_class(TORCH[name]), p, m, chunks or None
    )
    texts = [";".join(str(a) for a in row if a is not None) for row in found]
    return [text.replace("(", "").replace(")OVERLAP_F_B", "").split(";") for text in texts]


@pytest.mark.parametrize("name", TORCH)
def test_the_orders_are_those_of_torch(name):
    schedule = SCHEDULES[name]
    for p in (2, 3, 4):
        for m in (2 * p, 2 * p + 2, 4 * p):
            chunks = 2 if name in ("interleaved_1f1b", "zbv", "dualpipev") else 0
            if name == "interleaved_1f1b" and m % (m // p):
                continue  # torch refuses these
            theirs = torch_orders(name, p, m, chunks)
            theirs = [[c for c in row if "REDUCE_GRAD" not in c] for row in theirs]
            ours = [list(map(str, row)) for row in schedule.orders(schedule.placement(p), m)]
            if name == "1f1b":  # torch 2.13 counts the forwards of the last rank from 1
                ours[-1], theirs[-1] = ours[-1][1::2], theirs[-1][1::2]
            assert ours == theirs, (p, m)


# ---- what cannot work

REFUSED = {
    ("1f1b", 4, 3): "1f1b on 4 pipeline ranks needs at least 4 micro-batches, not 3",
    ("dualpipev", 4, 7): "dualpipev on 4 pipeline ranks needs at least 8 micro-batches",
    ("gpipe", 2, 0): "needs at least 1 micro-batches",
    ("zbv", 2, 4, 3): "zbv has 2 chunks a rank, not 3; set pipeline.chunks",
    ("interleaved_1f1b", 2, 4, 1): "interleaved_1f1b has at least 2 chunks a rank, not 1",
    ("1f1b", 0, 4): "both numbers must be at least 1",
    ("2f2b", 2, 4): "'2f2b'; it must be one of gpipe, 1f1b,",
}


def test_numbers_that_cannot_work():
    for case, said in REFUSED.items():
        with pytest.raises(ScheduleError) as caught:
            build_table(*case)
        assert said in str(caught.value)


def test_a_deadlock_says_who_waits_for_what():
    orders = [
        [action(cell) for cell in row.split()] for row in ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    ]
    with pytest.raises(DeadlockError) as caught:
        simulate(with_messages(orders, Placement(2, 1), 2), EQUAL)
    assert str(caught.value) == (
        "the schedule can never finish: rank 0 waits in 0B0 for the gradient of micro-batch 0 from "
        "stage 1 on rank 1, rank 1 waits in 1F1 for the outputs of micro-batch 1 from stage 0 on rank 0; "
        "change the order of these actions"
    )


def test_auto_takes_no_more_stages_than_layers():
    assert SchedulePlan("auto", 2, 0, 8, num_layers=8).placement.num_stages == 4
    assert SchedulePlan("auto", 2, 0, 8, num_layers=3).placement.num_stages == 2
    assert (
        SchedulePlan("auto", 4, 0, 8, num_layers=3).placement.num_stages == 4
    )  # the cut refuses it
