"""Published runs against plans of the same runs: seconds of a step, memory, bubbles of pipelines.

    python benchmarks/planner/published.py [PATTERN ...] [--markdown PAGE]

PATTERN chooses rows of published.json by id. PAGE gets the number of each row as soon as it is there, and other
rows keep theirs. `half` of a row was fixed by a hash of its id before the first prediction. The marks are those
of the half "graded". What was set from the open half is in as_run.py.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Any, final

import torch
from as_run import (
    FUSED,
    TENSOR_HIDDEN,
    register,
    with_costs_of_rows,
    with_gathers_in_float8,
    with_hidden_share,
    with_overlapped_sums,
    with_plain_exchanges,
    with_rings,
    with_tokens_once_a_host,
    with_whole_recomputation,
)
from torch import nn

from xds.engine.config.config import parse_config
from xds.engine.planning.cache import PlanCache
from xds.engine.planning.machine import Machine, Table, load_machine
from xds.engine.planning.models import ModelSource
from xds.engine.planning.plan import Plan, make_plan
from xds.engine.planning.seconds import StepSeconds, step_seconds
from xds.experts.expected import row_share
from xds.pipe.schedules.plan import SchedulePlan
from xds.pipe.schedules.simulation import Costs, simulate
from xds.tensor.finding import find_plan
from xds.tensor.plan import plan_with_tokens
from xds.tensor.styles import StyleName
from xds.utils.errors import ConfigError, UsageError
from xds.zero.layout.discover import found_blocks

TABLES = "## Marks of the half"  # they begin with it
DIGITS = ".4g"
DATA = Path(__file__).with_name("published.json")
CLASSES = {  # class of a row -> the bound of the mean error
    "dense": 0.12,
    "sparse": 0.20,
    "vtrain": 0.1473,  # what the authors of these runs reach with their own simulator on several hosts
    "memory": 0.15,
    "states": 0.05,
    "closed form": 0.005,
}
AS_RUN = {"overlapped", "async_tensor", "float8_gathers", "once_a_host", "plain_exchange", "ring"}
KINDS = {  # of published.json -> the names of a config and of a model in transformers
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
}


@final
@dataclass(frozen=True)
class Row:
    """One published figure and the run that it is of. See "about" in published.json.

    options: "scattered": tensor ranks share the tokens between layers. Others: see as_run.py and `_hidden`.
    compile: kernels of blocks are fused. xds compiles no blocks that have the tokens of their rank.
    host: GPUs that one fast link connects. micro: samples of a micro-batch. steps: micro-batches of a step.
    attention: the kernel of the run; "flash" is the machine file's own. differs: what xds does otherwise.
    """

    id: str
    claim: str
    cls: str
    half: str
    published: float
    unit: str
    source: str
    differs: str
    model: str = ""
    machine: str = ""
    gpus: int = 1
    host: int = 8
    sequence: int = 0
    micro: int = 1
    steps: int = 1
    stage: int = 0
    tensor: int = 1
    pipe: int = 1
    chunks: int = 1
    sequence_ranks: int = 1
    expert_ranks: int = 1
    recompute: bool = False
    compile: bool = False
    precision: str = "bf16"
    recipe: str = "tensorwise"
    attention: str = "flash"
    options: frozenset[str] = frozenset()
    lora_rank: int = 0

    @property
    def is_foreign(self) -> bool:
        """xds lacks ring attention, 8 bits of slices and experts, and what as_run.py has."""
        others = AS_RUN & self.options
        has_sinks = self.attention == "sinks"
        return self.sequence_ranks > 1 or self.is_priced_in_float8 or has_sinks or bool(others)

    @property
    def has_hidden_sums(self) -> bool:
        """Part of the messages of tensor ranks travels beside products."""
        return bool({"overlapped", "async_tensor"} & self.options)

    @property
    def is_priced_in_float8(self) -> bool:
        """xds does not multiply so: slices and experts. The plan is that of bf16."""
        return self.precision == "float8" and (self.tensor > 1 or self.expert_ranks > 1)

    @property
    def _plain_order(self) -> str:
        """Fewer micro-batches than stages are those of GPipe in both orders, which xds refuses for 1F1B."""
        return "1f1b" if self.steps >= self.pipe else "gpipe"

    @property
    def config(self) -> dict[str, Any]:
        """The config of xds that is nearest to the run."""
        zero: dict[str, Any] = {"stage": self.stage}
        half = "fp16" if self.precision == "fp16" else "bf16"
        precision: dict[str, Any] = {"enabled": True}
        if "offload" in self.options:
            zero["offload_optimizer"] = {"device": "cpu"}
        if "zeropp" in self.options:
            zero |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
            zero["zero_hpz_partition_size"] = self.host
        if "short_states" in self.options:
            precision |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        short = "short_gradients" in self.options
        pipeline = {
            "stages": self.pipe,
            "schedule": "interleaved_1f1b" if self.chunks > 1 else self._plain_order,
            "chunks": self.chunks,
        }
        experts = self.expert_ranks
        return {
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.steps,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            half: precision,
            "zero_optimization": zero,
            "sequence_parallel_size": self.sequence_ranks,
            "tensor_parallel": {
                "tp_size": self.tensor,
                "vocab_parallel_lm_head": self.tensor > 1 and not self.lora_rank,
            },
            "pipeline": pipeline if self.pipe > 1 else {},
            "expert_parallel": {"enabled": experts > 1, "autoep_size": experts},
            "activation_checkpointing": {"enabled": self.recompute},
            "compile": {"enabled": self.compile and "scattered" not in self.options},
            "float8": {
                "enabled": self.precision == "float8" and not self.is_priced_in_float8,
                "recipe": self.recipe,
            },
            "data_types": {"grad_accum_dtype": half if short else None},
        }


@final
class ConfigModel(ModelSource):
    """A model of transformers, from the sizes of its config."""

    def __init__(self, name: str, sizes: Mapping[str, Any], row: Row) -> None:
        self.name = name
        self.fuses = row.compile
        import transformers

        kind = sizes["kind"]
        made, self._class = (getattr(transformers, each) for each in KINDS[kind])
        sizes = {key: value for key, value in sizes.items() if key != "kind"}
        if kind == "gpt2":
            sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            sizes["n_positions"] = row.sequence
        else:
            sizes["max_position_embeddings"] = row.sequence
        self._config = made(use_cache=False, **sizes)
        if row.attention == "eager":
            self._config._attn_implementation = "eager"
        elif row.attention == "sinks":
            register()
            self._config._attn_implementation = FUSED
        self._row = row

    def build(self) -> nn.Module:
        """See `ModelSource.build`."""
        model: nn.Module = self._class(self._config)
        if self._row.lora_rank:
            from peft import LoraConfig, get_peft_model

            lora = LoraConfig(r=self._row.lora_rank, target_modules="all-linear")
            model = get_peft_model(model, lora)
        return model

    def batch(self, micro_batch_size: int) -> Any:
        """See `ModelSource.batch`."""
        tokens = torch.zeros((micro_batch_size, self._row.sequence), dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens.clone()}

    @property
    def experts(self) -> tuple[int, int]:
        """How many there are, and how many a token has."""
        config = self._config
        names = ("num_experts", "n_routed_experts", "num_local_experts")
        found = [getattr(config, name, None) for name in names]
        return next(number for number in found if number), config.num_experts_per_tok

    @property
    def width_of_heads(self) -> int:
        """Of all heads together."""
        config = self._config
        width: int | None = getattr(config, "head_dim", None)
        return (width or config.hidden_size // config.num_attention_heads) * int(
            config.num_attention_heads
        )

    @property
    def flops_per_token(self) -> float:
        """Of a training step as Megatron counts it: products with weights, and all scores of attention."""
        config, model = self._config, self.on_meta()
        weights = sum(
            module.weight.numel()
            for module in model.modules()
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        )
        scores = config.num_hidden_layers * self.width_of_heads * self._row.sequence
        return 6.0 * weights + 12.0 * scores * (0.5 if "causal" in self._row.options else 1.0)


@final
@dataclass(frozen=True)
class Result:
    """A row with its prediction. Both are in the row's unit. reason: why there is none."""

    row: Row
    predicted: float | None
    reason: str = ""
    step: StepSeconds | None = field(default=None, repr=False)

    @property
    def error(self) -> float | None:
        """Relative error."""
        return None if self.predicted is None else self.predicted / self.row.published - 1


