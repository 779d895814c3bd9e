"""Checkpoints of nodes with folders of their own: what each folder has, loads, what is missing."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_new_ranks
from node_runs import engine_of, folder_of, same, values_of
from saved_checkpoints import train

import xds
from xds.engine.checkpoint.io.folders import committed
from xds.engine.checkpoint.manifest import Manifest, SavedNode
from xds.engine.checkpoint.node_finding import Entry, Inventory, common, incomplete
from xds.engine.checkpoint.nodes import ranges_of
from xds.launcher.checkpoint import main
from xds.zero.checkpoint.ranges import Range


def save_and_load(base: str, stage: int, per_node: int, is_async: bool) -> dict[str, Any]:
    os.environ["RANK"] = str(torch.distributed.get_rank())
    folder = folder_of(base, per_node)
    engine = engine_of(stage, async_save=is_async)
    train(engine, 2)
    # buffers differ on every rank, and a client state has tensors
    engine.module.norm.num_batches_tracked += engine.global_rank
    torch.manual_seed(engine.global_rank)
    engine.save_checkpoint(folder, client_state={"t": torch.arange(3), "rank": engine.global_rank})
    engine.wait_for_checkpoint()
    before = values_of(engine)
    train(engine, 1)
    after = values_of(engine)
    engine.save_checkpoint(folder, "best")
    engine.save_checkpoint(folder, "best")  # over itself
    engine.wait_for_checkpoint()
    engine.destroy()

    again = engine_of(stage)
    torch.manual_seed(99)
    path, client_state = again.load_checkpoint(folder, "global_step2")
    batches = int(again.module.norm.num_batches_tracked)
    is_same = same(values_of(again), before)
    train(again, 1)
    return {
        "files": sorted(path.name for path in Path(folder, "best").iterdir()),
        "tags": sorted(path.name for path in Path(folder).iterdir()),
        "latest": Path(folder, "latest").read_text(),
        "same": is_same and same(values_of(again), after),
        "batches": batches,
        "client": (client_state["rank"], client_state["t"].tolist()),
        "path": path == f"{folder}/global_step2",
    }


def check_round_trip(results: list[Any], per_node: int) -> None:
    for rank, found in enumerate(results):
        local = [other for other in range(len(results)) if other // per_node == rank // per_node]
        assert [name[:10] for name in found["files"][1:]] == [f"rank_{one:05d}" for one in local]
        assert found["files"][0] == "manifest.json"
        assert found["tags"] == ["best", "global_step2", "latest"]  # nothing hidden is left
        assert found["latest"] == "best"
        assert found["same"]
        assert found["batches"] == 2 + rank
        assert found["client"] == (0, [0, 1, 2])
        assert found["path"]


@pytest.mark.parametrize(("stage", "is_async"), [(0, False), (1, True), (3, False)])
def test_each_node_has_all_that_its_ranks_need(tmp_path: Path, stage: int, is_async: bool) -> None:
    check_round_trip(run_new_ranks(save_and_load, 2, str(tmp_path), stage, 1, is_async), 1)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world", "per_node"), [(4, 2), (3, 2)])
def test_nodes_of_several_ranks(tmp_path: Path, stage: int, world: int, per_node: int) -> None:
    check_round_trip(
        run_new_ranks(save_and_load, world, str(tmp_path), stage, per_node, stage == 2), per_node
    )


def save_three(base: str, stage: int) -> Any:
    """Checkpoints of three steps; returns the last weights."""
    os.environ["RANK"] = str(torch.distributed.get_rank())
    engine = engine_of(stage)
    for _ in range(3):
        train(engine, 1)
        engine.save_checkpoint(folder_of(base, 1))
    return engine.full_state_dict(rank0_only=False, full_precision=True)


def load(base: str, stage: int, tag: str | None = None, **how: Any) -> Any:
    """The tag that is loaded, or the error's text; and the weights. how: `is_local`, or options of the load."""
    os.environ["RANK"] = str(torch.distributed.get_rank())
    is_local = how.pop("is_local", True)
    engine = engine_of(stage, is_local=is_local)
    folder = folder_of(base, 1) if how.pop("own", True) else base
    try:
        path, _ = engine.load_checkpoint(folder, tag, **how)
    except xds.XdsError as error:
        return str(error), None
    return Path(path or "nothing").name, engine.full_state_dict(
        rank0_only=False, full_precision=True
    )


