"""Histories that failed once, shrunk to the faults that they need. They are data, so that new kinds of faults do not
change them."""

from __future__ import annotations

from tests.simulation.history import Fault, History

KEPT = {
    "a worker dies in the tick in which the run ends": History(
        26,
        workers=3,
        lanes=4,
        steps=9,
        save_every=2,
        faults=(Fault(0.897, "terminate", 0.205, 0.0, 0.01), Fault(1.803, "kill", 0.730, 0.0, 0.38)),
    ),
    "a worker of an earlier driver hears that the run has finished": History(
        449, workers=2, lanes=4, steps=5, save_every=3, faults=(Fault(0.229, "crash_driver", 0.386, 0.0, 6.87),)
    ),
    "all workers die in the tick in which the run is stopped": History(
        2283,
        workers=2,
        lanes=3,
        steps=8,
        save_every=2,
        faults=(Fault(0.09, "kill_all", 0.32, 0.0, 3.88), Fault(0.094, "stop", 0.19, 0.0, 1.56)),
    ),
    "a frozen worker is told to leave before it has trained": History(
        198,
        workers=3,
        lanes=3,
        steps=6,
        save_every=2,
        faults=(Fault(0.064, "freeze_for_good", 0.671, 0.0, 0.16), Fault(0.1, "drain", 0.818, 0.0, 0.02)),
    ),
    "a worker that is scaled away freezes before it has trained": History(
        1557,
        workers=2,
        lanes=2,
        steps=4,
        save_every=3,
        faults=(Fault(0.2, "freeze_for_good", 0.701, 0.0, 0.09), Fault(0.25, "scale", 0.08, 0.0, 4.37)),
    ),
    "a frozen worker loses its connection while the run stops": History(
        3282,
        workers=1,
        lanes=4,
        steps=7,
        save_every=2,
        faults=(
            Fault(0.843, "freeze_for_good", 0.863, 0.0, 0.29),
            Fault(0.846, "stop", 0.119, 0.0, 0.0),
            Fault(0.869, "break_connection", 0.421, 0.0, 2.65),
        ),
    ),
    "events of a worker of another machine come after the end": History(
        3847,
        workers=3,
        lanes=4,
        steps=8,
        save_every=2,
        faults=(Fault(0.546, "kill_all", 0.831, 0.0, 0.02), Fault(0.924, "join", 0.505, 0.0, 0.16)),
    ),
    "a worker freezes before it connects": History(
        3570, workers=3, lanes=3, steps=3, save_every=2, faults=(Fault(0.0, "freeze_for_good", 0.388, 0.0, 0.46),)
    ),
}
