"""Distributed prediction: the outputs for every sample, in the dataset's order, on rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .data import to_device
from .evaluation import batches_of, evaluating, prepared
from .plan import chunks
from .precision import Precision
from .replica import Replica

if TYPE_CHECKING:
    from .ddp_trainer import DDPTrainer


def predict(
    trainer: DDPTrainer, replica: Replica, precision: Precision, dataset: Dataset[Any], options: Mapping[str, Any]
) -> Any:
    """`predict_step`'s outputs in dataset order on rank 0, None on the others. Rank r takes the r-th of W stretches.

    Raises ValueError for outputs without a row for each sample and for datasets of different lengths, RuntimeError when the
    ranks' parameters differ.
    """
    world, size = trainer.world, trainer.config.eval_batch_size or trainer.config.batch_size
    length = len(dataset)  # type: ignore[arg-type]
    own = range(world.rank * length // world.size, (world.rank + 1) * length // world.size)
    outputs = []
    with evaluating(trainer, replica):
        for number, (samples, batch) in enumerate(batches_of(trainer, dataset, options, list(chunks(own, size)))):
            batch = prepared(trainer, batch, number)
            with precision.autocast():
                output = _listed(to_device(trainer.predict_step(trainer.model, batch), torch.device("cpu")), samples)
            _check_rows(output, samples)
            outputs.append(output)
    lengths, fingerprints = map(set, zip(*world.gather((length, replica.fingerprint())), strict=True))
    if len(lengths) > 1:
        raise ValueError(f"the ranks predict on datasets of {sorted(lengths)} samples: pass the same one on every rank")
    if len(fingerprints) > 1:
        replica.raise_drift(trainer.state.step)
    gathered = world.gather_on_main(outputs)
    return None if gathered is None else joined([output for part in gathered for output in part])


def _listed(output: Any, samples: int) -> Any:
    """`output` with a list in place of a tuple of texts, one for each sample, which is how `default_collate` leaves them."""
    if isinstance(output, Mapping):
        return {key: _listed(value, samples) for key, value in output.items()}
    if not isinstance(output, tuple):
        return output
    if len(output) == samples and all(isinstance(value, (str, bytes)) for value in output):
        return list(output)
    values = [_listed(value, samples) for value in output]
    return output._make(values) if hasattr(output, "_make") else type(output)(values)


def _check_rows(output: Any, samples: int) -> None:
    """ValueError for what has no row for each sample: what joining them gives would depend on how the data was split."""
    if isinstance(output, (Mapping, tuple)):
        for part in output.values() if isinstance(output, Mapping) else output:
            _check_rows(part, samples)
    elif output is not None and (found := _other_than_rows(output, samples)):
        raise ValueError(f"predict_step must return a row for each sample of the batch; found {found}")


def _other_than_rows(output: Any, samples: int) -> str:
    if isinstance(output, list):
        return "" if len(output) == samples else f"a list of {len(output)} for {samples} samples"
    if not isinstance(output, (Tensor, np.ndarray)):
        return f"{type(output).__name__} (tensors, arrays, lists, and tuples and mappings of them have rows)"
    kind = "tensor" if isinstance(output, Tensor) else "array"
    if output.ndim == 0:
        return f"a 0-dim {kind}"
    return "" if len(output) == samples else f"a {kind} of shape {tuple(output.shape)} for {samples} samples"


def _form(output: Any) -> str:
    if isinstance(output, Mapping):
        return f"the keys {sorted(map(str, output))}"
    if isinstance(output, tuple):
        return f"a tuple of {len(output)}"
    return "a tensor" if isinstance(output, Tensor) else f"a {type(output).__name__}"


def joined(outputs: list[Any]) -> Any:
    """Batches of outputs as one, in order.

    Tensors and arrays along their first dimension (a list of samples where their other dimensions differ), lists one after
    another, tuples and mappings field by field.
    """
    first = outputs[0]
    given = [output for output in outputs if output is not None]
    if not given:
        return None
    if len(given) < len(outputs):
        raise ValueError("predict_step gave None for some batches and rows for others: which ones, depends on the split")
    if len(forms := {_form(output) for output in outputs}) > 1:
        raise ValueError(f"predict_step must return the same for every batch; found {' and '.join(sorted(forms))}")
    if isinstance(first, (Tensor, np.ndarray)):
        if len({output.shape[1:] for output in outputs}) > 1:
            return [sample for output in outputs for sample in output]
        return torch.cat(outputs) if isinstance(first, Tensor) else np.concatenate(outputs)
    if isinstance(first, Mapping):
        return {key: joined([output[key] for output in outputs]) for key in first}
    if isinstance(first, tuple):
        values = [joined(list(column)) for column in zip(*outputs, strict=True)]
        return first._make(values) if hasattr(first, "_make") else type(first)(values)
    return [sample for output in outputs for sample in output]
