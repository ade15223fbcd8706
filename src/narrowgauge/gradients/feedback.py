"""Error feedback: what rounding withholds from the other ranks, they get in a later step.

Each rank keeps a residual per parameter and adds it to the next gradient (Seide et al., "1-bit
stochastic gradient descent", Interspeech 2014). The trade-off: float32 memory of the size of the
gradients, and numbers that arrive late, for formats of 4 bits and less that train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch


class Residuals:
    """One residual per parameter, laid out as buckets ask for it.

    Args:
        sizes: elements of each parameter, by name.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._by_name = {name: torch.zeros(size, device="cpu") for name, size in sizes.items()}
        self._buckets: dict[tuple[str, ...], torch.Tensor] = {}

    def of(self, names: tuple[str, ...]) -> torch.Tensor:
        """The residuals of these parameters one after the other, flat float32, to be changed.

        DDP regroups its buckets after the first step, so residuals move to where they are needed.
        """
        flat = self._buckets.get(names)
        if flat is None:
            stale = [key for key in self._buckets if not set(key).isdisjoint(names)]
            for key in stale:
                for name, part in self._parts(key):
                    self._by_name[name] = part.clone()
                del self._buckets[key]
            flat = torch.cat([self._by_name[name] for name in names])
            self._buckets[names] = flat
            self._by_name.update(self._parts(names))
        return flat

    def hold(
        self, names: tuple[str, ...], gradients: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keep the residuals of parameters without a gradient from being sent; to be given back.

        Where no rank used a parameter, DDP discards what was reduced for it.

        Returns:
            The residuals, now zero, and what is to be added to each when the step is over.
        """
        self.of(names)
        held = []
        parts = self._parts(names)
        sizes = [residual.numel() for _, residual in parts]
        for (_, residual), gradient in zip(parts, gradients.split(sizes), strict=True):
            if residual.any() and not gradient.any():
                held.append((residual, residual.clone()))
                residual.zero_()
        return held

    def _parts(self, names: tuple[str, ...]) -> list[tuple[str, torch.Tensor]]:
        sizes = [self._by_name[name].numel() for name in names]
        return list(zip(names, self._buckets[names].split(sizes), strict=True))

    def average(self, world_size: int, sum_over_ranks: Callable[[torch.Tensor], None]) -> None:
        """Give all ranks the mean of their residuals; what the mean gradient will get stays equal.

        Args:
            world_size: number of ranks.
            sum_over_ranks: replaces a float32 tensor by its sum over the ranks.
        """
        for residual in self._by_name.values():
            residual.div_(world_size)
            sum_over_ranks(residual)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of each residual, by name of the parameter."""
        return {name: residual.clone() for name, residual in self._by_name.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on with these residuals.

        Raises:
            ValueError: other parameters, or other sizes.
        """
        expected = {name: residual.numel() for name, residual in self._by_name.items()}
        given = {name: residual.numel() for name, residual in dict(state).items()}
        if expected != given:
            different = sorted(
                name
                for name in expected.keys() | given.keys()
                if expected.get(name) != given.get(name)
            )
            raise ValueError(
                f"the residuals are of other parameters than the model's, first {different[0]!r}: "
                f"{given.get(different[0])} elements in the state, {expected.get(different[0])} in "
                "the model; load the state of the same model"
            )
        for name, residual in state.items():
            self._by_name[name].copy_(residual.view(-1))
