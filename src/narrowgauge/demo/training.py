"""What one rank of the demo does: train the network once per variant and seed, and measure.

All runs share one set of processes, so that starting them is paid once, and every variant sees the
same data in the same order from the same initial weights. The network is plain: without
normalisation layers its gradients keep the small magnitudes that narrow formats have trouble with,
and DDP has no buffers to broadcast.
"""

# No `from __future__ import annotations`: DDP inspects the hook's annotations as objects.

import json
import math
import os
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from narrowgauge import gradients
from narrowgauge.demo.data import Images, load_images
from narrowgauge.demo.settings import Settings, Variant
from narrowgauge.ledger import round_off_sums

_TIMEOUT = timedelta(seconds=60)
_WARM_UP_STEPS = 10  # not timed: DDP rebuilds its buckets, allocators and caches fill
_POINTS = 60  # of the loss curve
_TELL_SECONDS = 0.2  # between two lines of progress
_EVALUATIONS = 12  # points of the accuracy curve
_CURVE_IMAGES = 1000  # test images used for those points; the final accuracy uses all
_LOOPBACK_COUNTER = Path("/sys/class/net/lo/statistics/tx_bytes")


class Network(nn.Module):
    """Five convolutions and a linear layer; 75 thousand parameters for ten classes.

    Args:
        width: channels of the first convolution; twice as many follow.
    """

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        wide = 2 * width
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, wide, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(wide, wide, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(wide, wide, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(wide, wide, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(2),
        )
        self.fc = nn.Linear(4 * wide, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of shape (N, 10) for images of shape (N, 1, height, width), at least 4 × 4."""
        logits: torch.Tensor = self.fc(self.features(images).flatten(1))
        return logits


@dataclass
class Costs:
    """What sending gradients cost on this rank, one entry per step (errors: per measurement)."""

    bytes_sent: float | None = None
    codec_seconds: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)


@record
def train_ranks(
    settings: Settings, runs: list[tuple[Variant, int]], results: Path, progress: Path
) -> None:
    """Entry point of every rank: train all ``runs`` one after the other.

    Args:
        settings: shared by all runs.
        runs: variant and seed of each.
        results: JSON lines file to which rank 0 appends one line per finished run.
        progress: JSON lines file to which rank 0 appends what it is doing.
    """
    # Ctrl-C reaches the whole foreground group; a rank just ends, the parent tells the user. The
    # same signal comes from the kernel when the parent dies without a word (torch asks for it).
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(max(1, _cores() // settings.ranks))
    if _LOOPBACK_COUNTER.exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the host name resolves to
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    images = load_images(settings.data)
    for variant, seed in runs:
        result = train(settings, variant, seed, images, progress)
        if dist.get_rank() == 0:
            append_line(results, {"settings": settings.as_dict(), **result, **environment()})
    dist.destroy_process_group()


def train(
    settings: Settings, variant: Variant, seed: int, images: Images, progress: Path
) -> dict[str, Any]:
    """Train one variant from one seed; every rank of the default group calls it together.

    Returns:
        Plain data: final accuracy on the test images (0 to 1), curves, times and bytes per step,
        round-off error; the same curves and accuracy on every rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model = DistributedDataParallel(Network(), broadcast_buffers=False)
    costs = Costs()
    compression = hook = None
    if variant.narrowgauge:
        compression = gradients.compress(
            model,
            variant.format,
            scale=settings.scale if variant.scaled else None,
            measure_error_every=settings.error_every,
            timeout=_TIMEOUT,
            adapt=False,  # to see what formats do; on the loopback, float32 might be faster
        )
    elif variant.format == "bf16":
        hook = Bf16Hook(costs)
        model.register_comm_hook(None, hook.send)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.learning_rate, momentum=0.9)
    losses = torch.zeros(settings.steps)
    accuracy_curve: list[tuple[int, float]] = []
    seconds: list[float] = []
    evaluate_every = max(1, settings.steps // _EVALUATIONS)
    told = 0.0
    batches = _batches(len(images.train_labels), settings.batch, seed)
    on_the_wire = 0

    for step in range(settings.steps):
        mine = next(batches)[rank::world_size]
        inputs, labels = images.train_images[mine], images.train_labels[mine]
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step)
        measured = settings.error_every > 0 and step % settings.error_every == 0
        if hook is not None:
            hook.start_step(measured)
        counter = _loopback_bytes()
        begin = time.perf_counter()
        loss = cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end = time.perf_counter()
        losses[step] = loss.detach()
        if step >= _WARM_UP_STEPS and not measured:
            seconds.append(end - begin)
            on_the_wire += _loopback_bytes() - counter
        if (step + 1) % evaluate_every == 0:
            accuracy_curve.append((step + 1, _accuracy(model, images, _CURVE_IMAGES)))
        if rank == 0 and (end - told > _TELL_SECONDS or step + 1 == settings.steps):
            told = end
            append_line(progress, {"variant": variant.key, "seed": seed, "step": step + 1})

    if compression is not None:
        entries = compression.ledger.entries
        costs.bytes_sent = statistics.fmean(entry.bytes_sent for entry in entries)
        costs.codec_seconds = [entry.codec_seconds for entry in entries]
        costs.errors = [e.round_off_error for e in entries if e.round_off_error is not None]
    elements = sum(parameter.numel() for parameter in model.parameters())
    if costs.bytes_sent is None:
        costs.bytes_sent = ring_bytes(elements, variant.bits, world_size)
    dist.all_reduce(losses)
    step_seconds = statistics.median(seconds) if seconds else None
    return {
        "variant": variant.key,
        "seed": seed,
        "accuracy": _accuracy(model, images, len(images.test_labels)),
        "parameters": elements,
        "step_seconds": step_seconds,
        "bytes_sent_per_step": costs.bytes_sent,
        "bytes_are": "counted" if variant.narrowgauge else "computed for a ring all-reduce",
        "loopback_bytes_per_step_per_rank": (
            on_the_wire / len(seconds) / world_size if seconds and on_the_wire else None
        ),
        "codec_seconds_per_step": (
            statistics.median(costs.codec_seconds) if costs.codec_seconds else 0.0
        ),
        "round_off_error": statistics.fmean(costs.errors) if costs.errors else None,
        "loss_curve": _windows((losses / world_size).tolist()),
        "accuracy_curve": accuracy_curve,
    }


class Bf16Hook:
    """A DDP communication hook that sends bf16, for comparison.

    Torch has one (``bf16_compress_hook``), which refuses CPU tensors. As there, the sum is made in
    bf16 by the backend.

    Args:
        costs: where the time for casting and the round-off error are counted.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._measured = False

    def start_step(self, measured: bool) -> None:
        """Tell the hook that a step begins, and whether to measure the round-off error in it."""
        self._measured = measured
        self._costs.codec_seconds.append(0.0)

    def send(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch's stubs lack it
    ) -> torch.futures.Future[torch.Tensor]:
        """Send one bucket; DDP calls this during the backward pass."""
        buffer: torch.Tensor = bucket.buffer()
        exact = None
        if self._measured:
            exact = buffer / dist.get_world_size()
            dist.all_reduce(exact)
        begin = time.perf_counter()
        narrow = buffer.to(torch.bfloat16).div_(dist.get_world_size())
        self._costs.codec_seconds[-1] += time.perf_counter() - begin
        work = dist.all_reduce(narrow, async_op=True)

        def widen(_: torch.futures.Future[Any]) -> torch.Tensor:
            begin = time.perf_counter()
            buffer.copy_(narrow)
            self._costs.codec_seconds[-1] += time.perf_counter() - begin
            if exact is not None:
                total, count = round_off_sums(exact, buffer)
                self._costs.errors.append(total / max(1, count))
            return buffer

        future: torch.futures.Future[torch.Tensor] = work.get_future().then(widen)
        return future


def ring_bytes(elements: int, bits: int, world_size: int) -> float:
    """Bytes that each rank sends in a bandwidth-optimal all-reduce of ``elements`` numbers."""
    return 2 * (world_size - 1) / world_size * elements * bits / 8


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """Append one JSON line in a single write; numbers that JSON lacks become ``null``."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_finite(entry), allow_nan=False) + "\n")


def environment() -> dict[str, Any]:
    """Where a run was measured: versions, processor cores, kernels."""
    import platform

    from narrowgauge import kernels

    return {
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "system": platform.system(),
            "cores": _cores(),
            "threads_per_rank": torch.get_num_threads(),
            "kernels": kernels.backend(),
        }
    }


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _batches(samples: int, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless batches of indices: one random permutation after another, remainders dropped."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(samples, generator=generator)
        yield from order[: samples // batch * batch].split(batch)


def _accuracy(model: nn.Module, images: Images, count: int) -> float:
    """Share of the first ``count`` test images that are recognised, counted by all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs = images.test_images[:count][rank::world_size]
    labels = images.test_labels[:count][rank::world_size]
    network = model.module  # without DDP: ranks may hold different numbers of images
    assert isinstance(network, nn.Module)
    correct = torch.zeros((), dtype=torch.int64)
    with torch.no_grad():
        for some, true in zip(inputs.split(500), labels.split(500), strict=True):
            correct += (network(some).argmax(1) == true).sum()
    dist.all_reduce(correct)
    return int(correct) / min(count, len(images.test_labels))


def _windows(losses: list[float]) -> list[tuple[float, float]]:
    """The loss curve, thinned: (last step of a window, mean loss in it)."""
    size = math.ceil(len(losses) / _POINTS)
    windows = [losses[start : start + size] for start in range(0, len(losses), size)]
    return [
        (min((position + 1) * size, len(losses)), statistics.fmean(window))
        for position, window in enumerate(windows)
    ]


def _loopback_bytes() -> int:
    """Bytes that crossed the loopback interface since boot, of all programs; 0 if unknown."""
    try:
        return int(_LOOPBACK_COUNTER.read_text())
    except OSError:
        return 0


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