def test_a_lost_part_is_named_and_an_older_checkpoint_loads(tmp_path: Path) -> None:
    run_new_ranks(save_three, 2, str(tmp_path), 1)
    shutil.rmtree(tmp_path / "node1" / "global_step3")
    (text, _), (other, _) = run_new_ranks(load, 2, str(tmp_path), 1)
    assert text == other
    assert "global_step3 is not complete" in text
    assert "Missing: node 1 (" in text
    assert ": rank 1) in " in text
    assert "(needed by rank 1)" in text
    assert "the newest that all nodes have is global_step2" in text
    for rank in range(2):
        assert run_new_ranks(load, 2, str(tmp_path), 1, "global_step2")[rank][0] == "global_step2"
    assert [tag for tag, _ in run_new_ranks(load_with_fallback, 2, str(tmp_path))] == [
        "global_step2"
    ] * 2


def load_with_fallback(base: str) -> Any:
    return load(base, 1, fallback=True)


def test_a_lost_disk(tmp_path: Path) -> None:
    run_new_ranks(save_three, 2, str(tmp_path), 3)
    shutil.rmtree(tmp_path / "node0")
    text, _ = run_new_ranks(load, 2, str(tmp_path), 3)[0]
    assert "Missing: node 0 (" in text
    assert "Start the job on the nodes that saved it" in text


def test_nodes_in_another_order(tmp_path: Path) -> None:
    run_new_ranks(save_three, 2, str(tmp_path), 3)
    os.rename(tmp_path / "node0", tmp_path / "node2")
    os.rename(tmp_path / "node1", tmp_path / "node0")
    os.rename(tmp_path / "node2", tmp_path / "node1")
    text, _ = run_new_ranks(load, 2, str(tmp_path), 3)[0]
    assert "in the same order" in text
    assert ", where there is node 1 (" in text


def load_anyhow(base: str, stage: int, own: bool, is_local: bool) -> Any:
    return load(base, stage, own=own, is_local=is_local)


def test_other_ranks_need_the_parts_in_one_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = run_new_ranks(save_three, 2, str(tmp_path), 1)  # buffers are each rank's own
    text, _ = run_new_ranks(load, 1, str(tmp_path), 1)[0]
    assert "was saved by 2 ranks on 2 nodes, each into its own folder, and this job has 1" in text
    text, _ = run_new_ranks(load_anyhow, 1, str(tmp_path / "node0"), 1, False, False)[0]
    assert "needs the part of node 1 (" in text

    assert main(["verify", str(tmp_path / "node0")]) == 0
    assert "1 file of 2" in capsys.readouterr().out
    assert main(["info", str(tmp_path / "node1")]) == 0
    assert "node 0 (" in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "node0"), str(tmp_path / "node1")]) == 2
    assert "does not have the part of node " in capsys.readouterr().err

    together = tmp_path / "all"
    shutil.copytree(tmp_path / "node0", together)
    shutil.copytree(tmp_path / "node1", together, dirs_exist_ok=True)
    for world, stage, is_local in ((1, 3, False), (2, 1, True), (2, 3, True)):
        results = run_new_ranks(load_anyhow, world, str(together), stage, False, is_local)
        for (tag, found), own in zip(results, weights, strict=False):
            assert tag == "global_step3"
            assert all(torch.equal(value, own[name]) for name, value in found.items())
    found = xds.get_fp32_state_dict(together)
    assert all(torch.equal(value, weights[0][name]) for name, value in found.items())
    assert main(["verify", str(together)]) == 0
    assert "is complete: 2 files" in capsys.readouterr().out
    assert main(["diff", str(together), str(together)]) == 0

    path = together / "global_step3" / committed(together)[0].files[1].path
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["verify", str(together)]) == 1


def test_another_stage_says_which_part_it_needs(tmp_path: Path) -> None:
    run_new_ranks(save_three, 2, str(tmp_path), 3)
    text, _ = run_new_ranks(load, 2, str(tmp_path), 0)[0]
    assert "needs the part of node" in text
    assert "Load with the ranks, the stage and the nodes that saved it" in text


def one_folder(base: str) -> Any:
    engine = engine_of(1)
    train(engine, 1)
    engine.save_checkpoint(base)
    return [len(one.nodes) for one in committed(Path(base))], sorted(os.listdir(base))


def test_nodes_that_share_a_folder_save_as_usual(tmp_path: Path) -> None:
    for found in run_new_ranks(one_folder, 2, str(tmp_path)):
        assert found == ([0], ["global_step1", "latest"])


