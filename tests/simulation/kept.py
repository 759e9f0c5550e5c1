"""Histories that failed once, shrunk to the faults that they need. They are data, so that new kinds of faults do not
change them."""

from __future__ import annotations

from tests.simulation.history import Fault, History

KEPT = {
    "a worker dies in the tick in which the run ends": History(
        672, workers=2, lanes=4, steps=5, save_every=2, faults=(Fault(0.767087368478503, "kill", 0.816, 0.0, 0.949),)
    ),
    "a worker of an earlier driver hears that the run has finished": History(
        863,
        workers=2,
        lanes=3,
        steps=3,
        save_every=4,
        faults=(Fault(0.6977907912784977, "crash_driver", 0.793, 0.0, 0.9685998),),
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
        97,
        workers=2,
        lanes=4,
        steps=5,
        save_every=2,
        faults=(Fault(0.297, "join", 0.5, 0.0, 0.1), Fault(0.925, "slow_down", 0.5, 0.0, 0.1)),
    ),
    "a worker enters a view before the source of its stream has sent anything": History(
        72891,
        workers=2,
        lanes=4,
        steps=9,
        save_every=1,
        faults=(
            Fault(0.4190727690767322, "freeze_for_good", 0.2595188666218584, 0.4831877014713697, 0.7671470949872847),
            Fault(0.4334730597502408, "join", 0.5054285239081762, 0.1025480497934288, 2.21583998996485),
            Fault(1.0615781941623605, "crash_driver", 0.7166009246601002, 0.9198313154341294, 0.22326950345604124),
        ),
    ),
    "a saver that leaves finishes its save while the next one repeats it": History(
        63752,
        workers=3,
        lanes=3,
        steps=9,
        save_every=3,
        faults=(
            Fault(0.7889827256400624, "drain", 0.09392235945861871, 0.6627626948787493, 6.1216191241350195),
            Fault(0.8089948960188386, "kill", 0.41730361334182453, 0.2545987192528244, 0.006109009355296957),
        ),
    ),
    "an evicted worker follows under another seat": History(
        18280,
        workers=2,
        lanes=4,
        steps=3,
        save_every=2,
        faults=(
            Fault(0.6428737650323305, "join", 0.43190987748451404, 0.29166370590868385, 0.016384355666522778),
            Fault(0.6449264202150795, "slow_down", 0.25426717720065284, 0.7814697557865747, 1.3416842847604065),
            Fault(0.6499056709118978, "drain", 0.94430891888854, 0.8963462633179586, 0.8118423788994835),
            Fault(1.311663040493136, "crash_driver", 0.10518947531552514, 0.07208181267913438, 0.21366117943207572),
        ),
    ),
    "a worker freezes before it connects": History(
        3570, workers=3, lanes=3, steps=3, save_every=2, faults=(Fault(0.0, "freeze_for_good", 0.388, 0.0, 0.46),)
    ),
    "a follower is further than it said when its source dies": History(
        50338,
        workers=2,
        lanes=3,
        steps=9,
        save_every=1,
        faults=(
            Fault(0.18663980098507355, "kill", 0.08625661911642091, 0.7292622971063615, 0.019354774984047),
            Fault(0.6380273092832958, "slow_down", 0.4314306604806004, 0.6346219003630158, 2.3678988448646745),
            Fault(0.6443548364227619, "isolate_machine", 0.13031486654345026, 0.2715694978416282, 6.362925371225435),
            Fault(0.7283835668785716, "kill", 0.012781546614016426, 0.8145681905022885, 0.5316197358316409),
        ),
    ),
    "a worker that is ahead finds the next driver after the others": History(
        100728,
        workers=3,
        lanes=4,
        steps=6,
        save_every=4,
        faults=(
            Fault(1.0630292053071861, "terminate", 0.5607199441351831, 0.7205213218786968, 0.38184824895745545),
            Fault(1.4107756864405836, "crash_driver", 0.7290776369498606, 0.1382710915460872, 1.3365287055460688),
        ),
    ),
    "lines of an agent's older connection come after newer ones": History(
        200045,
        workers=3,
        lanes=4,
        steps=9,
        save_every=1,
        faults=(
            Fault(0.06465904144156598, "crash_agent", 0.9861080583215008, 0.9762470614466096, 0.15743142011995115),
            Fault(0.23962611065289185, "break_connection", 0.896095641673954, 0.23207518462318244, 0.4288206840937646),
            Fault(0.9839306413265553, "join", 0.18158310347584206, 0.05849825713465906, 0.5499392205495838),
            Fault(1.0234443278165766, "freeze_driver", 0.5341661665699573, 0.8937336594042448, 0.1713738377628628),
            Fault(1.0992404294629363, "half_open", 0.25090759074026303, 0.26781702592059886, 0.2960808093591187),
        ),
    ),
    "a worker that nobody else hears is drained while it alone has steps": History(
        172,
        workers=1,
        lanes=4,
        steps=7,
        save_every=2,
        faults=(
            Fault(0.4230238276138881, "cut_one_way", 0.8484320368787123, 0.7406884808010876, 1.383585771059841),
            Fault(0.434737361547766, "drain", 0.7407722227225337, 0.842706524204411, 2.6705986104799098),
        ),
    ),
    "a joined worker that was cut off holds an older state than the checkpoint of a stopped run": History(
        336816,
        workers=3,
        lanes=4,
        steps=8,
        save_every=1,
        faults=(
            Fault(0.521208056243976, "join", 0.7950075359074666, 0.21089070276232535, 1.2865769529763111),
            Fault(0.705883154084065, "join", 0.8014934498307877, 0.582147194681643, 0.02118947167691522),
            Fault(1.664995463506734, "join_machine", 0.568562089827518, 0.6034825589901484, 0.4402088049772283),
            Fault(1.6799544200102872, "half_open", 0.9784231984396016, 0.9924688053613542, 1.7198794417129806),
            Fault(1.747674274982196, "isolate", 0.6452262688581536, 0.5770276484290287, 3.831859926100532),
            Fault(2.207228820846172, "stop", 0.3487546988651502, 0.05191038645369239, 0.2741929277804049),
        ),
    ),
}
