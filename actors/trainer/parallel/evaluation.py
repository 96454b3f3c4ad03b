"""The loss on held-out sequences. Each evaluation uses the same sequences, for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from raytide.actors.models.architecture import Architecture
from raytide.actors.trainer.data.dataloader import DataLoader
from raytide.actors.trainer.data.mixture_dataset import open_evaluation
from raytide.actors.trainer.data.order.shuffle import Ids, feistel_permutation
from raytide.actors.trainer.data.token_dataset import TokenDataset
from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.actors.trainer.parallel.forward_backward import ForwardBackward
from raytide.core.errors import DataError
from raytide.core.specs.mixture import HeldOutSpec
from raytide.core.specs.train import TrainSpec


class FixedSampler:
    """Selects the sequences of an evaluation: up to `batches` batches, each sequence at most once. The last batch may
    be smaller than the others.
    """

    def __init__(self, n_sequences: int, global_batch: int, batches: int) -> None:
        count = min(n_sequences, global_batch * batches)
        self._ids = feistel_permutation(np.arange(count, dtype=np.int64), n_sequences, "evaluation")
        self._global_batch, self.batches = global_batch, math.ceil(count / global_batch)

    def ids(self, step: int) -> Ids:
        return self._ids[step * self._global_batch : (step + 1) * self._global_batch]


class EarlyStop:
    """Ends a run when its held-out loss no longer falls. The state is saved in checkpoints, so that a resumed run ends
    at the same step.
    """

    def __init__(self, config: HeldOutSpec | None) -> None:
        self._patience = None if config is None else config.patience
        self._min_delta = 0.0 if config is None else config.min_delta
        self.best = math.inf
        self.since = 0
        """Evaluations since the loss last fell by more than min_delta."""

    @property
    def why(self) -> str:
        """The reason for ending the run. Empty while the run continues."""
        if self._patience is None or self.since < self._patience:
            return ""
        return f"the held-out loss has not fallen below {self.best:.6g} in {self.since} evaluations"

    def record(self, loss: float) -> None:
        if loss < self.best - self._min_delta:
            self.best, self.since = loss, 0
        else:
            self.since += 1

    def state_dict(self) -> dict[str, Tensor]:
        return {"judged": torch.tensor([self.best, self.since], dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.best, self.since = state["judged"][0].item(), int(state["judged"][1])


class Evaluator:
    """Computes a run's loss on held-out sequences. Every evaluation uses the same sequences.

    All ranks of the process group must create the evaluator together, and call `loss` together.
    """

    def __init__(
        self, spec: TrainSpec, config: HeldOutSpec, group: ProcessGroup, training: TokenDataset, arch: Architecture
    ) -> None:
        self._spec, self._config, self._group = spec, config, group
        data = group.run_on_all(lambda: open_evaluation(spec, training))
        sampler = FixedSampler(data.n_sequences, spec.global_batch, config.batches)
        self._batches = sampler.batches
        plain = spec.model_copy(update={"augment": None, "steps": sampler.batches})
        self._loader = DataLoader(data, sampler, group, plain, arch.vocab_size)

    def is_due(self, step: int) -> bool:
        """Returns whether an evaluation follows step number `step`, counted from 1."""
        return step % self._config.every == 0 or step == self._spec.steps

    def loss(self, compute: ForwardBackward, micro_batch: int) -> float:
        """Returns the mean loss over the held-out tokens. Raises DataError if there are no such tokens."""
        total = counted = 0.0
        for batch in range(self._batches):
            part = self._loader.next_batch(batch, micro_batch)
            total += compute.evaluate(part.micros)
            counted += part.counted if self._group.is_data_first else 0
        total, counted = self._group.sum([total, counted])
        if not counted:
            raise DataError(
                f"the held-out data of {self._spec.name} has no token to predict.", hint="Use a larger eval.dataset."
            )
        return total / counted
