// The answers that stand in the file, instead of a server.
const data = JSON.parse(document.getElementById("data").textContent);
export const runName = data.name;
export const isFile = true;
export const runPath = () => "run";

export class Problem extends Error {
  constructor(fields, status) { super(fields.title); Object.assign(this, { fix: "", code: "" }, fields, { status }); }
}

// The points of a series in a range of steps, which a server would answer.
function zoomed(page, from, to) {
  const kept = page.step.flatMap((step, n) => (step >= from && step <= to ? [n] : []));
  const columns = ["step", "t", "last", "least", "most"].map((name) => [name, page[name].length ? kept.map((n) => page[name][n]) : []]);
  return { ...page, ...Object.fromEntries(columns), not_finite: page.not_finite.filter((step) => step >= from && step <= to) };
}

export async function get(path) {
  const [place, query = ""] = path.split("?");
  const name = place.replace(/^run/, "");
  const found = data.answers[name];
  const asked = new URLSearchParams(query);
  if (asked.has("from")) return { ...found, series: found.series.map((page) => zoomed(page, Number(asked.get("from")), Number(asked.get("to")))) };
  if (found !== undefined) return found;
  throw new Problem({ title: "This is not in the file.", fix: "Open the run with shoal web." }, 404);
}

export async function post() { throw new Problem({ title: "A file cannot change a run." }, 405); }
export const act = post;
export const follow = () => () => {};
