// The points that new events add to the curves on the screen, as the server makes them of the same events.
const NOT_FINITE = ["nan", "inf", "-inf"]; // JSON has no such numbers: they come as text

// Who saves, and how fast each worker is.
export function liveWorkers(workers) {
  return {
    savers: new Map(workers.map((one) => [one.name, one.saves])),
    speeds: new Map(workers.filter((one) => one.state === "training").map((one) => [one.name, Number(one.samples_per_s) || 0])),
  };
}

// Extends the pages, which are copies. Returns how many points came, and whether there are some of a series without page.
export function append(pages, rows, live) {
  let added = 0;
  let unknown = false;
  const byName = new Map(pages.map((page) => [page.name, page]));
  const add = (name, row, value) => {
    const page = byName.get(name);
    const finite = typeof value === "number";
    if (!finite && !NOT_FINITE.includes(value)) return;
    if (!page) { unknown = true; return; }
    if (row.step <= (page.step.at(-1) ?? -1)) return;
    const shown = finite ? value : null;
    page.step = [...page.step, row.step]; page.t = [...page.t, row.t]; page.last = [...page.last, shown];
    if (page.least.length) { page.least = [...page.least, shown]; page.most = [...page.most, shown]; }
    if (!finite) page.not_finite = [...page.not_finite, row.step];
    added += 1;
  };
  for (const row of rows) {
    if (row.kind === "joined") live.savers.set(row.who, row.saves ?? true);
    if (row.kind === "view") for (const who of live.speeds.keys()) if (!(who in (row.carries || {}))) live.speeds.delete(who);
    if (row.kind === "left" || row.kind === "worker_died") live.speeds.delete(row.worker ?? row.who);
    if (row.kind === "step") {
      if (row.wall_s > 0) live.speeds.set(row.who, (row.samples || 0) / row.wall_s);
      if (!(live.savers.get(row.who) ?? true)) continue;
      add("loss", row, row.loss); add("lr", row, row.lr);
      if (row.wall_s > 0) {
        add("samples/s", row, [...live.speeds.values()].reduce((sum, one) => sum + one, 0));
        if (byName.has("step s/expected")) add("step s/measured", row, row.wall_s / Math.max(row.steps || 1, 1));
      }
    }
    if (row.kind === "evaluated") for (const [name, value] of Object.entries(row.metrics)) add(`${row.split}/${name}`, row, value);
  }
  return { added, unknown };
}
