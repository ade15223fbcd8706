"""Batches that rank 0 reads, on a slow link: ours against accelerate's and a plain scatter.

    python benchmarks/inputs.py                       2 ranks at 1 Gbit, both kinds of computation
    python benchmarks/inputs.py --ranks 2 4 --rates 1gbit 100mbit loopback

Run it as root with iproute2 for limited links (``make bench``); otherwise only the loopback is
measured. A step is: the next batch, normalising it, a computation of a fixed time that sleeps (as
when an accelerator computes) or keeps the processor busy, and a barrier (as the gradients'
all-reduce is one). All methods read the same images within one run; the slowest rank counts. Bytes
come from the interface's own counter, and the samples' numbers and a checksum of their pixels are
compared.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import links
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from rich import box
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from narrowgauge import Feed

SHAPE = (3, 224, 224)
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1) * 255
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1) * 255
WARM_UP = 3
FLOAT_STEPS = 8  # of methods that send float32: they take long


class Images(Dataset):
    """Random images, of which a few repeat: reading must not be what is measured."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pool = torch.randint(0, 256, (128, *SHAPE), dtype=torch.uint8, generator=generator)
        self.count = count

    def __len__(self) -> int:
        """Number of samples."""
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """One image and its number."""
        return self.pool[index % 128], index


def normalised(images: torch.Tensor) -> torch.Tensor:
    """Floats of mean 0, as a model takes them."""
    return images.float().sub_(MEAN).div_(DEVIATION)


