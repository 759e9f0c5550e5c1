import time, sys
from tests.simulation.run import SimulatedRun
from tests.simulation.standins import happening, installed
from tests.simulation.world import START_S
with installed():
    for i in range(int(sys.argv[1])):
        t=time.time()
        run = SimulatedRun(i, workers=3, lanes=4, steps=8, save_every=3)
        with happening(run):
            run.new_driver()
            ok = run.world.run(until_s=START_S+100, done=lambda: run.finished)
            if i==0:
                for row in run.world.trace: print("%.3f %s %s"%row)
            if ok: run.check_end()
            print(ok, run.world.now_s-START_S, time.time()-t, len(run.world.trace), run.world._count)
            run.world.close()
