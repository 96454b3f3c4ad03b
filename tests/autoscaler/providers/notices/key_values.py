"""Stands where the GCS does: the key-value calls of Ray's GcsClient, in memory."""

from __future__ import annotations


class KeyValues:
    def __init__(self) -> None:
        self.values: dict[tuple[bytes, bytes], bytes] = {}
        self.is_away = False

    def internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, namespace: bytes, timeout: float) -> int:
        self._must_be_there()
        if overwrite or (namespace, key) not in self.values:
            self.values[(namespace, key)] = value
        return 1

    def internal_kv_del(self, key: bytes, del_by_prefix: bool, namespace: bytes, timeout: float) -> int:
        self._must_be_there()
        return 0 if self.values.pop((namespace, key), None) is None else 1

    def internal_kv_keys(self, prefix: bytes, namespace: bytes, timeout: float) -> list[bytes]:
        self._must_be_there()
        return [key for space, key in self.values if space == namespace and key.startswith(prefix)]

    def internal_kv_multi_get(self, keys: list[bytes], namespace: bytes, timeout: float) -> dict[bytes, bytes]:
        self._must_be_there()
        return {key: self.values[(namespace, key)] for key in keys if (namespace, key) in self.values}

    def _must_be_there(self) -> None:
        if self.is_away:
            raise ConnectionError("the GCS is away")
