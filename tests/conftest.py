"""What all tests share: the environment, the seed, poisoned memory, and a pool of ranks."""

import os
from importlib.metadata import version

# Before torch's first operation. Half-precision products on the CPU crash with an illegal instruction on some
# machines unless oneDNN is held below the newest instruction set it thinks it sees.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ["HF_HUB_OFFLINE"] = "1"
# Before triton is first imported, which torch may do. Kernels run on the CPU, in Triton's interpreter; the tests that
# need a GPU need the opposite, which `make test-gpu` sets.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Before torch is imported. With newer versions, `fullgraph=True` says it.
if version("torch").startswith("2.8."):
    os.environ.setdefault("TORCHDYNAMO_CAPTURE_DYNAMIC_OUTPUT_SHAPE_OPS", "1")

# Several workers (pytest -n) are to share the cores, not to wait for each other's threads.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import functools
import gc
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megabatch.backends import workspace
from megabatch.bench import processes
from megabatch.distributed.world import World

from .ranks import LoggedLines, Pool

# A shell that runs tests in the background has them ignore Ctrl-C, which some of them send.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

UNINITIALISED = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
]


# The files that take longest begin, so that two workers end together. Those that wait for processes of their own much
# of the time alternate with those that compute.
LONGEST = ["examples", "triton", "demo", "ranks", "sentence_transformers", "memory", "chunked_ranks", "check"]
LONGEST += ["train_resume", "train_loop", "bench_chunked", "open_clip", "train_towers", "bad_input", "kernels"]
LONGEST += ["docs", "train_run", "study", "bench_ranks"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported by now is never garbage, and takes a fifth of a second to look through


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # Triton complains of what is still there when the process ends


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("gpu") and os.environ["TRITON_INTERPRET"] == "1":
        pytest.skip("needs compiled kernels: TRITON_INTERPRET=0, as in make test-gpu")


@pytest.fixture(autouse=True)
def fresh_start() -> None:
    torch.manual_seed(0)
    workspace.empty_cache()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four real ranks; `pool.run(n, function, *args)` runs a function of a test file on the first n."""
    ranks = Pool()
    yield ranks
    ranks.close()


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks without processes of their own, so that what a test patches reaches the work."""

    def launch(device: str, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        assert ranks == 1
        try:
            return [function(World(torch.device(device)), *args)]
        except Exception as error:
            raise processes.failure_of(f"{type(error).__name__}: {error}") from error

    monkeypatch.setattr(processes, "launch", launch)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written to holds NaN: whoever reads it will show."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = make(*args, **kwargs)
            if made.is_floating_point():
                with torch.no_grad():
                    made.fill_(float("nan"))
            return made

        return wrapper

    monkeypatch.setattr(workspace, "LARGEST_CACHED", 0)  # used memory is not asked for a second time
    monkeypatch.setattr(workspace, "SMALLEST_HUGE", 2**62)
    for owner, name in UNINITIALISED:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For two runs to be equal to the bit: a second thread may add up in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def logged() -> Iterator[LoggedLines]:
    with LoggedLines("megabatch") as lines:
        yield lines