@final
class Published:
    """The rows of published.json. models: sizes by name. attention: rates of kernels that a run named."""

    def __init__(self, path: Path = DATA) -> None:
        data = json.loads(path.read_text(encoding="utf-8"))
        self.sources: dict[str, str] = data["sources"]
        self.skipped: dict[str, str] = data["skipped"]
        self.models: dict[str, dict[str, Any]] = data["models"]
        self._attention: dict[str, Any] = data["attention"]
        self.rows = [_row(each) for each in data["rows"]]
        self._cache: tuple[tuple[Any, ...], ConfigModel, PlanCache] | None = None

    def source(self, row: Row) -> ConfigModel:
        """The model of a row."""
        return self._made(row)[0]

    def _made(self, row: Row) -> tuple[ConfigModel, PlanCache]:
        """The model of a row, and what its plans share. Rows of one model come one after the other."""
        key = row.model, row.sequence, row.attention, row.lora_rank, row.compile
        if self._cache is None or self._cache[0] != key:
            source = ConfigModel(row.model, self.models[row.model], row)
            self._cache = key, source, PlanCache(source)
        return self._cache[1:]

    def _narrow(self, row: Row) -> ConfigModel:
        """The model with small layers: a plan is found by a run of a block, and one has 16 GB."""
        sizes = self.models[row.model]
        if "n_embd" in sizes:
            sizes = {**sizes, "n_embd": 8 * sizes["n_head"]}
        return ConfigModel(row.model, sizes, row)

    def plan(self, row: Row) -> Plan:
        """The plan of a row.

        Raises ConfigError or UsageError: xds does not run it.
        """
        (source, cache), config = self._made(row), row.config
        if row.tensor > 1 and ("scattered" in row.options or row.lora_rank):
            config["tensor_parallel"]["plan"] = _slices(self._narrow(row).on_meta(), row)
        traced = sorted({0, row.pipe // 2, row.pipe - 1})
        plan = make_plan(source, parse_config(config), row.gpus, row.host, cache, traces=traced)
        if "reruns_all" in row.options:
            plan = with_whole_recomputation(plan)
        if "ring" in row.options:
            width = source.width_of_heads
            own = row.micro * row.sequence // row.sequence_ranks * width // row.tensor
            plan = with_rings(plan, own)
        if "float8_gathers" in row.options:
            plan = with_gathers_in_float8(plan)
        if "plain_exchange" in row.options:
            experts, choices = source.experts
            rows = row.micro * row.sequence * choices // row.tensor // row.sequence_ranks
            once_a_rank = row.expert_ranks * row_share(experts, row.expert_ranks, choices)
            beside = "exchange_beside" in row.options
            plan = with_plain_exchanges(plan, choices / once_a_rank, rows, beside=beside)
        return with_overlapped_sums(plan) if row.has_hidden_sums else plan

    def machine(self, row: Row) -> Machine:
        """The machine of a row, with the attention kernel that the run had."""
        machine = load_machine(row.machine)
        if row.is_priced_in_float8:
            matrix = {**machine.matrix, "bf16": machine.matrix["float8"]}
            machine = machine.model_copy(update={"matrix": matrix})
        if "plain_exchange" in row.options:
            machine = with_costs_of_rows(machine)
        if row.has_hidden_sums:
            machine = with_hidden_share(machine, TENSOR_HIDDEN)
        if "once_a_host" in row.options:
            sizes = self.source(row).experts
            machine = with_tokens_once_a_host(machine, row.expert_ranks, row.host, *sizes)
        if row.attention in ("flash", "eager", "sinks"):
            return machine
        given = self._attention[f"{row.attention}-{row.machine.partition('-')[0]}"]
        tables = {
            key: {"bf16": Table(points=_rates(given, key), source=given["source"], error=0.15)}
            for key in ("attention", "attention_backward")
        }
        return machine.model_copy(update=tables)

    def predict(self, row: Row) -> Result:
        """The figure of a row."""
        if row.cls == "closed form":
            table = SchedulePlan("1f1b", row.pipe, 0, row.steps, 0).table(row.steps)
            return Result(row, simulate(table, Costs(1.0, 1.0, 1.0)).bubble)
        if "half_recomputed" in row.options:  # the mean of none and of all blocks
            options = row.options - {"half_recomputed"}
            both = [
                self.predict(replace(row, options=options, recompute=each))
                for each in (False, True)
            ]
            figures = [each.predicted for each in both if each.predicted is not None]
            mean = fmean if row.cls == "memory" else harmonic_mean
            return replace(both[0], row=row, predicted=mean(figures) if figures else None)
        try:
            if row.cls in ("states", "memory"):
                plan = self.plan(row)
                per_param = _states_of(plan) / plan.num_parameters
                peak = max(rank.total_bytes for rank in plan.ranks) / 2**30
                return Result(row, per_param if row.cls == "states" else peak)
            step, seconds = self._seconds(row)
        except (ConfigError, UsageError) as error:
            reason = str(error).strip().split("\n")[-1].strip(" -")
            return Result(row, None, f"no plan: {reason}")
        if row.unit == "s":
            return Result(row, seconds, step=step)
        replicas = row.gpus // (row.tensor * row.pipe * row.sequence_ranks)
        rate = row.sequence * row.micro * row.steps * replicas / seconds / row.gpus
        flops = self.source(row).flops_per_token if row.unit == "TFLOP/s/GPU" else 1e12
        return Result(row, rate * flops / 1e12, step=step)

    @staticmethod
    def _hidden(row: Row, step: StepSeconds) -> float:
        """Gathers of new parameters beside the first forward, a third of the work of a micro-batch."""
        if "gathers_ahead" not in row.options:
            return 0.0
        computed = sum(step.parts[part] for part in ("matrix work", "attention", "other kernels"))
        return min(step.exposed.get("all_gather", 0.0), computed / row.steps / 3)

    def _seconds(self, row: Row) -> tuple[StepSeconds, float]:
        """A step, and its seconds.

        Pipelines with many micro-batches repeat themselves: two shorter steps give the longer one.
        """
        machine = self.machine(row)
        if row.pipe == 1 or row.steps <= 4 * row.pipe:
            step = step_seconds(self.plan(row), machine)
            return step, step.total - self._hidden(row, step)
        few, more = (
            step_seconds(self.plan(replace(row, steps=factor * row.pipe)), machine)
            for factor in (2, 3)
        )
        each = (more.total - few.total) / row.pipe
        return more, more.total + each * (row.steps - 3 * row.pipe)


def _row(data: dict[str, Any]) -> Row:
    known = {key: value for key, value in data.items() if key in Row.__dataclass_fields__}
    others = data.keys() - known.keys() - {"class"}
    return Row(cls=data["class"], options=frozenset(others), **known)


def _slices(model: nn.Module, row: Row) -> dict[str, str]:
    """The model's plan, or the one that is found, with LoRA's names; tokens are shared as in the run."""
    base = getattr(getattr(model, "base_model", None), "model", None) if row.lora_rank else None
    inner = model if base is None else base
    blocks = found_blocks(inner, ())
    found: dict[str, str] = plan_with_tokens(inner, blocks) or {
        name: way.name.value for name, way in find_plan(inner, blocks).items()
    }
    shared = StyleName.TOKENS.value
    plan = {name: way for name, way in found.items() if way != shared or "scattered" in row.options}
    if "scattered" in row.options and shared not in plan.values():
        norms = [
            next(k for k, m in b.named_children() if "Norm" in type(m).__name__) for _, b in blocks
        ]
        plan |= {f"{name}.{norm}": shared for (name, _), norm in zip(blocks, norms, strict=True)}
    if not row.lora_rank:
        return plan
    parts = {"colwise": "lora_B", "rowwise": "lora_A"}  # the factor that is cut as the layer is
    lora: dict[str, str] = {}
    for name, way in plan.items():
        if way not in parts:  # "all-linear" leaves out the head
            lora[f"base_model.model.{name}"] = way
            continue
        lora[f"base_model.model.{name}.base_layer"] = way
        lora[f"base_model.model.{name}.{parts[way]}.default"] = way
    return lora


def _rates(given: Mapping[str, Any], key: str) -> tuple[tuple[float, ...], ...]:
    """Points of `Machine.attention` for heads of width 128; sequences double from the first one."""
    first = given["sequence"]
    return tuple((128, first * 2**n, rate * 1e12) for n, rate in enumerate(given[key]))


def _states_of(plan: Plan) -> float:
    """Parameters, gradients, masters and optimizer states of all ranks that share one copy of the model."""
    kinds = ("param", "grad", "master", "optimizer")
    rank = max(plan.ranks, key=lambda rank: sum(rank.states.get(kind, 0) for kind in kinds))
    return float(sum(rank.states.get(kind, 0) for kind in kinds))


# -- marks ----------------------------------------------------------------------------------------------------


def ranks_of(values: Sequence[float]) -> list[float]:
    """The place of each value in their order, from 0; equal ones share the mean of their places."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
        for value in values
    ]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The correlation of two orders of at least two different values."""
    one, other = ranks_of(first), ranks_of(second)
    mean = fmean(one)
    shared = sum((a - mean) * (b - mean) for a, b in zip(one, other, strict=True))
    spread = sum((a - mean) ** 2 for a in one) * sum((b - mean) ** 2 for b in other)
    return shared / spread**0.5 if spread else 1.0


def orders(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    """Rows that answer one question: which machine for a model, which layout for a model and its GPUs."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        row = result.row
        if result.predicted is None or row.cls not in ("dense", "sparse", "vtrain"):
            continue
        if row.claim == "C29":
            groups[f"machines, {row.model}"].append(result)
        elif row.claim in ("C10", "C19", "C20"):
            groups[f"layouts, {row.claim}"].append(result)
        elif row.cls == "vtrain":
            groups[f"layouts, C28 {row.model}, {row.gpus} GPUs"].append(result)
    for name, group in groups.items():
        if len(group) > 2:
            yield name, group


def marks(results: Sequence[Result]) -> Iterator[str]:
    """One line for each class of rows, and for their orders."""
    for cls, bound in CLASSES.items():
        rows = [r for r in results if r.row.cls == cls and r.error is not None]
        for name, chosen in (
            (cls, rows),
            (f"{cls}, as xds runs it", [r for r in rows if not r.row.is_foreign]),
        ):
            errors = [abs(r.error or 0.0) for r in chosen]
            if errors and (chosen is rows or len(chosen) < len(rows)):
                missed = "" if fmean(errors) <= bound else ", target missed"
                mean, most = fmean(errors), max(errors)
                yield f"| {name} | {len(errors)} | {mean:.1%} | {bound:.1%}{missed} | {most:.1%} |"
    found = []
    for name, group in orders(results):
        sign = -1 if group[0].row.unit == "s" else 1
        rate = spearman(
            [sign * r.row.published for r in group], [sign * (r.predicted or 0.0) for r in group]
        )
        found.append((len(group), rate))
        yield f"| order of {name} | {len(group)} | {rate:.2f} | | |"
    if found:
        mean = sum(n * rate for n, rate in found) / sum(n for n, _ in found)
        missed = "" if mean >= 0.9 else ", target missed"
        yield f"| all orders, by rows | {sum(n for n, _ in found)} | {mean:.2f} | 0.90{missed} | |"


def line(result: Result) -> str:
    """A row of the table."""
    row = result.row
    layout = [
        f"{name} {size}"
        for name, size in (
            ("stage", row.stage),
            ("tensor", row.tensor),
            ("pipe", row.pipe),
            ("chunks", row.chunks),
            ("sequence", row.sequence_ranks),
            ("experts", row.expert_ranks),
        )
        if size > 1 or name == "stage"
    ]
    if row.recompute:
        layout.append("recomputed")
    if row.precision != "bf16":
        layout.append(row.precision)
    predicted = "-" if result.predicted is None else f"{result.predicted:{DIGITS}}"
    error = "-" if result.error is None else f"{result.error:+.0%}"
    notes = "; ".join(filter(None, (row.differs, result.reason)))
    where = f"{row.gpus} {row.machine}" if row.machine else ""
    return (
        f"| {row.id} | {row.half} | {where} | {', '.join(layout)} | {row.micro} x {row.steps} "
        f"| {row.published:.4g} {row.unit} | {predicted} | {error} | {notes} |"
    )


def on_page(page: str, rows: Sequence[Row]) -> list[Result]:
    """The numbers that a page has."""
    cells = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    known = {
        each[1]: each[7]
        for each in cells
        if len(each) == len(line(Result(rows[0], None)).split("|"))
    }
    found = []
    for row in rows:
        number = known.get(row.id, "-")
        predicted = None if number == "-" else float(number)
        found.append(Result(row, predicted, "" if predicted else "not computed yet"))
    return found


def markdown(results: Sequence[Result], published: Published) -> Iterator[str]:
    """The tables of docs/published-rows.md."""
    for half in ("graded", "open"):
        yield f'{TABLES} "{half}"\n'
        yield "| rows | number | mean error, or Spearman | target | largest |\n|---|---|---|---|---|"
        yield from marks([r for r in results if r.row.half == half])
        yield ""
    yield "## Rows\n"
    yield "| row | half | GPUs | layout | samples | published | predicted | error | what differs |"
    yield "|---|---|---|---|---|---|---|---|---|"
    yield from map(line, results)
    yield "\n## Not planned\n\n| row | why |\n|---|---|"
    yield from (f"| {claim} | {why} |" for claim, why in published.skipped.items())
    yield "\n## Sources\n"
    yield from (f"- {text}" for text in published.sources.values())


def _as_printed(result: Result) -> Result:
    """Its number has the digits of the page."""
    if result.predicted is None:
        return result
    return replace(result, predicted=float(f"{result.predicted:{DIGITS}}"))


def _write(page: Path, results: Sequence[Result], published: Published) -> None:
    """Replace the tables of `page`."""
    text = page.read_text(encoding="utf-8").partition(TABLES)[0]
    tables = "\n".join(markdown(results, published))
    page.write_text(f"{text}{tables}\n", encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """Print each row as it is predicted, then the marks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("patterns", nargs="*", default=["*"], help="of ids, such as 'C7-*'")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="replace its tables")
    options = parser.parse_args(argv)
    published = Published()
    page = options.markdown.read_text(encoding="utf-8") if options.markdown else ""
    results = {each.row.id: each for each in on_page(page, published.rows)}
    chosen = [
        row
        for pattern in options.patterns
        for row in published.rows
        if fnmatch.fnmatch(row.id, pattern)
    ]
    for row in chosen:
        begin = time.perf_counter()
        results[row.id] = _as_printed(published.predict(row))
        print(line(results[row.id]), f"{time.perf_counter() - begin:.0f} s", flush=True)
        if options.markdown is not None:
            _write(options.markdown, list(results.values()), published)
    if options.markdown is not None:
        _write(options.markdown, list(results.values()), published)
    shown = results.values() if page else [results[row.id] for row in chosen]
    for half in ("graded", "open"):
        print(f"\n{half}", *marks([r for r in shown if r.row.half == half]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
