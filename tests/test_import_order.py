"""Tests of the architecture: import order, one interface to torch.distributed, small files.

Lower packages never import higher ones:

5   launcher
4   engine                       nothing imports engine/deepspeed but the root, lazily
3   zero  |  pipe  |  tensor  |  experts  |  recovery  |  outer      never import each other
2   offload  |  compression       never import each other
1   ops
0   utils
"""

import ast
import gc
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = (
    ("utils",),
    ("ops",),
    ("offload", "compression"),
    ("zero", "pipe", "tensor", "experts", "recovery", "outer"),
    ("engine",),
    ("launcher",),
)
FOLDERS = tuple(folder for layer in LAYERS for folder in layer)

# The folders that may call torch.distributed's collectives: ops/comm, which counts their bytes and also
# measures the backend's own, and the schedules of pipe, which call send and receive. In engine/deepspeed/
# those are functions of DeepSpeed that scripts call themselves; the engine uses none of them.
COLLECTIVE_FOLDERS = (
    *("ops/comm/", "pipe/", "engine/deepspeed/library/comm.py"),
    "engine/deepspeed/library/small.py",
)
COLLECTIVES = set(
    "all_reduce all_gather all_gather_coalesced all_gather_into_tensor all_gather_object "
    "all_gather_single all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv "
    "broadcast broadcast_object_list gather gather_object irecv isend monitored_barrier recv "
    "recv_object_list reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor scatter "
    "scatter_object_list send send_object_list".split()
)


def package_files():
    """Every Python file of the package, relative to the root."""
    inside = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path.relative_to(ROOT) for path in [ROOT / "__init__.py", *inside]]


@pytest.fixture(scope="module", autouse=True)
def no_collections():
    """They would look at every node of the trees, again and again."""
    gc.disable()
    yield
    gc.enable()


@cache
def parsed(source):
    """The tree of `source`; one for all tests."""
    return ast.parse(source)


@cache
def nodes_of(source):
    return list(ast.walk(parsed(source)))


def imported_modules(source, file):
    """Absolute names of the modules that `source` imports, in functions and for types as well."""
    package = ("xds", *file.parent.parts)
    found = set()
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*base, *([node.module] if node.module else [])])
            found |= {start} | {f"{start}.{alias.name}" for alias in node.names}
    return found


def modules_in_text(source):
    """Modules of the package that strings of `source` name, as a lazy table does."""
    texts = {node.value for node in nodes_of(source) if isinstance(node, ast.Constant)}
    names = {text for text in texts if re.fullmatch(r"xds(\.\w+)+", str(text))}
    paths = {name: ROOT.joinpath(*name.split(".")[1:]) for name in names}
    return {n for n, path in paths.items() if path.is_dir() or path.with_suffix(".py").exists()}


def folders_of(modules):
    """The folders of the package among `modules`."""
    parts = [module.split(".") for module in modules]
    return {part[1] for part in parts if part[0] == "xds" and len(part) > 1} & set(FOLDERS)


def folders_below(folder):
    level = next(index for index, layer in enumerate(LAYERS) if folder in layer)
    return {below for layer in LAYERS[:level] for below in layer}


def distributed_names(nodes):
    """The names of torch.distributed and of its functions in a file."""
    modules, functions = {"torch.distributed"}, {}
    for node in nodes:
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            full = prefix + alias.name
            if full == "torch.distributed":
                modules.add(alias.asname or alias.name)
            elif full.startswith("torch.distributed.") and prefix:
                functions[alias.asname or alias.name] = alias.name
    return modules, functions


def calls_to_collectives(source):
    """The collectives of torch.distributed that `source` uses, also under other names."""
    nodes = nodes_of(source)
    modules, functions = distributed_names(nodes)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            if node.attr in COLLECTIVES and ast.unparse(node.value) in modules:
                found.add(node.attr)
        elif isinstance(node, ast.Name) and node.id in functions:
            found.add(functions[node.id])
    return sorted(found & COLLECTIVES)


