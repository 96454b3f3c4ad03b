"""The exceptions that raytide raises on purpose.

RaytideError                 error                1  500
├── UsageError               usage                2  400   the request itself is wrong
│   ├── ConfigError          bad_config           2  400   a file or spec names an unknown key or a bad value
│   ├── DataError            bad_data             2  400   a missing file, an empty corpus, a malformed dataset
│   ├── CapacityError        cannot_fit           2  400   no node type can ever hold what is asked
│   ├── TooLargeError        too_large            2  413   a request's body is larger than its route allows
│   └── TooSlowError         too_slow             2  408   a request's body did not arrive in time
├── AuthError                not_authenticated    1  401
├── DeniedError              denied               1  403   the token's team may not do this
├── QuotaError               quota                3  429   a team has reached a limit on jobs, endpoints or members
├── NotFoundError            not_found            4  404
├── ConflictError            conflict             1  409   it exists, it is running, or a port is taken
├── WaitTimeoutError         timeout              5  504   a wait timed out
├── CheckpointError          bad_checkpoint       1  500   a checkpoint is missing, torn or altered
├── StorageError             storage              1  507   a write failed: full disk, lost bucket
├── TrainError               training             1  500  a run cannot continue: NaN loss, repeated failures
├── ScriptError              script               1  500  a process of a script ended with an error
├── EngineError              engine               1  500   one request failed inside the inference engine
│   └── EngineDeadError      engine_dead          1  503   the engine is dead and must be replaced
├── OverloadedError          overloaded           1  503   the queue is full, or the server is draining; retry
├── LeaseLostError           lease_lost           1  410   the gang's lease is over
├── ProviderError            provider             1  502   a cloud refused or failed a call
└── ClusterError             cluster              1  503   Ray, a cloud, the controller or the API does not answer

Columns: class, `code`, `exit_code`, `http_status`, meaning.
"""

from __future__ import annotations

from typing import ClassVar


class RaytideError(Exception):
    """An error whose message names the affected object, with a hint about what to do."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.hint)

    def to_json(self) -> dict[str, str]:
        """Returns the error as JSON for the network. `from_json` turns it back into an error of the same class."""
        return {"code": self.code, "message": self.message, "hint": self.hint}


class UsageError(RaytideError):
    code = "usage"
    exit_code = 2
    http_status = 400


class ConfigError(UsageError):
    code = "bad_config"


class DataError(UsageError):
    code = "bad_data"


class CapacityError(UsageError):
    code = "cannot_fit"


class TooLargeError(UsageError):
    code = "too_large"
    http_status = 413


class TooSlowError(UsageError):
    code = "too_slow"
    http_status = 408


class AuthError(RaytideError):
    code = "not_authenticated"
    http_status = 401


class DeniedError(RaytideError):
    code = "denied"
    http_status = 403


class QuotaError(RaytideError):
    code = "quota"
    exit_code = 3
    http_status = 429


class NotFoundError(RaytideError):
    code = "not_found"
    exit_code = 4
    http_status = 404


class ConflictError(RaytideError):
    code = "conflict"
    http_status = 409


class WaitTimeoutError(RaytideError):
    code = "timeout"
    exit_code = 5
    http_status = 504


class CheckpointError(RaytideError):
    code = "bad_checkpoint"


class StorageError(RaytideError):
    code = "storage"
    http_status = 507


class TrainError(RaytideError):
    code = "training"


class ScriptError(RaytideError):
    code = "script"


class EngineError(RaytideError):
    code = "engine"


class EngineDeadError(EngineError):
    code = "engine_dead"
    http_status = 503


class OverloadedError(RaytideError):
    code = "overloaded"
    http_status = 503


class LeaseLostError(RaytideError):
    code = "lease_lost"
    http_status = 410


class ProviderError(RaytideError):
    code = "provider"
    http_status = 502


class ClusterError(RaytideError):
    code = "cluster"
    http_status = 503


def _rebuild(cls: type[RaytideError], message: str, hint: str) -> RaytideError:
    return cls(message, hint=hint)


def _tree(cls: type[RaytideError]) -> dict[str, type[RaytideError]]:
    """Returns the error classes by code. Other processes get the parent of a class that inherits its code."""
    found = {cls.code: cls} if "code" in vars(cls) else {}
    for sub in cls.__subclasses__():
        found |= _tree(sub)
    return found


def from_json(body: dict[str, str]) -> RaytideError:
    """Returns the error that `to_json` encoded. An unknown code becomes a plain RaytideError."""
    cls = _tree(RaytideError).get(body.get("code", ""), RaytideError)
    return cls(body.get("message", "unknown error"), hint=body.get("hint", ""))
