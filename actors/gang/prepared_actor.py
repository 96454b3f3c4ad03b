"""A Ray actor whose environment (pip packages or a container image) is first prepared by a task on the same node."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from raytide.actors.gang import images
from raytide.actors.gang.packages import interpreter_with


class PreparedActor:
    """A Ray actor in a prepared environment. A task prepares the environment on the node that `strategy` selects. The
    actor starts when the environment is ready. `start(...)` starts the actor with the environment's options.

    If there are no packages and no image, the actor starts at once.
    """

    def __init__(
        self, start: Callable[..., Any], strategy: object, *, pip: Sequence[str] = (), image: str | None = None
    ) -> None:
        import ray

        self.image = ""
        """The image by its digest, once the actor starts in it."""
        self._asked_image = image
        self._is_killed = False
        self._actor: Future[Any] = Future()
        if not pip and image is None:
            self._actor.set_result(start())
            return
        work: Any = ray.remote(interpreter_with if image is None else images.prepare)
        preparing = work.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(image or pip)

        def begin(prepared: Future[Any]) -> None:
            """Continues on another thread: this one is Ray's own and must not wait for Ray."""
            threading.Thread(target=self._start, args=(start, prepared), name="start worker", daemon=True).start()

        preparing.future().add_done_callback(begin)

    def call(self, method: str, *args: object) -> Future[Any]:
        """Calls a method of the actor and returns a future of the method's result. If the packages or the image could
        not be prepared, the future raises the error of that preparation. If the call itself fails, the future raises
        Ray's error.
        """
        answer: Future[Any] = Future()
        if self._asked_image is None and self._actor.done() and self._actor.exception() is None:
            answer = getattr(self._actor.result(), method).remote(*args).future()
            return answer

        def ask(started: Future[Any]) -> None:
            if (error := started.exception()) is not None:
                answer.set_exception(error)
            else:
                getattr(started.result(), method).remote(*args).future().add_done_callback(partial(self._pass, answer))

        self._actor.add_done_callback(ask)
        return answer

    def kill(self) -> None:
        import ray

        self._is_killed = True
        if self._actor.done() and self._actor.exception() is None:
            ray.kill(self._actor.result())

    def _start(self, start: Callable[..., Any], prepared: Future[Any]) -> None:
        try:
            found = prepared.result()
            environment = {"py_executable": found} if self._asked_image is None else found
            self.image = environment.get("image_uri", "")
            self._actor.set_result(start(runtime_env=environment))
        except Exception as error:  # of the preparation, or that of a lost node
            self._actor.set_exception(getattr(error, "cause", None) or error)
        if self._is_killed:
            self.kill()

    def _pass(self, answer: Future[Any], result: Future[Any]) -> None:
        from ray.exceptions import RuntimeEnvSetupError

        error = result.exception()
        if error is None:
            answer.set_result(result.result())
        elif self._asked_image is not None and isinstance(error, RuntimeEnvSetupError):
            answer.set_exception(images.failure_of(self._asked_image, str(error)))
        else:
            answer.set_exception(error)
