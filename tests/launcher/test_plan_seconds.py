"""Seconds of a step: the order of the real objects, clocks computed by hand, and machine files."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_models import config_of

from xds.engine.config.config import parse_config
from xds.engine.planning import machine as machines
from xds.engine.planning import trace as tracing
from xds.engine.planning.machine import Machine, Table, load_machine, parse_machine
from xds.engine.planning.models import FunctionModel
from xds.engine.planning.plan import Plan, make_plan
from xds.engine.planning.seconds import (
    BUBBLE,
    HOST,
    MESSAGES,
    OTHER_KERNELS,
    PARTS,
    UPDATE,
    StepSeconds,
    step_seconds,
)
from xds.engine.planning.trace import Run
from xds.launcher import bench_machine
from xds.launcher.bench import MachinePlan, read_machine
from xds.launcher.plan import main
from xds.ops.comm.fake import Start, Wait
from xds.ops.comm.opening import open_collectives
from xds.utils.errors import ConfigError, UsageError

LATENCY, LINK = 1e-5, 1e9


def number(value: float) -> dict[str, Any]:
    return {"value": value, "source": "a test", "error": 0.1}


def table(*points: list[float]) -> dict[str, Any]:
    return {"points": list(points), "source": "a test", "error": 0.1}


def content(**more: Any) -> dict[str, Any]:
    """A machine on which all kernels are slow but constant in their rates."""
    link = {"latency": table([2, LATENCY]), "rate": table([2, 1e3, LINK])}
    return {
        "name": "a test",
        "device": "cpu",
        "devices_per_host": 8,
        "date": "2026-11-29",
        "device_bytes": number(1e10),
        "host_bytes": number(1e11),
        "matrix": {"fp32": table([64, 64, 64, 1e9]), "bf16": table([64, 64, 64, 4e9])},
        "memory": table([1e3, 1e9]),
        "launch": number(1e-6),
        "update": number(1e9),
        "links": {"host": {"any": link}},
        **more,
    }


def plan_of(config: dict[str, Any], world_size: int) -> Plan:
    source = FunctionModel("planned_models:plain")
    return make_plan(source, parse_config(config), world_size, 8, traces=True)


def seconds_of(config: dict[str, Any], world_size: int, **more: Any) -> StepSeconds:
    return step_seconds(plan_of(config, world_size), parse_machine(content(**more)))


# ---- the order of a step ---------------------------------------------------------------------------------

ORDERS = {
    "stage 0": (config_of(0), 2),
    "stage 1, 4 micro-batches": (config_of(1, count=4), 2),
    "stage 2": (config_of(2, count=2), 4),
    "stage 3": (config_of(3, count=4), 2),
    "stages, stage 1": (config_of(1, pipe=2, count=4), 4),
    "stages, stage 3": (config_of(3, pipe=2, count=2), 4),
}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.quick("stage 1, 4 micro-batches", "stage 3", "stages, stage 3")
def test_the_trace_sends_what_the_plan_counts(name: str) -> None:
    plan = plan_of(*ORDERS[name])
    for rank in plan.ranks:
        assert rank.share.trace is not None
        started = [event for event in rank.share.trace if isinstance(event, Start)]
        sent: Counter[str] = Counter()
        for event in started:
            if event.message.size_bytes > 64 * event.message.ranks:  # not the norm
                sent[event.message.operation] += event.message.size_bytes
        planned = {kind: link.total for kind, link in rank.sent.items() if kind in sent}
        assert dict(sent) == planned, (name, rank.share.pipe)
        assert {event.number for event in started} >= {
            event.number for event in rank.share.trace if isinstance(event, Wait)
        }


def test_the_next_unit_is_on_its_way_while_a_block_runs() -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "unit_min_numel": 0}
    zero["stage3_max_reuse_distance"] = 0
    config = {**config_of(3), "zero_optimization": zero}
    trace = plan_of(config, 2).ranks[0].share.trace
    assert trace is not None
    order = [
        event.name.removeprefix("blocks.") + "b" * event.is_backward
        if isinstance(event, Run)
        else type(event).__name__[0] + event.message.operation[0]
        if isinstance(event, Start)
        else "W"
        for event in trace
        if isinstance(event, (Run, Start, Wait))
    ]
    text = " ".join(order)
    assert (
        "W Sa 0 W Sa 1 W Sa 2 W 3" in text
    )  # each gather starts before the block that precedes it
    assert "3b Sr W Sa 2b Sr" in text or "3b Sr" in text
    backward = text.index("3b")
    assert text.index("Sr", backward) < text.index(
        "2b", backward
    )  # reduced while the next one runs


# ---- clocks ----------------------------------------------------------------------------------------------


def test_one_rank_takes_its_kernels_and_its_update() -> None:
    step = seconds_of(config_of(0), 1)
    plan = plan_of(config_of(0), 1)
    seen = plan.observed[0]
    kernels: Counter[Any] = Counter()
    for by_place in (seen.forward, seen.backward):
        for events in by_place.values():
            for each in events:
                kernels.update(each)  # type: ignore[call-overload]
    other = sum(k.size_bytes * n for k, n in kernels.items() if not k.flops) / 1e9
    assert step.parts["matrix work"] >= sum(k.flops * n for k, n in kernels.items()) / 1e9 * 0.99
    assert step.parts[OTHER_KERNELS] >= other and step.parts[HOST] > 0
    assert step.parts[UPDATE] == pytest.approx(plan.num_parameters * 28 / 1e9, rel=0.02)  # Adam
    assert step.parts[MESSAGES] == step.parts[BUBBLE] == 0
    assert step.total == pytest.approx(sum(step.parts[part] for part in PARTS))
    assert step.error == pytest.approx(0.1) and step.bound.startswith("matrix work: ")


def test_messages_that_cannot_overlap_are_waited_for_whole() -> None:
    link = content()["links"]["host"]["any"]
    hidden, whole = (
        seconds_of(config_of(1), 2, links={"host": {"any": {**link, "overlap": overlap}}})
        for overlap in (1.0, 0.0)
    )
    sent = sum(whole.exposed.values())
    assert sent == pytest.approx(
        sum(hidden.exposed.values()) + sum(hidden.hidden.values()), rel=1e-6
    )
    assert sum(whole.hidden.values()) < sent / 100 < sum(hidden.hidden.values())
    assert whole.total > hidden.total


def test_a_message_inside_of_a_host_does_not_wait_for_one_between_hosts() -> None:
    layers = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    plan = {f"model.layers.*.mlp.{name}": word for name, word in layers.items()}
    config = {**config_of(1), "tensor_parallel": {"tp_size": 2, "plan": plan}}
    made = make_plan(FunctionModel("planned_models:llama"), parse_config(config), 4, 2, traces=True)
    link = content()["links"]["host"]["any"]
    found = []
    for rate in (LINK, LINK / 1000):
        links = {"host": {"any": link}, "hosts": {"any": {**link, "rate": table([2, 1e3, rate])}}}
        found.append(step_seconds(made, parse_machine(content(links=links))))
    near = [step.exposed["tensor all_reduce"] for step in found]
    assert near[0] == pytest.approx(near[1]) and near[0] > 0
    assert found[1].exposed["reduce_scatter"] > 100 * found[0].exposed["reduce_scatter"]


def test_a_pipeline_waits_as_its_table_says() -> None:
    config = config_of(1, pipe=2, count=8)
    step, alone = seconds_of(config, 2), seconds_of(config_of(1, pipe=2, count=2), 2)
    assert 0 < step.parts[BUBBLE] / step.total < alone.parts[BUBBLE] / alone.total < 0.7
    assert step.exposed["activations"] > 0
    plan = make_plan(FunctionModel("planned_models:plain"), parse_config(config), 2, 1, traces=True)
    with pytest.raises(ConfigError, match=r"links.hosts.\w+: is needed"):
        step_seconds(plan, parse_machine(content()))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.quick("3")
def test_middle_micro_batches_are_like_the_second(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(stage, pipe=2, count=6)
    ran = []
    act = tracing.Tracer._act

    def counted(self: Any, *args: Any) -> None:
        ran.append(args[0])
        act(self, *args)

    monkeypatch.setattr(tracing.Tracer, "_act", counted)
    found = [rank.share.trace for rank in plan_of(config, 2).ranks]
    few = len(ran)
    monkeypatch.setattr(tracing, "_repeated", lambda row, gathers: ({}, set()))
    assert found == [rank.share.trace for rank in plan_of(config, 2).ranks]
    assert few < len(ran) - few


def test_the_largest_wait_has_a_line_of_its_own() -> None:
    text = seconds_of(config_of(1, pipe=2, count=2), 2).bound
    assert re.search(r"then bubble: \d+% of the step; twice as many micro-batches leave", text)


def test_a_host_that_launches_slowly_bounds_a_gpu() -> None:
    slow = seconds_of(config_of(0), 1, device="cuda", launch=number(1e-2))
    kernels = slow.parts[HOST] / 1e-2
    assert slow.bound.startswith("host-bound") and kernels > 20
    quick = seconds_of(config_of(0), 1, device="cuda", launch=number(1e-9))
    assert quick.parts[HOST] < 1e-6


def test_an_update_on_the_host_comes_with_its_copies() -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    copies = {"to_host": number(1e8), "to_device": number(1e8)}
    config = {**config_of(1), "zero_optimization": zero}
    with pytest.raises(ConfigError, match="to_host: is needed"):
        seconds_of(config, 2, device="cuda")
    step = seconds_of(config, 2, device="cuda", **copies)
    assert step.parts["offload copies"] > 0 and step.parts[UPDATE] > 0


def test_recomputed_blocks_run_their_forward_twice() -> None:
    config = config_of(0)
    again = {**config, "activation_checkpointing": {"enabled": True}}
    plain, recomputed = seconds_of(config, 1), seconds_of(again, 1)
    assert recomputed.parts["matrix work"] > 1.2 * plain.parts["matrix work"]
    assert recomputed.flops == plain.flops


def test_fused_kernels_of_a_source_are_those_of_compiled_blocks() -> None:
    found = []
    for fuses, compiles in ((False, False), (True, False), (False, True)):
        source = FunctionModel("planned_models:llama")
        source.fuses = fuses
        config = parse_config({**config_of(0), "compile": {"enabled": compiles}})
        plan = make_plan(source, config, 1, 8, traces=True)
        found.append(step_seconds(plan, parse_machine(content())).parts)
    plain, fused, compiled = found
    assert fused == compiled and fused[OTHER_KERNELS] < plain[OTHER_KERNELS]


NORMS = ("input_layernorm", "post_attention_layernorm")


def test_norms_of_a_part_of_the_tokens_are_faster() -> None:
    layers = {name: "colwise" for name in ("q_proj", "k_proj", "v_proj")} | {"o_proj": "rowwise"}
    plan = {f"model.layers.*.self_attn.{name}": word for name, word in layers.items()}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "activation_checkpointing": {"enabled": True},
        "tensor_parallel": {"tp_size": 2, "plan": plan},
    }
    source, found = FunctionModel("planned_models:llama"), []
    for _ in range(2):
        made = make_plan(source, parse_config(config), 2, 8, traces=True)
        found.append(step_seconds(made, parse_machine(content())).parts[OTHER_KERNELS])
        plan.update({f"model.layers.*.{name}": "sequence_parallel" for name in NORMS})
    assert found[1] < 0.9 * found[0]


# ---- machine files ---------------------------------------------------------------------------------------


def test_tables_are_linear_in_logarithms() -> None:
    rates = Table(points=((2, 100, 1.0), (2, 10000, 100.0), (8, 100, 4.0)), source="")
    assert [rates.at(2, size) for size in (1, 100, 1000, 10**9)] == pytest.approx([1, 1, 10, 100])
    assert rates.at(4, 100) == pytest.approx(2) and rates.at(16, 100) == pytest.approx(4)
    shapes = Table(points=((8, 8, 8, 2.0), (64, 64, 64, 8.0)), source="")
    assert shapes.near(8, 8, 8) == pytest.approx(2)
    assert 2 < shapes.near(16, 16, 16) < 4 < shapes.near(32, 32, 32) < 8


WRONG = {
    "a key that is no key": ({"launchs": 1}, 'launchs: unknown key; did you mean "launch"?'),
    "a negative number": ({"launch": number(-1)}, "launch.value = -1"),
    "a point too short": ({"memory": table([1, 2, 3])}, "must have 2 numbers"),
    "unequal points": ({"memory": table([1, 2], [1])}, "all points must have as many numbers"),
    "a device": ({"device": "tpu"}, 'device = "tpu": must be one of cpu, cuda, rocm, xpu, npu'),
    "a dtype": ({"matrix": {"fp33": table([1, 1, 1, 1])}}, '"fp33"'),
    "a number without a source": ({"launch": {"value": 1}}, "launch.source: is missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_machine_files_are_told_in_a_sentence(name: str) -> None:
    changed, told = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        parse_machine(content(**changed))
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_no_machine(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    for text, told in (("{", "is no JSON"), ("[]", "the file = []")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"machine") as caught:
            load_machine(path)
        assert told in str(caught.value)
    with pytest.raises(ConfigError, match="ready ones are"):
        load_machine("no-such-machine")


def test_every_ready_machine_is_one_and_other_kinds_of_devices_are_known() -> None:
    names = [path.stem for path in machines.READY.glob("*.json")]
    assert all(isinstance(load_machine(name), Machine) for name in names)
    for device in ("xpu", "npu"):
        assert parse_machine(content(device=device)).device == device


def test_the_command_prints_the_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(content()))
    words = [json.dumps(config_of(1)), "--model", "planned_models:plain", "--world-size", "2"]
    assert main([*words, "--machine", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "Seconds of a step on a test" in shown and "tokens/s" in shown
    assert all(part in shown for part in ("matrix work", "update", "gradients reduced"))
    assert main([*words, "--machine", "nothing"]) == 2
    assert "xds plan: machine nothing" in capsys.readouterr().err


@pytest.mark.slow
def test_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_machine, "ROUND_SECONDS", 1e-4)
    monkeypatch.setattr(bench_machine, "PASSES", 2)
    monkeypatch.setattr(bench_machine, "UPDATED_NUMEL", 1 << 12)
    monkeypatch.setattr(bench_machine, "HOST_SQUARES", (16, 64))
    monkeypatch.setattr(bench_machine, "MEMORY_POWERS", (12, 14))
    device = torch.device("cpu")
    meter = bench_machine.Meter(open_collectives(None, device), None, device)
    plan = MachinePlan("", "here", [], None, [2], ["fp32"], str(tmp_path))
    source = FunctionModel("planned_models:plain")
    machine = parse_machine(meter.machine(plan, [source]))
    assert machine.devices_per_host == 1 and machine.disk_write is not None and not machine.links
    step = step_seconds(plan_of(config_of(0), 1), machine)
    assert 0 < step.total < 60 and step.parts["matrix work"] > 0
    monkeypatch.setattr(meter, "_in_model", lambda *_: None)  # as for a model that does not fit
    assert parse_machine(meter.machine(plan, [source])).kernels.keys() == machine.kernels.keys()


def test_a_dtype_that_is_slow_is_measured_in_small_samples_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a CPU without instructions for bf16, where a sample takes minutes."""
    monkeypatch.setattr(bench_machine, "SOURCE_SECONDS", 0.0)
    monkeypatch.setattr(bench_machine, "HOST_SQUARES", (16, 64))
    seen = []
    device = torch.device("cpu")
    meter = bench_machine.Meter(open_collectives(None, device), None, device)

    def in_model(source: Any, size: int, dtype: torch.dtype) -> dict:
        seen.append((source.name, size, dtype))
        return {}

    monkeypatch.setattr(meter, "_in_model", in_model)
    plan = MachinePlan("", "here", [], None, [1, 4], ["fp32", "bf16"], str(tmp_path))
    found = meter._kernels(plan, bench_machine.sources_of(plan, device))
    assert [each[1:] for each in seen] == [(1, torch.float32), (1, torch.bfloat16)]
    assert [point[0] for point in found["matrix"]["bf16"]["points"]] == [16]


def test_words_of_the_bench() -> None:
    plan, rest = read_machine(["--micro-batch", "2,8", "--dtype", "bf16", "--nproc-per-node", "2"])
    assert (plan.micro_batches, plan.dtypes) == ([2, 8], ["bf16"])
    assert rest == ["--nproc-per-node", "2"]
    for words, told in (
        (["--dtype", "fp4"], "--dtype = fp4"),
        (["--micro-batch", "0"], "numbers from 1"),
    ):
        with pytest.raises(UsageError, match=told):
            read_machine(words)