def broken(base: str, broken_rank: int) -> Any:
    os.environ["RANK"] = str(torch.distributed.get_rank())
    engine = engine_of(1)
    folder = folder_of(base, 1)
    train(engine, 1)
    engine.save_checkpoint(folder, "best")
    old = sorted(path.name for path in Path(folder, "best").iterdir())
    if engine.global_rank == broken_rank:
        # the new files can not be put beside the old ones
        Path(folder, "best").chmod(0o500)
        os.rename = refuse  # root may write anywhere
    with pytest.raises(xds.XdsError, match=f"rank {broken_rank}.*no space"):
        engine.save_checkpoint(folder, "best")
    Path(folder, "best").chmod(0o700)
    new = sorted(path.name for path in Path(folder, "best").iterdir())
    return old == new, [name for name in os.listdir(folder) if name.startswith(".")]


def refuse(*paths: Any) -> None:
    raise OSError("no space")


@pytest.mark.parametrize("broken_rank", [0, 1])
def test_a_failure_on_one_node_leaves_the_old_checkpoint_on_all(
    tmp_path: Path, broken_rank: int
) -> None:
    assert run_new_ranks(broken, 2, str(tmp_path), broken_rank) == [(True, [])] * 2
    assert [tag for tag, _ in run_new_ranks(load, 2, str(tmp_path), 1)] == ["best", "best"]


# -- as arithmetic ------------------------------------------------------------------------------------------


def entry(
    tag: str, step: int, *, fits: bool = True, has: tuple[int, ...] = (), save: str = "s"
) -> Entry:
    nodes = [("node 0 (a: rank 0)", [0]), ("node 1 (b: rank 1)", [1])]
    return Entry(
        tag=tag,
        save=save,
        fits=fits,
        world_size=2,
        nodes=nodes,
        has=list(has),
        place=(step, step),
    )


def there(host: str, *entries: Entry) -> Inventory:
    return Inventory(where=f"{host}:/x", latest=None, entries=list(entries))


def test_what_all_nodes_have() -> None:
    both = entry("t1", 1)
    assert [one.tag for one in common([there("a", both, entry("t2", 2)), there("b", both)])] == [
        "t1"
    ]
    # two saves under one tag: only one of them is everywhere
    found = common(
        [
            there("a", entry("t", 1, save="old"), entry("t", 2, save="new")),
            there("b", entry("t", 1, save="old")),
        ]
    )
    assert [(one.tag, one.save) for one in found] == [("t", "old")]
    assert common([there("a", both), there("b", entry("t1", 1, fits=False))]) == []


def test_what_is_missing() -> None:
    lost = incomplete(entry("t1", 1), [there("a", entry("t1", 1)), there("c")])
    assert "Missing: node 1 (b: rank 1) in c:/x (needed by rank 1)" in lost
    swapped = [
        there("b", entry("t1", 1, fits=False, has=(1,))),
        there("a", entry("t1", 1, fits=False, has=(0,))),
    ]
    text = incomplete(entry("t1", 1), swapped)
    assert (
        "node 0 (a: rank 0) in b:/x, where there is node 1 (b: rank 1) (needed by rank 0)" in text
    )


def test_each_element_counts_once() -> None:
    def part(file: int, start: int, stop: int, flat: int = 0) -> Range:
        return Range(flat, "value", start, stop, file, "t", "float32")

    records = [
        [part(0, 0, 4), part(0, 0, 2, flat=1)],  # node 0 has all of flat 0, in two files
        [part(1, 4, 8)],
        [part(2, 0, 8), part(2, 2, 4, flat=1)],  # node 1 too, in one; of flat 1 the other half
    ]
    files = tuple(replace_ranges(found) for found in records)
    nodes = (SavedNode("a", (0, 1)), SavedNode("b", (2,)))
    manifest = Manifest("f", 2, "x", "t", 3, 1, (), files, {}, nodes=nodes)
    of_files = [(one.file, one.flat) for one in ranges_of(manifest)]
    assert of_files == [(0, 0), (0, 1), (1, 0), (2, 1)]
    near = [(one.file, one.flat) for one in ranges_of(manifest, near={2})]
    assert near == [(2, 0), (2, 1), (0, 1)]
    assert ranges_of(manifest, near={0, 2}) == ranges_of(manifest, near={2})  # node 0 is not whole
    torn = replace(manifest, files=(files[0], files[1], replace_ranges([part(2, 3, 5)])))
    assert len(ranges_of(torn)) == 3
    with pytest.raises(ValueError, match="only in part"):
        ranges_of(replace(torn, files=(files[0], replace_ranges([]), files[2])))


def replace_ranges(ranges: list[Range]) -> Any:
    from xds.engine.checkpoint.manifest import FileRecord

    return FileRecord("p", 1, 4096, (0,), tuple(ranges), (), {})