def test_lower_packages_never_import_higher_ones():
    wrong = []
    for file in package_files()[1:]:
        folder = file.parts[0]
        source = (ROOT / file).read_text()
        modules = imported_modules(source, file) | modules_in_text(source)
        for other in sorted(folders_of(modules) - folders_below(folder) - {folder}):
            wrong.append(f"{file} imports xds.{other}")
    assert not wrong, "import order: lower packages must not import higher ones:\n" + "\n".join(
        wrong
    )


def test_folders_of_zero_import_only_those_below():
    floors = ("layout", "core", "features", "model", "access", "construction checkpoint")
    rank = {folder: at for at, floor in enumerate(floors) for folder in floor.split()}
    for file in package_files():
        if file.parts[0] == "zero" and len(file.parts) == 3:
            for module in imported_modules((ROOT / file).read_text(), file):
                other = re.match(r"xds\.zero\.(\w+)\.", module)
                if other and other[1] in rank:
                    assert rank[other[1]] <= rank[file.parts[1]], f"{file} imports {module}"


ENGINE_FLOORS = (  # rooms of engine/: folders, and files beside them; the lowest first
    "config",
    "data integrations process profiling torch_clipping",
    "optim telemetry means",
    "counters",
    "parts",
    "checkpoint",
    "generation",
    "states",
    "steps",
    "model",
    "parallel",
    "last_save lost_peers",
    "dropping packing preemption recovering meeting torch_calls",
    "living_groups",
    "internals planning",
    "engine",
    "initialize",
    "inference elastic",
    "deepspeed",
)


def engine_room(module):
    """The room of a module of engine/.

    The sections of every room, X/config.py, and the arithmetic that checks their values belong to `config`.
    """
    parts = module.split(".")[2:]
    is_section = parts[1:] == ["config"] and parts[0] != "deepspeed"
    arithmetic = (["data", "schedules"], ["elastic", "rules"], ["planning", "goodput"])
    is_arithmetic = parts in arithmetic
    return "config" if is_section or is_arithmetic else parts[0]


def test_rooms_of_the_engine_import_only_those_below():
    rank = {room: at for at, floor in enumerate(ENGINE_FLOORS) for room in floor.split()}
    modules = {module_name(file) for file in package_files()}
    for file in package_files():
        if file.parts[0] == "engine" and len(file.parts) > 1 and file.name != "__init__.py":
            room = engine_room(module_name(file))
            for module in imported_modules((ROOT / file).read_text(), file) & modules:
                if module.startswith("xds.engine.") and module.count(".") > 1:
                    other = engine_room(module)
                    is_own = room == other or module.split(".")[2] == file.parts[1]
                    assert is_own or rank[other] < rank[room], f"{file} imports {module}"


SURROUNDINGS = re.compile(
    r"sys\.modules|os\.environ|getenv|cpu_count|getaffinity|free_(host_)?bytes\(|\btime\.(time|mono|perf)|\bgc\."
)
# Files of what sends that ask for something in which ranks differ, and why no message depends on the answer.
# A new one agrees on the answer in `initialize`, or sends the same whatever it is.
ASK = {
    "zero/core/hooks.py": "an excluded hook has the place and the effect of the plain one",
    "pipe/module.py": "a rank's number, before its group exists",
    "tensor/quiet_runs.py": "compiled functions send what eager ones do",
    "ops/comm/memory/operations.py": "how long a wait spins, and when it has lasted too long",
    "ops/comm/memory/segment.py": "`connect` asks whether all ranks have shared memory",
    "offload/undo_pool.py": "which updates run early; a gather waits for its values",
    "offload/cores.py": "threads of updates",
    "offload/disk/workers.py": "times of waits, and how long an end may take",
    "offload/disk/creation.py": "space of a disk, which `Builder` agrees on",
    "offload/device_memory.py": "its callers take the least of all ranks",
    "engine/generation/rollout.py": "the least of all ranks",
    "engine/steps/save_interval.py": "rank 0 decides, and its message of a step tells all ranks",
    "engine/model/arguments.py": "whether classes exist of which the model has objects",
}
SENDS = ("zero", "pipe", "tensor", "offload", "compression", "ops/comm/")
SENDS_OF_ENGINE = ("steps", "parallel", "generation", "packing", "model", "initialize.py")


