"""A lower bound of the serving cost: the cost of a buyer who knows the future. A linear programme computes the bound.
In this programme, the buyer may use fractions of nodes, and pays also for the time that a node needs to start.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from raytide.core.objects.node import CapacityType
from raytide.simulate.serving.requests import Workload
from raytide.simulate.serving.setup import ServingSetup
from raytide.simulate.serving.spot_zones import SpotZones

SLOT_S = 300.0


def lower_bound_usd(
    setup: ServingSetup, work: Workload, zones: SpotZones, usd_h: Mapping[CapacityType, float]
) -> float:
    """Returns the least cost of a buyer who knows the future and covers the work of each time slot.

    In a slot of length dt there are o on-demand nodes and s_z spot nodes in zone z. Their starts are u and v_z. All are
    >= 0. c_o and c_s are the prices, and cold is the duration of a start. The linear programme is:

        min sum dt (c_o o + c_s sum s_z) + cold (c_o u + c_s sum v_z)
        with o + sum s_z >= need; s_z <= capacity_z; u_t >= o_t - o_(t-1); v_zt >= s_zt - s_z(t-1)
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, diags, hstack, identity, kron, vstack

    slots = int(np.ceil(setup.horizon_s / SLOT_S))
    slot_of = np.minimum((work.arrival_s / SLOT_S).astype(int), slots - 1)
    need = np.bincount(slot_of, weights=work.work_s(setup.slots), minlength=slots) / SLOT_S
    room = np.array([zones.most_in(slot * SLOT_S, (slot + 1) * SLOT_S) for slot in range(slots)], dtype=float)
    kinds = 1 + room.shape[1]
    columns = slots * kinds
    rise = diags([np.ones(slots), -np.ones(slots - 1)], [0, -1])
    cover = hstack([kron(np.ones((1, kinds)), -identity(slots)), csr_array((slots, columns))])
    starts = hstack([kron(identity(kinds), rise), -identity(columns)])
    usd_s = np.array([usd_h[CapacityType.ON_DEMAND], *[usd_h[CapacityType.SPOT]] * (kinds - 1)]) / 3600.0
    cost = np.repeat(np.concatenate((usd_s * SLOT_S, usd_s * setup.cold_start_s)), slots)
    upper = np.concatenate((np.full(slots, np.inf), room.T.ravel(), np.full(columns, np.inf)))
    found = linprog(
        cost,
        A_ub=vstack([cover, starts], format="csr"),
        b_ub=np.concatenate((-need, np.zeros(columns))),
        bounds=np.stack((np.zeros_like(upper), upper), axis=1),
        method="highs",
    )
    return float(found.fun)
