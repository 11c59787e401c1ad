"""TransferQueue's calls that verl's trainer makes, in this process: rows by key, ragged tensors as nested ones."""

# pyright: reportMissingImports=false, reportOptionalSubscript=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import torch
import transfer_queue as tq  # type: ignore[import-not-found]
from tensordict import NonTensorStack, TensorDict
from verl.utils import tensordict_utils as tu  # type: ignore[import-not-found]


class Queue:
    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: Any = None, tags: Any = None) -> tq.KVBatchMeta:
        for name in fields.keys() if fields is not None else ():
            values = fields[name]
            values = values.unbind() if isinstance(values, torch.Tensor) else list(values)
            for key, value in zip(keys, values, strict=True):
                self.rows.setdefault(key, {})[name] = value
        return tq.KVBatchMeta(partition_id=partition_id, keys=list(keys), tags=list(tags or [{} for _ in keys]))

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str] | None = None) -> TensorDict:
        rows = [self.rows[key] for key in keys]
        names = [name for name in select_fields or rows[0] if all(name in row for row in rows)]
        return TensorDict({name: _column([row[name] for row in rows]) for name in names}, batch_size=[len(rows)])

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.rows.pop(key, None)

    def kv_list(self, partition_id: str) -> dict[str, Any]:
        return {}

    def data_of(self, batch: tq.KVBatchMeta) -> TensorDict:
        """What a worker is given for `batch`."""
        data = self.kv_batch_get(batch.keys, batch.partition_id)
        for name, value in batch.extra_info.items():
            tu.assign_non_tensor_data(tensor_dict=data, key=name, val=value)
        return data

    def install(self) -> None:
        for name in ("kv_batch_put", "kv_batch_get", "kv_clear", "kv_list"):
            setattr(tq, name, getattr(self, name))


def _column(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor) and values[0].dim():
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)
    return torch.stack(values) if isinstance(values[0], torch.Tensor) else NonTensorStack(*values)
