// The answers that stand in the file, instead of a server.
const data = JSON.parse(document.getElementById("data").textContent);
export const runName = data.name;
export const isFile = true;
export const runPath = () => "run";

export class Problem extends Error {
  constructor(fields, status) { super(fields.title); Object.assign(this, { fix: "", code: "" }, fields, { status }); }
}

export async function get(path) {
  const name = path.split("?")[0].replace(/^run/, "");
  if (name in data.answers) return data.answers[name];
  throw new Problem({ title: "This is not in the file.", fix: "Open the run with shoal web." }, 404);
}

export async function post() { throw new Problem({ title: "A file cannot change a run." }, 405); }
export const act = post;
export const follow = () => () => {};
