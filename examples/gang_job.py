"""A Ray driver that gets its nodes through raytide's queue. From this folder, with a cluster up:

eval "$(raytide status --ray)"; ray job submit --working-dir . -- python gang_job.py
"""

from __future__ import annotations

import ray

import raytide as rt

MEMBERS = 2


@ray.remote
def square(number: int) -> tuple[int, str]:
    """The work, and the node that did it."""
    return number * number, ray.get_runtime_context().get_node_labels()["raytide.io/node-id"]


def main() -> None:
    ray.init()
    with rt.connect() as tide, tide.gang(nodes=MEMBERS, cpus=1, name="squares") as gang:
        print(f"{gang.job_id} has {len(gang.members)} members")
        answers = ray.get([square.options(**gang.actor_options(i)).remote(i) for i in range(MEMBERS)], timeout=60)
    for number, (answer, node) in enumerate(answers):
        print(f"{number} squared is {answer}, computed on {node}")


if __name__ == "__main__":
    main()
