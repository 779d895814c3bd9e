"""Fails early, with the remedy, when xds is not installed. Each test begins as the first one does."""

import gc
import logging
import os
import sys
from collections.abc import Iterator

import pytest

try:
    from hypothesis import HealthCheck, settings

    import xds  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise SystemExit(
        "xds is not installed here: run `pip install -c constraints.txt -e .[test]` first"
    ) from error

# no test is judged by its time: a machine may be busy
settings.register_profile(
    "any time", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any time")


def pytest_xdist_auto_num_workers() -> int | None:
    """One more than processors: a worker often waits for its ranks, a launcher, a timeout."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ or not hasattr(os, "sched_getaffinity"):
        return None  # as xdist decides
    return len(os.sched_getaffinity(0)) + 1


@pytest.fixture(autouse=True)
def _messages_as_at_the_start() -> Iterator[None]:
    """What `xds.initialize` and `xds --quiet` set for their messages does not reach the next test."""
    logger, variable = logging.getLogger("xds"), os.environ.get("XDS_LOG_LEVEL")
    yield
    if not logger.handlers:  # else the level is that of `deepspeed.utils.logger`
        logger.setLevel(logging.NOTSET)
    os.environ.pop("XDS_LOG_LEVEL", None)
    if variable is not None:
        os.environ["XDS_LOG_LEVEL"] = variable


@pytest.fixture(scope="module", autouse=True)
def _each_file_begins_anew() -> Iterator[None]:
    """The process group of a file ends with it, its hook for exceptions, and what it has compiled."""
    hook = sys.excepthook
    if "torch" in sys.modules:  # files run side by side, and torch's threads wait for one another
        sys.modules["torch"].set_num_threads(1)
    yield
    sys.excepthook = hook
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if "torch._dynamo" in sys.modules:  # else torch compiles a function of many files no more
        sys.modules["torch._dynamo"].reset()


@pytest.hookimpl(tryfirst=True)  # before "-m" is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases that `quick` does not name are much like those that it names: they are slow tests."""
    named: dict[str, set[str]] = {}
    for item in items:
        quick, call = item.get_closest_marker("quick"), getattr(item, "callspec", None)
        if quick is None or call is None:
            continue
        left = named.setdefault(item.nodeid.partition("[")[0], set(quick.args))
        left.discard(call.id)
        if call.id not in quick.args:
            item.add_marker(pytest.mark.slow)
    unknown = {test: names for test, names in named.items() if names}
    if unknown and not any("::" in arg for arg in config.args):
        raise pytest.UsageError(f"quick names cases that do not exist: {unknown}; correct the ids")


def pytest_collection_finish() -> None:
    """A collection of garbage looks at what the tests make, not at torch and all test modules."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """The ranks that tests have reused end before the folder of their fork server is removed."""
    warm_ranks = sys.modules.get("warm_ranks")
    if warm_ranks is not None:
        warm_ranks.stop_all()
