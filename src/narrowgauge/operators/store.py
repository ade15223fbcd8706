"""What a search keeps on disk: its journal, the snapshot of the last epoch's end, the plan.

Under DistributedDataParallel rank 0 reads and writes, and tells the others; so ranks need no disk in
common. The trade-off: a snapshot is a copy of model and optimizer, written after each epoch while
the search lasts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrowgauge.operators.agreement import Ranks
from narrowgauge.operators.journal import Journal
from narrowgauge.operators.plan import OperatorPlan


class Store:
    """The folder of a search.

    Args:
        folder: made if missing.
        ranks: who train together.
        settings: of the search; those of a folder that is not new must be the same.

    Raises:
        ValueError: the folder holds a search with other settings.
    """

    def __init__(self, folder: str | Path, ranks: Ranks, settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self._ranks = ranks
        if ranks.first:
            self.folder.mkdir(parents=True, exist_ok=True)
        self.journal = Journal(self.folder / "journal.jsonl", writable=ranks.first)
        self.journal.replace(ranks.of_first(list(self.journal)))
        known = self.journal.last("settings")
        if known is None:
            self.journal.append("settings", **settings)
            return
        for key, value in settings.items():
            if known[key] != value:
                raise ValueError(
                    f"{self.folder} holds a search with {key}={known[key]!r}, not {value!r}; "
                    "name another workdir, or remove it"
                )

    def save_snapshot(self, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        """Replace the snapshot, so that there is a whole one at any time."""
        if not self._ranks.first:
            return
        path = self.folder / "snapshot.pt"
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "epoch": epoch,
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def load_snapshot(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Put model, optimizer and random numbers back to the last snapshot, if there is one.

        Returns:
            Epochs that were over then.
        """
        path = self.folder / "snapshot.pt"
        state = None
        if self._ranks.first and path.exists():
            state = torch.load(path, map_location="cpu", weights_only=True)
        state = self._ranks.of_first(state)
        if state is None:
            return 0
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        epoch: int = state["epoch"]
        return epoch

    def save_plan(self, plan: OperatorPlan) -> None:
        """Write ``plan.json``."""
        if self._ranks.first:
            plan.save(self.folder / "plan.json")

    def load_plan(self) -> OperatorPlan:
        """The plan that was decided."""
        plan = OperatorPlan.load(self.folder / "plan.json") if self._ranks.first else None
        loaded: OperatorPlan = self._ranks.of_first(plan)
        return loaded