def test_no_message_depends_on_what_differs_between_ranks():
    """Their products run on unlike ranks in tests/fuzz/test_products.py."""
    folders = (*SENDS, *(f"engine/{name}" for name in SENDS_OF_ENGINE))
    files = [file for file in package_files() if file.as_posix().startswith(folders)]
    asking = {f.as_posix() for f in files if SURROUNDINGS.search((ROOT / f).read_text())}
    assert asking == set(ASK)


# Names that DeepSpeed's config and torch have given; and where that kind of device is the subject.
FIXED = re.compile("enable_cuda_graph|cuda_aware|use_cuda_events|cuda_visible_devices|cudagraphs")
OF_THAT_DEVICE = ("ops/device.py", "ops/build/", "engine/deepspeed/")
MOST_LINES = 10  # the format of a checkpoint, a name of a tensor's attribute, texts for people


def test_only_the_device_file_knows_one_kind_of_device():
    files = [file for file in package_files() if not file.as_posix().startswith(OF_THAT_DEVICE)]
    lines = [
        f"{file}:{number}: {line}"
        for file in files
        for number, line in enumerate((ROOT / file).read_text().splitlines(), 1)
        if "cuda" in FIXED.sub("", line).lower()
    ]
    assert len(lines) <= MOST_LINES, "ask ops/device.py instead:\n" + "\n".join(lines)


CHOICES = Path("engine/initialize.py")
ITSELF_A_FEATURE = Path("engine/steps/pipeline_loop.py")
FOR_ANY_TRAINING = {"xds.engine.data.loaders"}


