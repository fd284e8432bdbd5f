"""Offload as a callback of Hugging Face's Trainer, hence of everything built on it, such as TRL's trainers.

trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[OffloadCallback()])
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import neaptide

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

_MIB = 2**20
_logger = logging.getLogger("neaptide")


class OffloadCallback(TrainerCallback):
    """Offloads the model's saved tensors while it is trained, and adds to the Trainer's logs what that did.

    What is logged, each time the loss is, speaks of the steps since the last time:

    - `offload_mib`: went to the host, in a step on average
    - `offload_wait_ms`: the device waited for it to come back, in a step on average
    - `offload_late_reloads`: how often that was because it was asked for too late
    - `offload_host_mib`: page-locked host memory, at most
    - `offload_peak_mib`: all memory in use on the device, at most; where the device tells

    The numbers are in `trainer.state.log_history`, and reach the callbacks behind this one. What keeps the peak from
    falling goes to the logger `neaptide`, each finding once.
    """

    def __init__(self, modules: Iterable[str | int] = (), **options: Unpack[neaptide.OffloadOptions]) -> None:
        """Takes what `neaptide.offload()` takes."""
        self._modules = modules
        self._options = options
        self._offload: neaptide.Offload | None = None
        self._steps: list[neaptide.StepReport] = []
        self._said: set[str] = set()

    @property
    def offload(self) -> neaptide.Offload | None:
        """The offload of the model that is being trained, None outside of train()."""
        return self._offload

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        self._remove()  # of a training that an exception ended
        self._steps.clear()
        if model is None:
            raise neaptide.UserError("[neaptide.OffloadCallback] expected a Trainer with a model; found none")
        self._offload = neaptide.offload(model, self._modules, **self._options)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._offload is not None:
            self._steps.append(self._offload.take_step_report())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not self._steps or logs is None or "loss" not in logs:
            return
        numbers = _summary(self._steps)
        self._say(self._steps[-1].findings())
        self._steps.clear()
        logs.update(numbers)
        state.log_history[-1].update(numbers)  # a copy of the logs, made before the callbacks are called

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        if self._offload is not None:
            self._offload.remove()
            self._offload = None

    def _say(self, findings: list[str]) -> None:
        for finding in findings:
            if finding not in self._said:
                self._said.add(finding)
                _logger.warning(finding)


def _summary(steps: list[neaptide.StepReport]) -> dict[str, float]:
    numbers: dict[str, float] = {
        "offload_mib": sum(step.offloaded_bytes for step in steps) / len(steps) / _MIB,
        "offload_wait_ms": sum(step.exposed_wait_ns for step in steps) / len(steps) / 1e6,
        "offload_late_reloads": sum(step.late_reloads for step in steps),
        "offload_host_mib": max(step.host_locked_peak for step in steps) / _MIB,
    }
    peaks = [step.device_peak for step in steps if step.device_peak is not None]
    if peaks:
        numbers["offload_peak_mib"] = max(peaks) / _MIB
    return numbers