def as_bytes(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch as it is stored."""
    return torch.stack([image for image, _ in samples]), torch.tensor([n for _, n in samples])


def as_floats(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch normalised by the loader, as most examples do it."""
    images, numbers = as_bytes(samples)
    return normalised(images), numbers


def accelerated(loader: DataLoader, dispatch: bool) -> Iterable[Any]:
    """The loader as accelerate prepares it."""
    configuration = DataLoaderConfiguration(
        dispatch_batches=dispatch, split_batches=True, even_batches=True
    )
    return Accelerator(cpu=True, dataloader_config=configuration).prepare(loader)


def scattered(loader: DataLoader) -> Iterator[Any]:
    """What one writes by hand: rank 0 reads, ``dist.scatter`` sends each rank its part."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch = loader.batch_size // world_size
    batches = iter(loader) if rank == 0 else iter(range(len(loader)))
    for whole in batches:
        part = (
            torch.empty((batch, *SHAPE), dtype=torch.uint8),
            torch.empty(batch, dtype=torch.int64),
        )
        for n, piece in enumerate(part):
            dist.scatter(piece, list(whole[n].chunk(world_size)) if rank == 0 else None, 0)
        yield part


def from_memory(loader: DataLoader) -> Iterable[Any]:
    """No inputs at all, but a barrier before each batch: what agreeing costs, and nothing else."""
    rank, part = dist.get_rank(), loader.batch_size // dist.get_world_size()
    parts = [
        as_bytes([loader.dataset[first + n] for n in range(rank * part, (rank + 1) * part)])
        for first in range(0, len(loader.dataset), loader.batch_size)
    ]

    def agreed() -> Iterator[Any]:
        while parts:
            dist.barrier()
            yield parts.pop(0)

    return agreed()


Method = Callable[[DataLoader, DataLoader], Iterable[Any]]
METHODS: dict[str, Method] = {
    "in memory, barrier": lambda narrow, wide: from_memory(narrow),
    "accelerate dispatch, float32": lambda narrow, wide: accelerated(wide, True),
    "accelerate dispatch, uint8": lambda narrow, wide: accelerated(narrow, True),
    "accelerate shard, uint8": lambda narrow, wide: accelerated(narrow, False),
    "plain scatter, uint8": lambda narrow, wide: scattered(narrow),
    "Feed rank0, uint8": lambda narrow, wide: Feed(narrow, source="rank0"),
    "Feed rank0, uint8, on_device": lambda narrow, wide: Feed(
        narrow, source="rank0", on_device=lambda batch: (normalised(batch[0]), batch[1])
    ),
    "Feed shard, uint8": lambda narrow, wide: Feed(narrow, source="shard"),
}


def run(method: Method, batch: int, steps: int, kind: str, seconds: float) -> dict[str, Any]:
    """All steps of one method on this rank."""
    images = Images(batch * steps)
    loaders = [
        DataLoader(images, batch_size=batch, collate_fn=collate)
        for collate in (as_bytes, as_floats)
    ]
    source = method(*loaders)
    stalls, times, numbers, checksum = [], [], 0, 0.0
    dist.barrier()
    before = links.sent_bytes()  # all steps count here: what is sent ahead belongs to later ones
    dist.barrier()
    batches, last = iter(source), time.perf_counter()
    for _ in range(steps):
        begin = time.perf_counter()
        part, own = next(batches)
        stalls.append(time.perf_counter() - begin)
        floats = normalised(part) if part.dtype == torch.uint8 else part
        numbers += int(own.sum())
        checksum += float(floats[:, :, ::37, ::41].double().sum())
        del part, own, floats  # what it takes to free them belongs to the step
        links.compute(kind, seconds)
        dist.barrier()
        times.append(time.perf_counter() - last)
        last = time.perf_counter()
    assert next(batches, None) is None
    dist.barrier()
    sent = (links.sent_bytes() - before) / steps
    report = source.stalls() if isinstance(source, Feed) else None
    if isinstance(source, Feed):
        source.close()
    return {
        "step": statistics.median(times[WARM_UP:]),
        "stall": statistics.median(stalls[WARM_UP:]),
        "worst_stall": max(stalls[WARM_UP:]),
        "sent": sent,
        "numbers": numbers,
        "checksum": checksum,
        "own_stall": report.wait_p50 if report else None,
        "high_water": report.high_water_bytes if report else None,
        "sentence": report.sentence if report else None,
    }


def measure(names: list[str], batch: int, steps: int, kind: str, seconds: float) -> None:
    """One rank: all methods one after another; hand in what the slowest rank saw."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)  # it starts torch.distributed, by the usual variables
    del accelerator
    torch.set_num_threads(1)
    results = {}
    for name in names:
        count = WARM_UP + FLOAT_STEPS if "float32" in name else steps
        own = run(METHODS[name], batch, count, kind, seconds)
        everybodys: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybodys, own)
        results[name] = {
            **{key: max(r[key] for r in everybodys) for key in ("step", "stall", "worst_stall")},
            "bytes_sent": everybodys[0]["sent"],
            "numbers": sum(r["numbers"] for r in everybodys),
            "checksum": sum(r["checksum"] for r in everybodys),
            "steps": count,
            "own_stall": own["own_stall"] and max(r["own_stall"] for r in everybodys),
            "high_water": own["high_water"],
            "sentences": [r["sentence"] for r in everybodys],
        }
    links.hand_in({"methods": results})


def check(methods: dict[str, Any], batch: int, ranks: int, limited: bool) -> None:
    """What must hold of every run: all samples once with all their bits, and sent once."""
    by_steps: dict[int, set[tuple[int, float]]] = {}
    for result in methods.values():
        found = result["numbers"], round(result["checksum"], 3)
        by_steps.setdefault(result["steps"], set()).add(found)
    for steps, found in by_steps.items():
        assert len(found) == 1, f"methods of {steps} steps delivered different samples: {found}"
        (numbers, _) = next(iter(found))
        assert numbers == sum(range(steps * batch)), "samples are missing or came twice"
    part = batch // ranks * (3 * 224 * 224 + 8)
    for name, result in methods.items():
        result["copies"] = result["bytes_sent"] / (part * (ranks - 1))
        if limited and name.startswith("Feed rank0"):
            assert abs(result["copies"] - 1) < 0.01, f"{name}: {result['copies']:.4f} copies sent"


