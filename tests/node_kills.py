"""Test helper: kills of two ranks that are nodes with folders of their own. Each run loads what is left."""

from __future__ import annotations

from kill_runs import Killer, Run, Tally


class NodeKiller(Killer):
    """As `Killer`. What is left is checked by the next run: both ranks load it, and compare every element."""

    _last_done = 0

    def trial(self) -> None:
        run = Run(self.folder, self.scenario)
        run.wait_ready()
        self._compare(run)
        run.listen(self._random.uniform(0, self._window_seconds))
        victims = list(run.ranks)
        self._random.shuffle(victims)
        for process in victims[:1] if self.scenario.victims == "one" else victims:
            process.kill()
        run.end()
        self.tally.kills += 1
        self.tally.inside += run.is_inside
        self._last_done = max(run.last_done, self._last_done)

    def _compare(self, run: Run) -> None:
        """Both ranks have loaded one step, not older than the last one that was reported as saved."""
        found = {one for words in run.received for one in words if one.startswith("loaded")}
        where = f"{self.scenario.label}, after kill {self.tally.kills}"
        if len(found) != 1:
            self.tally.unloadable.append(f"{where}: {found}")
            return
        step = int(found.pop().split()[1])
        self.tally.checked += 1
        self.tally.committed_unreported += step > self._last_done
        if step < self._last_done:
            self.tally.lost.append(f"{where}: step {self._last_done} was saved, {step} is loaded")

    def finish(self) -> Tally:
        """Two saves without a kill must leave only checkpoints, on both nodes."""
        from xds.engine.checkpoint.io.folders import MANIFEST, committed

        run = Run(self.folder, self.scenario, num_saves=2)
        run.wait_ready()
        self._compare(run)
        run.end()
        if any(process.exitcode for process in run.ranks):
            self.tally.unloadable.append(f"the last run failed: {run.said}")
            return self.tally
        for rank in range(2):
            node = self.folder / f"node{rank}"
            self.tally.left += [str(path) for path in node.iterdir() if path.name[0] == "."]
            found = committed(node)
            for manifest in found:
                needed = {MANIFEST, manifest.files[rank].path}
                there = {path.name for path in (node / manifest.tag).iterdir()}
                if there != needed:
                    self.tally.left.append(f"{node / manifest.tag} has {there}, not {needed}")
            keep = self.scenario.keep_last
            if keep and len(found) > keep:
                self.tally.left.append(f"{node}: {len(found)} checkpoints are kept, not {keep}")
        self.close()
        return self.tally
