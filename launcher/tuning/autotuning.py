"""`xds --autotuning tune|run`: DeepSpeed's autotuner, with its keys, folders and file names.

1. A run with micro-batches of one sample counts parameters and what a forward keeps (profile_model_info).
2. Stages that cannot fit are left out. Of each other one the largest micro-batch is found: the script's own one
   first, then the computed one, then halves between those that run and those that do not.
3. Micro-batches from a half of it on are tried, with as many for each step as max_train_batch_size allows.
   `fast: false` then tries overlap_comm, or lists of the config.
4. The fastest config and command are written. "run" starts that command.

An experiment is this command line without --autotuning, with the config in place of the script's. Its speed is
that of the wall clock. DeepSpeed reports the sum of three timers instead, and leaves out what is between them.
"""

from __future__ import annotations

import json
import random
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, final

from ...engine.config.autotuning import Autotuning
from ...engine.config.config import parse_config
from ...engine.config.text import read_source
from ...utils.errors import ConfigError, UsageError
from ...utils.messages import never, write_stderr
from ...utils.quoting import printable
from ...utils.schema.section import is_auto
from ..command_line.options import ParsedArgs
from .experiments import METRICS, STDERR, Outcome, read_metrics, run_experiment

MICRO, STEPS, TRAIN = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
CONFIG_OPTIONS = ("--deepspeed_config", "--deepspeed", "--config")
PROFILE = "profile_model_info"
MEASURES = {"throughput": "throughput", "latency": "latency", "flops": "FLOPS_per_gpu"}
PLATEAU = 0.05  # less gain than this ends the search for a larger micro-batch


@final
@dataclass(frozen=True)
class Trial:
    """One experiment that was run. value: its metric, larger is better; None: it failed."""

    name: str
    space: str
    config: Mapping[str, Any]
    value: float | None
    shown: float | None


def main(args: ParsedArgs, mode: str) -> list[str] | None:
    """Tune. Returns the words of the best command where `mode` is "run"; None: nothing is to be started.

    Raises:
        UsageError: the command line names no config, or the model does not run at all.
    """
    tuner = Autotuner(args)
    tuner.tune()
    best = tuner.write()
    return best if mode == "run" else None