def promises(methods: dict[str, Any]) -> dict[str, bool]:
    """What is asked of rank 0's feed at 1 Gbit, 2 ranks, 64 images and 150 ms, sleeping."""
    ours, dispatch = methods["Feed rank0, uint8"], methods["accelerate dispatch, uint8"]
    return {
        "waits at most 1 ms for its part": ours["own_stall"] <= 1e-3,
        "step at most 0.72 × accelerate dispatch, uint8": ours["step"] <= 0.72 * dispatch["step"],
    }


def table(title: str, methods: dict[str, Any]) -> Table:
    """All methods on one link."""
    found = Table(box=box.SIMPLE, title=title, title_justify="left")
    found.add_column("method", no_wrap=True)
    for heading in ("step ms", "× dispatch uint8", "stall ms", "worst", "for its part"):
        found.add_column(heading, justify="right")
    for heading in ("MB sent", "× one copy"):
        found.add_column(heading, justify="right")
    reference = methods["accelerate dispatch, uint8"]["step"]
    for name, result in methods.items():
        found.add_row(
            name,
            f"{result['step'] * 1e3:.1f}",
            f"{result['step'] / reference:.2f}",
            f"{result['stall'] * 1e3:.2f}",
            f"{result['worst_stall'] * 1e3:.2f}",
            "–" if result["own_stall"] is None else f"{result['own_stall'] * 1e3:.2f}",
            f"{result['bytes_sent'] / 1e6:.3f}",
            f"{result['copies']:.3f}",
        )
    return found


def main() -> None:
    """Measure what the machine allows; print tables and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", nargs="+", default=["2"])
    parser.add_argument("--rates", nargs="+", default=["1gbit"])
    parser.add_argument(
        "--compute", nargs="+", default=["sleeping", "busy"], choices=["sleeping", "busy"]
    )
    parser.add_argument("--milliseconds", type=float, default=150.0, help="of computation")
    parser.add_argument("--batch", type=int, default=64, help="images of all ranks together")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--output", type=Path, default=links.HERE / "results" / "inputs.json")
    options = parser.parse_args()
    if options.worker:
        seconds = options.milliseconds / 1e3
        measure(options.methods, options.batch, options.steps, options.compute[0], seconds)
        return
    console = links.wide_console()
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "threads_per_rank": 1,
        "processors": os.cpu_count(),
        "batch": options.batch,
        "milliseconds_of_computation": options.milliseconds,
        "links": {},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    held = True
    for rate in links.possible(options.rates, console):
        for ranks in options.ranks:
            for kind in options.compute:
                where = f"{rate}, {ranks} ranks, {kind}"
                arguments = ["--compute", kind, "--milliseconds", str(options.milliseconds)]
                arguments += ["--batch", str(options.batch), "--steps", str(options.steps)]
                with console.status(where):
                    result = links.run_ranks(
                        __file__, ranks, rate, *arguments, "--methods", *options.methods
                    )
                methods = result["methods"]
                check(methods, options.batch, int(ranks), rate != "loopback")
                asked = (rate, ranks, kind, options.batch, options.milliseconds)
                if asked == ("1gbit", "2", "sleeping", 64, 150.0):
                    result["promises"] = promises(methods)
                    held &= all(result["promises"].values())
                report["links"][where] = result
                options.output.write_text(json.dumps(report, indent=2) + "\n")
                title = f"{where}: {options.batch} images, {options.milliseconds:g} ms a step"
                console.print(table(title, methods))
                for name, found in methods.items():
                    if found["sentences"][0]:
                        console.print(f"{name}, by rank: {' | '.join(found['sentences'])}")
                links.say_kept(result.get("promises", {}), console)
    console.print(
        "Median of the slowest rank, 1 thread per rank. stall: time within next(); of it for its "
        "part: until a rank had its own part, the rest is the agreement of all ranks. MB sent: by "
        "rank 0 per step, by the interface's counter (on the loopback: by all)."
    )
    console.print(f"Written to {options.output}")
    sys.exit(not held)


if __name__ == "__main__":
    main()