def imported_in_functions(file):
    """The modules of the package that functions of `file` import."""
    functions = [
        node for node in nodes_of((ROOT / file).read_text()) if isinstance(node, ast.FunctionDef)
    ]
    lines = {
        ast.unparse(node)
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    return imported_modules("\n".join(sorted(lines)), file) & set(map(module_name, package_files()))


def keys_read(file):
    """The keys of the config that `file` reads."""
    return {
        node.attr
        for node in nodes_of((ROOT / file).read_text())
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("config")
    }


def test_a_training_step_names_no_feature():
    """Features are named in their folder, and in the file that chooses them."""
    features, keys = imported_in_functions(CHOICES) - FOR_ANY_TRAINING, keys_read(CHOICES)
    assert {"xds.engine.parallel.slices", "xds.engine.generation.evaluation"} <= features
    steps = [file for file in package_files() if file.parts[:2] == ("engine", "steps")]
    for file in set(steps) - {ITSELF_A_FEATURE}:
        imports = load_time(parsed((ROOT / file).read_text()).body)
        source = "\n".join(ast.unparse(node) for node in imports)
        named = imported_modules(source, file) | imported_in_functions(file)
        folders = {"compression", "offload", "pipe", "tensor"} & folders_of(named)
        assert not (named & features or folders or keys_read(file) & keys), file


def test_the_table_of_features_names_the_files_that_exist():
    table = ast.get_docstring(parsed((ROOT / CHOICES).read_text()))
    for path in re.findall(r"[\w/]+\.py", table):
        places = [ROOT / path, ROOT / "engine" / path, ROOT / "engine" / "parallel" / path]
        assert any(place.exists() for place in places), path


def test_nothing_imports_the_names_of_deepspeed():
    """They are made where a script asks for `xds.deepspeed`; the engine and the launcher never do."""
    for file in package_files()[1:]:
        if not file.as_posix().startswith("engine/deepspeed/"):
            found = imported_modules((ROOT / file).read_text(), file)
            assert not [one for one in found if one.startswith("xds.engine.deepspeed")], file


def test_no_import_cycles():
    """Between files: imports at load time, in functions and for type checkers."""
    names = {module_name(file): file for file in package_files()}
    graph = {}
    for name, file in names.items():
        found = imported_modules((ROOT / file).read_text(), file)
        # `from .a import b` gives both names; where b is a module, the file of a does not count
        parents = {other.rpartition(".")[0] for other in found & names.keys()}
        graph[name] = {other for other in found & names.keys() if other not in parents} - {name}
    done, path = set(), []

    def visit(name):
        if name in path:
            pytest.fail("import cycle: " + " -> ".join([*path[path.index(name) :], name]))
        if name in done:
            return
        path.append(name)
        for other in sorted(graph[name]):
            visit(other)
        done.add(path.pop())

    for name in graph:
        visit(name)


def load_time(body):
    """The imports that run when a file is loaded: not those of functions and type checkers."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.Try):
            yield from load_time(node.body)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from load_time([*node.body, *node.orelse])


def module_name(file):
    """The name under which a file of the package is imported."""
    return ".".join(("xds", *file.with_suffix("").parts)).removesuffix(".__init__")


def test_collectives_are_called_in_their_folders_only():
    wrong = []
    for file in package_files():
        if file.as_posix().startswith(COLLECTIVE_FOLDERS):
            continue
        for name in calls_to_collectives((ROOT / file).read_text()):
            wrong.append(f"{file} calls {name}; the bytes it sends are not counted")
    assert not wrong, "call collectives in ops/comm/ only:\n" + "\n".join(wrong)


def test_every_file_has_a_docstring():
    silent = [
        str(f) for f in package_files() if not ast.get_docstring(parsed((ROOT / f).read_text()))
    ]
    assert not silent, "no module docstring:\n" + "\n".join(silent)


def test_folder_inits_hold_a_docstring_or_a_lazy_table():
    """So that importing one config.py imports nothing else."""
    wrong = []
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("__init__.py"):
            imports = [ast.unparse(node) for node in load_time(parsed(file.read_text()).body)]
            if [text for text in imports if text not in LAZY]:
                wrong.append(str(file.relative_to(ROOT)))
    assert not wrong


LAZY = (
    "from __future__ import annotations",
    "from typing import TYPE_CHECKING, Any",
    "from ..utils import exports as _exports",
    "from ...utils import exports as _exports",
)


FORMS = [
    ("from ..ops import flat", {"ops"}),
    ("from ..engine.config import Config", {"engine"}),
    ("from .layout import slots", {"zero"}),
    ("from .. import pipe", {"pipe"}),
    ("def f():\n    import xds.tensor.plan", {"tensor"}),
    ("import torch, json", set()),
]
CALLS = [
    ("import torch.distributed as dist\ndist.all_reduce(x)", ["all_reduce"]),
    ("import torch\ntorch.distributed.barrier()", ["barrier"]),
    ("from torch import distributed as d\nd.send(x, 1)", ["send"]),
    ("from torch.distributed import broadcast as b\nb(x, 0)", ["broadcast"]),
    ("from ..ops.collectives import all_reduce\nall_reduce(x)", []),
    ("import torch.distributed as dist\ndist.get_rank()\nqueue.send(1)", []),
]


def test_imports_and_collectives_are_found_in_every_form():
    for source, folders in FORMS:
        assert folders_of(imported_modules(source, Path("zero/file.py"))) == folders, source
    for source, calls in CALLS:
        assert calls_to_collectives(source) == calls, source
    table = "TABLE = {'Init': 'xds.engine.engine', 'no': 'xds.engine.nothing'}"
    assert modules_in_text(table) == {"xds.engine.engine"}