@final
class Autotuner:
    """The experiments of one command line."""

    def __init__(self, args: ParsedArgs) -> None:
        self._launcher = _launcher_words(args)
        self._script = [part for word in args.command for part in _option_and_value(word)]
        self._place = _config_place(self._script)
        source = self._script[self._place]
        self._data, name, complaints = read_source(source)
        if complaints or not isinstance(self._data, dict):
            raise ConfigError(complaints or ["must be an object {...}"], name)
        section = self._data.pop("autotuning", None)
        if not isinstance(section, dict) or not section.get("enabled"):
            raise UsageError(
                f"--autotuning: {printable(name)} has no autotuning.enabled = true; add the section "
                "autotuning, or remove the option"
            )
        check = {MICRO: 1, "autotuning": section}
        self.section: Autotuning = parse_config(check).autotuning
        self._results, self._exps = Path(self.section.results_dir), Path(self.section.exps_dir)
        self._trials: list[Trial] = []
        self._begin = time.monotonic()
        self._ranks = 1
        for folder in (self._results, self._exps):
            if self.section.overwrite:
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)

    def tune(self) -> None:
        """Run all experiments."""
        info = self._profile()
        stages = self._stages()
        best_of_before = 0
        for stage in stages:
            largest = self._fitting(stage, info)
            if largest < max(best_of_before, 1):
                self._say(f"stage {stage}: no experiment, {_why_none(largest, best_of_before)}")
                continue
            best = self._micro_batches(stage, largest)
            if best is not None:
                best_of_before = best.config[MICRO]
                if not self.section.fast:
                    self._keys(stage, best)

    def write(self) -> list[str] | None:
        """Write summary.txt and the best config and command. Returns the words of that command."""
        measured = [trial for trial in self._trials if trial.value is not None]
        spaces = dict.fromkeys(trial.space for trial in self._trials)
        lines = [
            "| tuning_space | num_experiments | best_metric_val | best_exp_name |",
            "|:--|--:|--:|:--|",
        ]
        rows = [(space, [t for t in self._trials if t.space == space]) for space in spaces]
        for space, trials in [*rows, ("global", self._trials)]:
            found = [trial for trial in trials if trial.value is not None]
            if found:
                best = max(found, key=_value)
                lines.append(f"| {space} | {len(trials)} | {best.shown:.6g} | {best.name} |")
        took = timedelta(seconds=time.monotonic() - self._begin)
        total = len(self._trials)
        lines += ["", f"Tuning completed in {took}. Total number of experiments: {total}."]
        text = "\n".join(lines) + "\n"
        (self._results / "summary.txt").write_text(text)
        print(text, end="")
        if not measured:
            raise UsageError(
                f"--autotuning: no experiment ran; {self._results}/*/{STDERR} have the reasons"
            )
        best = max(measured, key=_value)
        config = {key: value for key, value in best.config.items() if key != "autotuning"}
        words = ["xds", *self._command(config)]
        (self._results / "ds_config_optimal.json").write_text(json.dumps(config, indent=1))
        (self._results / "cmd_optimal.txt").write_text(shlex.join(words) + "\n")
        print(f"best: {best.name}; {self._results / 'ds_config_optimal.json'}")
        return words[1:]

    # -- what is tried --------------------------------------------------------------------------------------

    def _profile(self) -> Mapping[str, Any]:
        """num_params, activation_mem_per_gpu, memory_per_gpu of the model."""
        known = self.section.model_info
        path = self._results / PROFILE / "model_info.json"
        config = deepcopy(self._data)
        config |= {MICRO: 1, "autotuning": {"enabled": True, "model_info": {"profile": True}}}
        config.pop(TRAIN, None)
        config.pop(STEPS, None)
        config["zero_optimization"] = {**_section(config), "stage": 3}
        config["autotuning"]["model_info_path"] = str(path)
        outcome = self._run(PROFILE, config, kept=path)
        info = read_metrics(path)
        if not info:
            raise UsageError(
                "--autotuning: the model does not run with micro-batches of one sample at stage 3: "
                f"{outcome.reason}; {self._results / PROFILE / STDERR} has the rest"
            )
        if known is not None and known.num_params:
            info["num_params"] = known.num_params
        self._ranks = max(int(info.get("world_size", 1)), 1)
        self._say(f"the model has {info['num_params']:,} parameters")
        return info

    def _stages(self) -> list[int]:
        stage = _section(self._data).get("stage", 0)
        if stage == "all":
            return [0, 1, 2, 3]
        return [int(each) for each in (stage if isinstance(stage, list) else [stage])]

    def _fitting(self, stage: int, info: Mapping[str, Any]) -> int:
        """The largest micro-batch that fits by arithmetic: states of the stage, activations of a sample."""
        ranks = self._ranks
        half = any(_section(self._data, key).get("enabled") for key in ("fp16", "bf16"))
        param, master = (2, 12) if half else (4, 8)  # bytes; Adam has two moments
        states = info["num_params"] / self.section.mp_size
        states *= (
            param / (ranks if stage == 3 else 1)
            + param / (ranks if stage >= 2 else 1)
            + master / (ranks if stage >= 1 else 1)
        )
        each = max(info["activation_mem_per_gpu"], 1)
        found = int((info["memory_per_gpu"] - states) // each)
        return min(found, self._most_micro(ranks))

    def _most_micro(self, ranks: int) -> int:
        most = self.section.max_train_micro_batch_size_per_gpu
        batch = self.section.max_train_batch_size
        return min(most, batch * self.section.mp_size // ranks) if batch else most

    def _micro_batches(self, stage: int, largest: int) -> Trial | None:
        """Try micro-batches of a stage. Returns the best experiment; None: none runs."""
        given = self._data.get(MICRO)
        if isinstance(given, list):
            return _best([self._micro(stage, int(size), self._steps(int(size))) for size in given])
        least = self.section.min_train_micro_batch_size_per_gpu
        tried: list[Trial] = []
        for first in dict.fromkeys((min(self._given(MICRO) or least, largest), least)):
            tried.append(self._micro(stage, first, self._steps(first)))
            if tried[-1].value is not None:
                break
        else:
            return None
        is_too_large = len(tried) > 1  # the script's own one
        high = tried[0].config[MICRO] if is_too_large else largest + 1
        low = self._largest_that_runs(stage, high, tried)
        for size, steps in self._sizes(low, max(low // 2, least)):
            if (size, steps) not in {(t.config[MICRO], t.config[STEPS]) for t in tried}:
                tried.append(self._micro(stage, size, steps))
        return _best(tried)

    def _largest_that_runs(self, stage: int, high: int, tried: list[Trial]) -> int:
        """The largest micro-batch from the last one of `tried` on that runs, or is as fast as a larger one."""
        low, size = tried[-1].config[MICRO], high - 1
        while low < high - 1:  # it is in [low, high)
            trial = self._micro(stage, size, self._steps(size))
            best = max(_value(one) for one in tried)
            tried.append(trial)
            if trial.value is None:
                high = size
            else:
                low = size
                if trial.value - best < PLATEAU * abs(best):
                    break
            size = (low + high) // 2
        return int(low)

    def _sizes(self, largest: int, least: int) -> list[tuple[int, int]]:
        """Micro-batches to try, and how many of them are in a step: those of the largest, or of its batch."""
        stride = max((largest - least) // self.section.num_tuning_micro_batch_sizes, 1)
        sizes = [*range(least, largest, stride), largest]
        batch = self.section.max_train_batch_size
        if not batch:
            return [(size, self._steps(size)) for size in sizes]
        each = batch * self.section.mp_size // self._ranks
        return [(size, max(each // size, 1)) for size in sizes]

    def _micro(self, stage: int, size: int, steps: int) -> Trial:
        space = f"z{stage}"
        config = deepcopy(self._data)
        config |= {MICRO: size, STEPS: steps}
        config.pop(TRAIN, None)
        config["zero_optimization"] = {**_section(config), "stage": stage}
        return self._try(f"{space}_gas{steps}_tmbspg{size}", space, config)

    def _steps(self, size: int) -> int:
        """Micro-batches of a step: the config's, or as many as min_train_batch_size needs."""
        least = -(-self.section.min_train_batch_size // (size * self._ranks))
        return self._given(STEPS) or least

    def _given(self, key: str) -> int | None:
        """A number of the config, or of the argument of the script that has to agree with it."""
        value = self._data.get(key)
        if isinstance(value, int):
            return value
        arguments = {
            k.strip(): str(v).strip() for k, v in (self.section.arg_mappings or {}).items()
        }
        name = arguments.get(key)
        if name not in self._script[:-1] or (key == STEPS and not is_auto(value)):
            return None
        word = self._script[self._script.index(name) + 1]
        return int(word) if word.isdecimal() and int(word) > 0 else None

    def _keys(self, stage: int, best: Trial) -> None:
        """Try the keys of a stage that change its speed, or the lists that the config gives."""
        lists = {
            key: value
            for key, value in _section(self._data).items()
            if isinstance(value, list) and key != "stage"
        }
        spaces = lists or ({"overlap_comm": [True, False]} if stage >= 2 else {})
        choices = list(product(*spaces.values()))
        if self.section.tuner_type == "random":
            random.Random(0).shuffle(choices)
        space, without_gain, top = f"z{stage}_keys", 0, best.value or 0.0
        for number, values in enumerate(choices[: self.section.tuner_num_trials]):
            if without_gain >= max(self.section.tuner_early_stopping, 1):
                break
            config = deepcopy(dict(best.config))
            config["zero_optimization"] |= dict(zip(spaces, values, strict=True))
            trial = self._try(f"{best.name}_{number}", space, config)
            is_better = trial.value is not None and trial.value > top
            without_gain, top = (0, trial.value or top) if is_better else (without_gain + 1, top)

    # -- one experiment -------------------------------------------------------------------------------------

    def _try(self, name: str, space: str, config: dict[str, Any]) -> Trial:
        section = self.section
        config["zero_optimization"] = {
            key: value for key, value in _section(config).items() if not isinstance(value, list)
        }
        config["autotuning"] = {
            "enabled": True,
            "start_profile_step": section.start_profile_step,
            "end_profile_step": section.end_profile_step,
            "metric": section.metric,
            "metric_path": str(self._results / name / METRICS),
        }
        outcome = self._run(name, config, kept=self._results / name / METRICS)
        metrics = outcome.metrics
        value = shown = None
        if metrics:
            shown = float(metrics[MEASURES[section.metric]])
            value = -shown if section.metric == "latency" else shown
        self._say(f"{name}: {outcome.reason if shown is None else f'{section.metric} {shown:.6g}'}")
        trial = Trial(name, space, config, value, shown)
        self._trials.append(trial)
        return trial

    def _run(self, name: str, config: dict[str, Any], kept: Path) -> Outcome:
        """Start an experiment, unless an earlier run has its result."""
        folder = self._results / name
        if not self.section.overwrite and read_metrics(kept):
            return Outcome("measured", "", 0.0, read_metrics(kept))
        words = self._command(config)
        folder.mkdir(parents=True, exist_ok=True)
        record = {"name": name, "ds_config": config, "result_dir": str(folder)}
        (self._exps / f"{name}.json").write_text(json.dumps(record))
        (folder / "ds_config.json").write_text(json.dumps(config))
        (folder / "exp.json").write_text(json.dumps({**record, "launcher_args": self._launcher}))
        (folder / "cmd.txt").write_text(shlex.join(["xds", *words]) + "\n")
        return run_experiment(words, folder)

    def _command(self, config: Mapping[str, Any]) -> list[str]:
        """The words after `xds`: the script's config is replaced, and arguments that have to agree with it."""
        script = list(self._script)
        script[self._place] = _base64(config)
        for key, argument in (self.section.arg_mappings or {}).items():
            value = _find(config, key.strip())
            if value is None or is_auto(value) or isinstance(value, (dict, list)):
                continue
            name = str(argument).strip()
            if name in script[:-1]:
                script[script.index(name) + 1] = str(value)
            else:
                script += [name, str(value)]
        return [*self._launcher, *script]

    def _say(self, text: str) -> None:
        write_stderr(f"xds: autotuning: {text}\n", never)


def _value(trial: Trial) -> float:
    return trial.value if trial.value is not None else float("-inf")


def _best(trials: Sequence[Trial]) -> Trial | None:
    found = [trial for trial in trials if trial.value is not None]
    return max(found, key=_value) if found else None


def _why_none(largest: int, before: int) -> str:
    if largest < 1:
        return "its states and one sample do not fit"
    return (
        f"its largest micro-batch ({largest}) is below the best one of the stage before ({before})"
    )


def _section(config: Mapping[str, Any], name: str = "zero_optimization") -> dict[str, Any]:
    found = config.get(name)
    return dict(found) if isinstance(found, dict) else {}


def _find(config: Mapping[str, Any], key: str) -> Any:
    """The value of a key, in the file or one of its sections; None: there is none."""
    if key in config:
        return config[key]
    inner = (_find(value, key) for value in config.values() if isinstance(value, Mapping))
    return next((value for value in inner if value is not None), None)


def _base64(config: Mapping[str, Any]) -> str:
    from base64 import urlsafe_b64encode

    return urlsafe_b64encode(json.dumps(config).encode()).decode()


def _option_and_value(word: str) -> list[str]:
    """`--deepspeed=x.json` as two words."""
    name, equals, value = word.partition("=")
    return [name, value] if equals and name in CONFIG_OPTIONS else [word]


def _config_place(script: Sequence[str]) -> int:
    """Where the script's arguments have its config. Raises UsageError: nowhere."""
    for option in CONFIG_OPTIONS:
        for place, word in enumerate(script[:-1]):
            if word == option and not script[place + 1].startswith("-"):
                return place + 1
    raise UsageError(
        f"--autotuning: the script has none of {', '.join(CONFIG_OPTIONS)}, so its config cannot be replaced; "
        "let it take the config from one of these"
    )


def _launcher_words(args: ParsedArgs) -> list[str]:
    """The options of `xds` itself, without --autotuning."""
    words: list[str] = []
    for key, value in args.given.items():
        if key != "autotuning" and value:
            name = args.spelled[key]
            words += [name] if value == "1" and _is_switch(key) else [name, value]
    return words


def _is_switch(key: str) -> bool:
    from ..command_line.option_table import OPTIONS

    return any(option.key == key and not option.value for option in OPTIONS)


__all__ = ["Autotuner", "Trial", "main"]
