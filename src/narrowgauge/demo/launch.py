"""The demo's parent process: starts the ranks, watches them, keeps finished runs, reports.

The ranks are started through the interface behind ``torchrun``, which also ends them when this
process gets a signal. Finished runs are lines of ``results.jsonl``; a demo that was interrupted
goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from narrowgauge.demo.data import DataError, load_images
from narrowgauge.demo.results import end_last_line, finished, json_lines
from narrowgauge.demo.settings import Settings, Variant, variants
from narrowgauge.demo.summary import comparison, write_report
from narrowgauge.demo.training import train_ranks

_RESULTS = "results.jsonl"
_LOGS = "logs"
_POLL_SECONDS = 0.2


class RanksFailedError(Exception):
    """A rank raised or died; the message holds its error and where its output lies."""


class StoppedBySignalError(Exception):
    """The demo was stopped by a signal, after its ranks had been ended.

    Attributes:
        signal: its number.
    """

    def __init__(self, signal: int, message: str) -> None:
        super().__init__(message)
        self.signal = signal


def run(
    settings: Settings,
    *,
    seeds: int = 3,
    output: str | Path = "narrowgauge-demo",
    fresh: bool = False,
    console: Console | None = None,
) -> Path:
    """Train every variant from every seed, print the table, write report, figures and results.

    Args:
        settings: of all runs.
        seeds: runs per variant, at least 1; the seeds are 0, 1, ….
        output: folder for ``report.html``, ``table.md``, ``loss.png``, ``accuracy.png``,
            ``results.jsonl`` and the ranks' ``logs``; created if absent. Runs found in its
            ``results.jsonl`` with the same settings are not repeated.
        fresh: whether to forget those runs first.
        console: where to print; by default standard output.

    Returns:
        Path of the report.

    Raises:
        ValueError: ``seeds`` is below 1.
        ModuleNotFoundError: matplotlib is not there; found before anything is trained.
        DataError: the data is not there.
        RanksFailedError: a rank failed.
        StoppedBySignalError: stopped by SIGINT, SIGTERM, SIGHUP or SIGQUIT; no rank is left.
    """
    if seeds < 1:
        raise ValueError(f"seeds is {seeds}; at least 1 is needed")
    console = console or Console()
    importlib.import_module("matplotlib")
    images = load_images(settings.data)  # fails here, readably, rather than in every rank
    if len(images.train_labels) < settings.batch:
        raise DataError(
            f"{images.name} has {len(images.train_labels)} training images, fewer than one batch "
            f"of {settings.batch}"
        )
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    results = output / _RESULTS
    if fresh:
        results.unlink(missing_ok=True)
    end_last_line(results)
    all_variants = variants(settings.scale)
    wanted = [(variant, seed) for seed in range(seeds) for variant in all_variants]
    runs, left_out = finished(results, settings)
    if left_out:
        console.print(
            f"{left_out} line{'s' * (left_out > 1)} of {results} ignored: no complete result.",
            markup=False,
            soft_wrap=True,
        )
    missing = [(variant, seed) for variant, seed in wanted if (variant.key, seed) not in runs]
    if runs and missing:
        console.print(
            f"{len(wanted) - len(missing)} of {len(wanted)} runs are in {results} already; "
            "--fresh starts over.",
            markup=False,
        )
    elif not missing:
        console.print(f"All runs are in {results} already; --fresh starts over.", markup=False)
    if missing:
        _launch(settings, wanted, missing, output, console)
        runs, _ = finished(results, settings)
    lost = [f"{v.key}, seed {seed}" for v, seed in wanted if (v.key, seed) not in runs]
    if lost:
        raise RanksFailedError(f"{results} lacks runs that were made: {'; '.join(lost)}")
    chosen = [runs[variant.key, seed] for variant, seed in wanted]
    report = write_report(output, settings, images.name, all_variants, chosen)
    console.print(comparison(settings, images.name, all_variants, chosen).rich())
    console.print(f"Report: {report.resolve()}", markup=False, soft_wrap=True)
    return report


def _launch(
    settings: Settings,
    wanted: list[tuple[Variant, int]],
    missing: list[tuple[Variant, int]],
    output: Path,
    console: Console,
) -> None:
    logs = output / _LOGS
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir()
    progress = logs / "progress.jsonl"
    progress.touch()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings.ranks,
        run_id="narrowgauge-demo",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )
    # What the launcher would say (a rank was sent a signal, …) is said here, shorter. Each of its
    # loggers has a level of its own.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if not console.is_terminal:
        console.print(
            f"{len(missing)} runs of {settings.steps} steps on {settings.ranks} ranks:",
            markup=False,
        )
    with _signal_handlers_kept(), _watch(settings, wanted, missing, progress, console):
        try:
            elastic_launch(config, train_ranks)(settings, missing, output / _RESULTS, progress)
        except SignalException as stopped:
            raise StoppedBySignalError(
                int(stopped.sigval),
                f"Stopped by {signal.Signals(stopped.sigval).name}; all ranks have ended. Finished "
                f"runs are kept in {output / _RESULTS}: the same command goes on from there.",
            ) from None
        except ChildFailedError as error:
            raise RanksFailedError(_explain(error, logs)) from None


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Puts the signal handlers back that the launcher replaces."""
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
    before = {name: signal.getsignal(getattr(signal, name)) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(getattr(signal, name), handler)


@contextlib.contextmanager
def _watch(
    settings: Settings,
    wanted: list[tuple[Variant, int]],
    missing: list[tuple[Variant, int]],
    progress: Path,
    console: Console,
) -> Iterator[None]:
    """Shows two bars, all runs and the present one, from what rank 0 writes to ``progress``."""
    labels = {variant.key: variant.label for variant, _ in wanted}
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    done_before = len(wanted) - len(missing)
    with bars:
        total = bars.add_task("all runs", total=len(wanted), completed=done_before)
        current = bars.add_task(f"starting {settings.ranks} ranks", total=settings.steps)
        stop = threading.Event()

        def follow() -> None:
            seen = 0
            done = done_before
            while True:
                last_look = stop.is_set()
                events = json_lines(progress)
                if events and events[-1] is None:  # a line that is still being written
                    events.pop()
                for event in events[seen:]:
                    label = f"{labels[event['variant']]}, seed {event['seed']}"
                    bars.update(current, description=label, completed=event["step"])
                    if event["step"] == settings.steps:
                        done += 1
                        bars.update(total, completed=done)
                        if not console.is_terminal:
                            with contextlib.suppress(OSError):  # told by the next print
                                console.print(f"[{done}/{len(wanted)}] {label}", markup=False)
                seen = len(events)
                if last_look:
                    return
                stop.wait(_POLL_SECONDS)

        watcher = threading.Thread(target=follow, name="demo-progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join()


def _explain(error: ChildFailedError, logs: Path) -> str:
    """The first failing rank's own error, in a few lines."""
    rank, failure = error.get_first_failure()
    message = failure.message
    if isinstance(message, dict):
        message = message.get("message", "")
    return (
        f"Rank {rank} failed (exit code {failure.exitcode}): {message}\n"
        f"What the ranks printed is in {logs}."
    )
