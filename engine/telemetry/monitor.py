"""The writers of a monitor: rank 0 writes (name, value, global_samples) events to files or services.

Every rank checks for the optional packages before training starts, so all ranks stop together if one is
missing.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from ...utils.errors import UsageError
from ...utils.quoting import printable
from ...utils.small_files import open_no_link
from ..config.config import Config
from ..config.sections import Comet, CsvMonitor, TensorBoard, Wandb
from .record import RunRecord
from .report import Event, Monitor, Writer

FileSection = TensorBoard | CsvMonitor


@final
class CsvWriter(Writer):
    """One CSV file per name in `output_path/job_name`: Train_Samples_lr.csv for 'Train/Samples/lr'.

    The header is `step,<last part of the name>`. A resumed job appends without a second header.
    """

    def __init__(self, section: FileSection) -> None:
        self._folder = _folder(section, "csv_monitor")

    def write(self, events: Sequence[Event]) -> None:
        for name, value, num_samples in events:
            path = self._folder / (name.replace("/", "_").replace(" ", "_") + ".csv")
            with open(path, "a", newline="", opener=open_no_link) as file:
                rows = csv.writer(file, lineterminator="\n")
                if file.tell() == 0:
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([num_samples, value])

    def close(self) -> None:
        pass


@final
class TensorBoardWriter(Writer):
    """Scalars in an event file in `output_path/job_name`."""

    def __init__(self, section: FileSection) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._summary: Any = SummaryWriter(log_dir=str(_folder(section, "tensorboard")))

    def write(self, events: Sequence[Event]) -> None:
        for name, value, num_samples in events:
            self._summary.add_scalar(name, value, num_samples)
        self._summary.flush()

    def close(self) -> None:
        self._summary.close()


@final
class WandbWriter(Writer):
    """A separate Weights & Biases run; a run that the user has open is not changed."""

    def __init__(self, section: Wandb) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=section.project, group=section.group, entity=section.team
        )

    def write(self, events: Sequence[Event]) -> None:
        # One log call for all names of a step: W&B drops values of a step that is older than the last one.
        by_step: dict[int, dict[str, float]] = {}
        for name, value, num_samples in events:
            by_step.setdefault(num_samples, {})[name] = value
        for num_samples in sorted(by_step):
            self._run.log(by_step[num_samples], step=num_samples)

    def close(self) -> None:
        self._run.finish()


@final
class CometWriter(Writer):
    """A Comet experiment; each name is sent at most once per `samples_log_interval` samples."""

    def __init__(self, section: Comet) -> None:
        import comet_ml

        self._interval_samples = section.samples_log_interval
        self._last_sent: dict[str, int] = {}
        self.experiment: Any = comet_ml.start(
            api_key=section.api_key,
            project=section.project,
            workspace=section.workspace,
            experiment_key=section.experiment_key,
            mode=section.mode,
            online=section.online,
        )
        if section.experiment_name is not None:
            self.experiment.set_name(section.experiment_name)

    def write(self, events: Sequence[Event]) -> None:
        for name, value, num_samples in events:
            last = self._last_sent.get(name)
            if last is None or num_samples - last >= self._interval_samples:
                self._last_sent[name] = num_samples
                self.experiment.log_metric(name=name, value=value, step=num_samples)

    def close(self) -> None:
        self.experiment.end()


def build_monitor(config: Config, rank: int, record: RunRecord | None = None) -> Monitor:
    """Open the writers that `config` enables on global rank 0; a disabled monitor on other ranks.

    Raises:
        UsageError: on every rank, when the package that an enabled section needs is missing; on rank 0, when
            a folder cannot be created or written.
    """
    if config.tensorboard.enabled:
        _require("tensorboard", section="tensorboard", extra="tensorboard")
    if config.wandb.enabled:
        _require("wandb", section="wandb", extra="wandb")
    if config.comet.enabled:
        _require("comet_ml", section="comet", extra="comet")
    if rank != 0:
        return Monitor()
    writers: list[Writer] = []
    if config.tensorboard.enabled:
        writers.append(TensorBoardWriter(config.tensorboard))
    if config.wandb.enabled:
        writers.append(WandbWriter(config.wandb))
    if config.csv_monitor.enabled:
        writers.append(CsvWriter(config.csv_monitor))
    if config.comet.enabled:
        writers.append(CometWriter(config.comet))
    return Monitor(writers, record)


def _folder(section: FileSection, name: str) -> Path:
    """The folder of the section `name`, created and found writable."""
    try:
        path = Path(section.output_path).expanduser() / section.job_name
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except (OSError, RuntimeError, ValueError) as error:  # pathlib: no such home; a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{name}.output_path = {printable(section.output_path)}: its folder {printable(section.job_name)} "
            f"cannot be written: {reason}; set another path, or {name}.enabled to false"
        ) from None
    return path


def _require(package: str, *, section: str, extra: str) -> None:
    if package not in sys.modules and find_spec(package) is None:
        raise UsageError(
            f"{section}.enabled = true needs the package {package!r}, which is not installed; run "
            f'pip install -e ".[{extra}]" in the xds checkout (or pip install {package}), or set '
            f"{section}.enabled to false."
        )
